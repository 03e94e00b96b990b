"""z-lab's own engine, `dflash` 0.1.0 of PyPI, in fp32 and without stop tokens. usage: engine_zlab.py REQUEST ANSWER

REQUEST  {"target": folder, "jobs": [{"drafter": folder, "prompts": [ids], "new": tokens, "temperature": t}]}
ANSWER   {"engine": file of the package, "jobs": [[{"tokens": ids, "accepted": [tokens of each verify step]}]]}

Runs where `dflash` is z-lab's package; nothing of this project can be imported then.
"""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

import dflash.model

LOAD = {"dtype": torch.float32, "attn_implementation": "sdpa"}
dflash.model._cuda_time = lambda: 0.0  # the clock of its statistics is all that asks for a GPU


def answer(job: dict, target) -> list[dict]:
    drafter, info = dflash.model.DFlashDraftModel.from_pretrained(job["drafter"], output_loading_info=True, **LOAD)
    wrong = {name: value for name, value in info.items() if value}
    assert not wrong, f"loading {job['drafter']}: {wrong}"
    torch.manual_seed(0)
    out = []
    for ids in job["prompts"]:
        made = dflash.model.dflash_generate(
            drafter.eval(), target, torch.tensor([ids]), job["new"], None, job["temperature"], return_stats=True
        )
        out.append({"tokens": made.output_ids[0, len(ids) :].tolist(), "accepted": made.acceptance_lengths})
    return out


if __name__ == "__main__":
    request = json.loads(Path(sys.argv[1]).read_text())
    loaded = AutoModelForCausalLM.from_pretrained(request["target"], **LOAD).eval()
    jobs = [answer(job, loaded) for job in request["jobs"]]
    Path(sys.argv[2]).write_text(json.dumps({"engine": dflash.__file__, "jobs": jobs}))
