"""Our exported code against z-lab's published generator: same target, drafter, prompts and tokens, alternately.

    python tests/bench/zlab.py [export]

Both run in one process of z-lab's environment (`make .venv/zlab`: their package, the Transformers that they pin); ours
as a user loads it, through AutoModel and trust_remote_code. Greedy, bf16, no stop tokens. Default export: runs/demo's.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NEW, ROUNDS = 64, 3


def child(target_path: str, export: str, prompts: list[list[int]]) -> None:
    import torch
    from transformers import AutoModel, AutoModelForCausalLM

    import dflash.model  # z-lab's

    assert "zlab" in dflash.__file__, dflash.__file__
    dflash.model._cuda_time = time.perf_counter  # the clock of its statistics is all that asks for a GPU
    load = {"dtype": torch.bfloat16}
    target = AutoModelForCausalLM.from_pretrained(target_path, attn_implementation="sdpa", **load).eval()
    theirs = dflash.model.DFlashDraftModel.from_pretrained(export, attn_implementation="sdpa", **load).eval()
    mine = AutoModel.from_pretrained(export, trust_remote_code=True, **load).eval()

    def ours(ids):
        return mine.spec_generate(target, ids, NEW)

    def zlab(ids):
        return dflash.model.dflash_generate(theirs, target, ids, NEW, None, 0.0, return_stats=True).output_ids

    ways, seconds, same = {"ours": ours, "z-lab": zlab}, {"ours": 0.0, "z-lab": 0.0}, 0
    for number in range(-1, ROUNDS):  # the first round warms up
        for place, ids in enumerate(prompts):
            ids, out = torch.tensor([ids]), {}
            for name in list(ways) if (number + place) % 2 else reversed(list(ways)):
                began = time.perf_counter()
                out[name] = ways[name](ids)[0, : ids.shape[1] + NEW].tolist()
                seconds[name] += (time.perf_counter() - began) * (number >= 0)
            same += out["ours"] == out["z-lab"]
    rate = {name: ROUNDS * len(prompts) * NEW / spent for name, spent in seconds.items()}
    print(f"tokens/s: {rate}; the same tokens in {same} of {(ROUNDS + 1) * len(prompts)} answers (bf16)")
    print(f"ratio ours / z-lab {rate['ours'] / rate['z-lab']:.3f} (at least 1.0 is wanted)")


def main(export: str = "runs/demo/export") -> None:
    sys.path.insert(0, str(ROOT))
    from data_prep.prepare import Preparation
    from data_prep.run import load_config
    from train.config import RunConfig
    from train.evaluate import evaluation_prompts

    config = load_config("train", RunConfig, ["+model=demo", "evaluate.sets=[arithmetic]", "evaluate.prompts=8"])
    preparation = Preparation(config.model, config.data, config.cache)
    prompts = [prompt.ids for prompt in evaluation_prompts(config, preparation)["arithmetic"]]
    request = json.dumps([str(Path(preparation.target).resolve()), str(Path(export).resolve()), prompts])
    command = [sys.executable, str(Path(__file__).resolve()), "child"]
    env = {**os.environ, "PYTHONPATH": str(ROOT / ".venv/zlab"), "PYTHONSAFEPATH": "1"}
    subprocess.run(command, input=request.encode(), check=True, env=env, cwd="/")


if __name__ == "__main__":
    if sys.argv[1:] == ["child"]:
        child(*json.loads(sys.stdin.read()))
    else:
        main(*sys.argv[1:])
