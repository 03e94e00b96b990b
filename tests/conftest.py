"""Settings of the whole suite: no network, no more threads than asked for, the same examples in every run."""

import os
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported
os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", os.path.join(tempfile.gettempdir(), "hypothesis"))

import torch
from hypothesis import settings

torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
settings.register_profile("oracle", database=None, deadline=None, derandomize=True)
settings.load_profile("oracle")
