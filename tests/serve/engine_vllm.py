"""vLLM for CPUs, in fp32, greedy and without stop tokens. usage: engine_vllm.py REQUEST ANSWER

REQUEST  {"target": folder, "jobs": [{"drafter": folder, "drafts": S - 1, "prompts": [ids], "new": tokens}]}
ANSWER   {"engine": version, "jobs": [[{"tokens": ids, "drafts": verify steps, "accepted": draft tokens accepted}]]}

One engine after the other in one process. Prompts go one by one, so that the counters, which only ever rise, tell of
each.
"""

import json
import os
import sys
from pathlib import Path

os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
}

import vllm
from vllm.distributed import cleanup_dist_env_and_memory

COUNTERS = {"drafts": "vllm:spec_decode_num_drafts", "accepted": "vllm:spec_decode_num_accepted_tokens"}


def counted(llm) -> dict:
    values = {metric.name: metric.value for metric in llm.get_metrics() if metric.name in COUNTERS.values()}
    return {name: values.get(metric, 0) for name, metric in COUNTERS.items()}


def answer(job: dict, target: str) -> list[dict]:
    llm = vllm.LLM(
        target, dtype="float32", max_model_len=512, max_num_seqs=1, enforce_eager=True, enable_prefix_caching=False,
        speculative_config={"method": "dflash", "model": job["drafter"], "num_speculative_tokens": job["drafts"]},
        disable_log_stats=False,
    )  # fmt: skip
    sampling = vllm.SamplingParams(temperature=0.0, max_tokens=job["new"], ignore_eos=True)
    before, out = counted(llm), []
    for ids in job["prompts"]:
        made = llm.generate([{"prompt_token_ids": ids}], sampling, use_tqdm=False)
        after = counted(llm)
        out.append(
            {"tokens": list(made[0].outputs[0].token_ids)} | {name: after[name] - before[name] for name in after}
        )
        before = after
    return out


if __name__ == "__main__":
    request, jobs = json.loads(Path(sys.argv[1]).read_text()), []
    for job in request["jobs"]:
        jobs.append(answer(job, request["target"]))
        cleanup_dist_env_and_memory()  # the engine is gone, its process group is not
    Path(sys.argv[2]).write_text(json.dumps({"engine": vllm.__version__, "jobs": jobs}))
