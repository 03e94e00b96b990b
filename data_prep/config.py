"""DataConfig and CacheConfig: from prompts to tensors on disk."""

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any


def check_dtype(key: str, name: str) -> None:
    if name not in ("bfloat16", "float16", "float32"):
        raise ValueError(f"{key}: found {name}, expected bfloat16, float16 or float32")


def check_least(group: str, config, **least) -> None:
    """Refuse values below their least one; an empty value passes."""
    for name, lowest in least.items():
        value = getattr(config, name)
        if value is not None and value < lowest:
            raise ValueError(f"{group}.{name}: found {value}, expected {lowest} or more")


class Answers(Enum):
    """Who wrote the answers that are trained on."""

    target = "target"  # the target answers every prompt again; the data's own answers are not used
    data = "data"  # the data's answers are the target's own already


class CutAnswers(Enum):
    """What becomes of answers that reached data.max_new_tokens before their end."""

    keep = "keep"  # as they are, without an end-of-turn token
    drop = "drop"  # left out, and counted


class CacheMode(Enum):
    """Where the target's features come from in training."""

    offline = "offline"  # captured once, kept on disk
    online = "online"  # computed in the training process at every use; nothing is stored


class CodecKind(Enum):
    """How features are stored (see codec.py)."""

    bf16 = "bf16"  # as the target computes them, in cache.dtype
    int8 = "int8"  # a byte a channel
    lowrank = "lowrank"  # a byte for each of the leading directions


class Backend(Enum):
    """Who runs the target for capture."""

    transformers = "transformers"
    vllm = "vllm"


@dataclass
class Source:
    """One data set among several."""

    path: str = ""
    split: str = "train"  # of a data set with splits
    subset: str | None = None  # a Hub data set's configuration
    revision: str | None = None  # a Hub data set's commit; empty: the newest when the cache first meets it
    limit: int | None = None  # only the first rows
    weight: float = 1.0  # how often its rows are seen in an epoch: 2 twice, 0.5 every other time
    streaming: bool = False  # read a Hub data set as it comes, without a copy on disk

    def __post_init__(self):
        if not self.path:
            raise ValueError("data.path: nothing found, expected a file, a folder or a Hub data set; name your chats")
        check_least("data.sources", self, limit=1, weight=0.0)


@dataclass
class DataConfig:
    """Rows, and how they become token ids."""

    # JSONL, Parquet or Arrow file, a folder of such, or a Hub data set. Rows have `messages`, ShareGPT's
    # `conversations`, a `prompt`, or ready `input_ids` and `loss_mask`; also `id`, `tools`.
    path: str = ""
    split: str = "train"  # of a data set with splits
    limit: int | None = None  # only the first rows, over all sources
    sources: list[Source] = field(default_factory=list)  # several data sets, instead of path and split
    dedup: bool = True  # drop rows whose prompt stood before
    answers: Answers = Answers.target  # let the target answer, or take the answers that stand in the data
    server: list[str] = field(default_factory=list)  # OpenAI-compatible base URLs that serve the target
    concurrency: int = 64  # requests in flight at each server
    max_new_tokens: int = 1024  # of an answer
    temperature: float = 0.0  # of the answers; 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    seed: int = 0  # of sampled answers
    batch_size: int = 32  # prompts answered together, in process
    dtype: str = "float32"  # of the target that answers in process
    thinking: bool | None = None  # sets the template's `enable_thinking`; empty: leave it to the template
    cut_answers: CutAnswers = CutAnswers.keep
    max_length: int = 3072  # tokens of a row, template included; longer rows are cut and counted
    num_proc: int = 1  # processes that encode; the result is the same for any number
    heldout: float = 0.02  # share of prompts that is never trained on, chosen by a hash of the prompt

    def __post_init__(self):
        check_dtype("data.dtype", self.dtype)
        self.sources = self.sources or [Source(self.path, self.split)]
        if not 0 < self.heldout < 1:
            raise ValueError(f"data.heldout: found {self.heldout}, expected a share between 0 and 1")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"data.top_p: found {self.top_p}, expected a share above 0, at most 1")
        check_least("data", self, max_length=2, max_new_tokens=1, batch_size=1, limit=1, num_proc=1, concurrency=1)
        check_least("data", self, temperature=0.0, top_k=0)


@dataclass
class CacheConfig:
    """Where prepared data lives, and how features are captured and stored."""

    dir: Path = Path(".cache")  # prompts, answers, token ids, features; each in a folder named by what determines it
    mode: CacheMode = CacheMode.offline
    dtype: str = "bfloat16"  # of the target that is captured, and of features that no codec packs
    codec: CodecKind = CodecKind.bf16
    rank: int | None = None  # directions that lowrank keeps; empty: a tenth of the features
    fit_tokens: int = 16384  # tokens that a codec is fitted on, spread over the rows
    last: bool = False  # also store the target's last hidden state, for objectives that need its distribution
    shard_tokens: int = 32768  # tokens of a shard, about
    batch_tokens: int = 4096  # tokens of one forward of the target, padding included
    threads: int = 2  # CPU threads of a worker: the bytes must not depend on who writes them
    backend: Backend = Backend.transformers
    python: str = ""  # of the environment that has vLLM, for backend=vllm
    engine: dict[str, Any] = field(default_factory=dict)  # further arguments of vllm.LLM, e.g. tensor_parallel_size
    check_rows: int = 2  # rows by which another backend is compared with Transformers before it is trusted; 0: none

    def __post_init__(self):
        check_dtype("cache.dtype", self.dtype)
        check_least("cache", self, shard_tokens=1, batch_tokens=1, threads=1, rank=1, fit_tokens=1, check_rows=0)
        if self.backend == Backend.vllm and not self.python:
            raise ValueError("cache.python: nothing found, expected the Python that has vLLM, for cache.backend=vllm")
        if self.backend == Backend.vllm and self.last:
            raise ValueError(
                "cache.last: found true, expected false with cache.backend=vllm, which gives no normed last state"
            )
        if self.mode == CacheMode.online and self.codec != CodecKind.bf16:
            raise ValueError(
                f"cache.codec: found {self.codec.value} with cache.mode=online, expected bf16: none stored"
            )
