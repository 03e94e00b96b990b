"""DataConfig and CacheConfig: from prompts to tensors on disk."""

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path


def check_dtype(key: str, name: str) -> None:
    if name not in ("bfloat16", "float16", "float32"):
        raise ValueError(f"{key}: found {name}, expected bfloat16, float16 or float32")


class Answers(Enum):
    """Who wrote the answers that are trained on."""

    target = "target"  # the target answers every prompt again; the data's own answers are not used
    data = "data"  # the data's answers are the target's own already


class CacheMode(Enum):
    """Where the target's features come from in training."""

    offline = "offline"  # captured once, kept on disk


@dataclass
class DataConfig:
    """Rows, and how they become token ids."""

    path: str = ""  # JSONL of {id, messages}, or the Hub id of a data set with a `messages` column
    split: str = "train"  # of a Hub data set
    limit: int | None = None  # only the first rows
    answers: Answers = Answers.target  # let the target answer, or take the answers that stand in the data
    server: list[str] = field(default_factory=list)  # OpenAI-compatible base URLs that serve the target
    max_new_tokens: int = 1024  # of an answer
    batch_size: int = 32  # prompts answered together, in process
    dtype: str = "float32"  # of the target that answers in process
    thinking: bool | None = None  # sets the template's `enable_thinking`; empty: leave it to the template
    max_length: int = 3072  # tokens of a row, template included; longer rows are cut and counted
    heldout: float = 0.02  # share of prompts that is never trained on, chosen by a hash of the prompt

    def __post_init__(self):
        check_dtype("data.dtype", self.dtype)
        if not self.path:
            raise ValueError("data.path: nothing found, expected a JSONL file or a Hub data set; name your chats")
        if not 0 < self.heldout < 1:
            raise ValueError(f"data.heldout: found {self.heldout}, expected a share between 0 and 1")
        for name, least in {"max_length": 2, "max_new_tokens": 1, "batch_size": 1, "limit": 1}.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"data.{name}: found {value}, expected {least} or more")


@dataclass
class CacheConfig:
    """Where prepared data lives, and how features are stored."""

    dir: Path = Path(".cache")  # answers, token ids, features; each in a folder named by the hash of what made it
    mode: CacheMode = CacheMode.offline
    dtype: str = "bfloat16"  # of the target that is captured, and of the stored features
    shard_tokens: int = 32768  # tokens of a shard, about
    batch_tokens: int = 4096  # tokens of one forward of the target, padding included

    def __post_init__(self):
        check_dtype("cache.dtype", self.dtype)
        if min(self.shard_tokens, self.batch_tokens) < 1:
            raise ValueError(
                f"cache.shard_tokens, cache.batch_tokens: found {self.shard_tokens}, {self.batch_tokens}, expected 1 or"
                " more"
            )
