"""Checkpoints: one format for every engine and number of processes.

    step-000500/state.safetensors      fp32 weights and AdamW's moments, by parameter name
    step-000500/config.json            the drafter's
    step-000500/codec.safetensors      where the features were packed by a low-rank map, which `fc` reads through
    step-000500/trainer.json           step, best held-out tau, the run's resolved config; written last: the mark of a
                                       complete checkpoint

Written under a temporary name and renamed; never overwritten.
"""

import os
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config

from data_prep.codec import Codec
from data_prep.files import read_json, write_json
from data_prep.store import CODEC
from dflash.baselines import make_drafter
from dflash.model import DFlashDraftModel
from train.engine import MOMENTS


def save(
    folder: Path, state: dict[str, torch.Tensor], drafter_config: Qwen3Config, trainer: dict, codec: Codec
) -> Path:
    """Write the checkpoint of `trainer["step"]`; returns its path."""
    path = folder / f"step-{trainer['step']:06d}"
    part = path.with_name(f"{path.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    save_file({name: tensor.cpu().contiguous() for name, tensor in state.items()}, part / "state.safetensors")
    drafter_config.save_pretrained(part)
    if codec.rank is not None:
        codec.save(part / CODEC)
    with (part / "state.safetensors").open("rb") as written:
        os.fsync(written.fileno())
    write_json(part / "trainer.json", trainer)
    part.rename(path)
    return path


def complete(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(path for path in folder.glob("step-*") if path.suffix != ".part" and (path / "trainer.json").exists())


def latest(folder: Path) -> Path | None:
    return next(reversed(complete(folder)), None)


def best(folder: Path) -> Path | None:
    """The complete checkpoint with the highest held-out walked tau; the newest of equals."""
    found = complete(folder)
    return max(found, key=lambda path: (read_json(path / "trainer.json")["tau"], path.name)) if found else None


def prune(folder: Path, keep: int) -> None:
    """Delete all but the newest `keep` and the best."""
    stay = {*complete(folder)[-keep:], best(folder)}
    for path in complete(folder):
        if path not in stay:
            (path / "trainer.json").unlink()  # first: what is killed half-way must not look complete
            shutil.rmtree(path)


def load(path: Path) -> tuple[dict[str, torch.Tensor], dict]:
    """State tensors and trainer.json of a complete checkpoint."""
    if not (path / "trainer.json").exists():
        raise ValueError(f"path: {path} is not a complete checkpoint, expected a trainer.json in it")
    return load_file(path / "state.safetensors"), read_json(path / "trainer.json")


def load_drafter(path: Path, dtype: torch.dtype = torch.float32, folded: bool = True) -> DFlashDraftModel:
    """The drafter of a checkpoint, without optimiser state, its `fc` on the target's own features.

    folded=False: its `fc` on what the cache's codec gives, as it was trained.
    """
    tensors, _ = load(path)
    drafter = make_drafter(Qwen3Config.from_pretrained(path))
    weights = {name: tensor for name, tensor in tensors.items() if not name.endswith(MOMENTS)}
    if (path / CODEC).exists():
        if folded:
            weights["fc.weight"] = Codec.load(path / CODEC).fold(weights["fc.weight"])
        else:
            drafter.fc = torch.nn.Linear(*reversed(weights["fc.weight"].shape), bias=False)
    drafter.load_state_dict(weights, strict=True)
    return drafter.to(dtype).eval()
