"""RunConfig: everything that a run is told. Each field's comment is its manual; values live in configs/."""

import re
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from data_prep.config import CacheConfig, CodecKind, DataConfig, check_least
from dflash.config import DrafterConfig, Kind, ModelConfig
from dflash.objective import Objective


class Stage(Enum):
    all = "all"
    train = "train"
    evaluate = "evaluate"
    export = "export"
    verify = "verify"
    diagnose = "diagnose"
    push = "push"


class Anchors(Enum):
    """Which eligible tokens blocks start at."""

    random = "random"  # drawn anew each epoch
    fixed = "fixed"  # every S-th, so that an answer is cut into blocks as in block diffusion (an ablation)


class EngineKind(Enum):
    auto = "auto"  # torch for one process, deepspeed for several
    torch = "torch"
    deepspeed = "deepspeed"


class Wandb(Enum):
    off = "off"
    offline = "offline"
    online = "online"


def check_positive(group: str, config) -> None:
    """Refuse counts below 1 among a dataclass's own fields."""
    for name, value in vars(config).items():
        if type(value) is int and value < 1 and name not in ("seed", "zero_stage", "node_rank", "prefetch", "top_k"):
            raise ValueError(f"{f'{group}.{name}'.lstrip('.')}: found {value}, expected 1 or more")


@dataclass
class BatchConfig:
    """A step's rows, and how they are packed. Budgets change speed and memory, never the gradient."""

    rows_per_step: int = 64  # rows of one optimiser step, over all ranks
    anchors: Anchors = Anchors.random
    anchors_per_row: int = 512  # blocks of one row and epoch, at most
    bin_tokens: int = 8192  # context tokens of one micro-batch, at most
    bin_anchors: int = 1024  # blocks of one micro-batch, at most
    chunk_slots: int = 512  # slots whose logits exist at one time

    def __post_init__(self):
        check_positive("batch", self)
        if self.anchors_per_row > self.bin_anchors:
            raise ValueError(
                f"batch.bin_anchors: found {self.bin_anchors}, expected at least"
                f" batch.anchors_per_row={self.anchors_per_row}"
            )


class Schedule(Enum):
    """How the learning rate goes on behind the warm-up."""

    cosine = "cosine"  # to zero, over all steps
    wsd = "wsd"  # constant, then linear to zero over the last `decay` share of the steps
    constant = "constant"


@dataclass
class OptimConfig:
    """AdamW with linear warm-up, and what it minimises."""

    objective: Objective = Objective.decay  # formulas: dflash/objective.py

    epochs: int = 6  # passes over the data
    steps: int | None = None  # stop after so many steps instead
    lr: float = 6e-4  # peak learning rate
    warmup: float = 0.04  # share of the steps that the learning rate rises
    schedule: Schedule = Schedule.cosine
    decay: float = 0.2  # of wsd: share of the steps that the learning rate falls
    weight_decay: float = 0.0  # on matrices, not on norms
    beta1: float = 0.9
    beta2: float = 0.95
    clip: float = 1.0  # largest norm of the gradient
    max_skips: int = 10  # steps in a row with a loss or gradient that is not finite; each is skipped and counted

    def __post_init__(self):
        check_positive("optim", self)
        if not 0 < self.decay <= 1:
            raise ValueError(f"optim.decay: found {self.decay}, expected a share above 0, at most 1")
        if not (self.lr > 0 and self.clip > 0 and 0 <= self.warmup < 1):
            raise ValueError(
                f"optim.lr, optim.clip, optim.warmup: found {self.lr}, {self.clip}, {self.warmup}, expected positive"
                " numbers, and a share below 1"
            )


@dataclass
class EngineConfig:
    """What runs a step."""

    kind: EngineKind = EngineKind.auto
    zero_stage: int = 1  # of DeepSpeed: 0, 1 or 2
    dtype: str = "bfloat16"  # of the computation; master weights and moments are fp32 always
    compile: bool = False  # torch.compile the drafter
    checkpoint: bool = False  # recompute each layer in the backward pass: less memory, a third more work
    prefetch: int = 1  # steps that are read ahead in a thread; 0 reads in the loop
    deepspeed: Path | None = None  # a DeepSpeed JSON to add to the run's own; stage, batch, clip and dtype must agree

    def __post_init__(self):
        if self.zero_stage not in (0, 1, 2):
            raise ValueError(f"engine.zero_stage: found {self.zero_stage}, expected 0, 1 or 2")
        if self.dtype not in ("bfloat16", "float32"):
            raise ValueError(f"engine.dtype: found {self.dtype}, expected bfloat16 or float32")


@dataclass
class LaunchConfig:
    """Processes, of this node and others. Under Slurm, `srun` with one task a node or one a GPU needs none of it."""

    ranks: int | None = None  # of this node; empty: one for each visible GPU, one without GPUs
    nnodes: int = 1  # start the same command on each
    node_rank: int = 0  # 0 on the node that rendezvous names
    rendezvous: str = ""  # HOST:PORT of the first node; for several
    grace: int = 60  # seconds that ranks have to save after SIGTERM or SIGUSR1

    def __post_init__(self):
        check_positive("launch", self)
        if self.nnodes > 1 and (":" not in self.rendezvous or not 0 <= self.node_rank < self.nnodes):
            raise ValueError(
                f"launch.rendezvous, launch.node_rank: found {self.rendezvous!r}, {self.node_rank}, expected HOST:PORT"
                f" of the first node and a number below launch.nnodes={self.nnodes}"
            )


@dataclass
class LogConfig:
    """Where a run reports."""

    every: int = 10  # steps between two lines
    wandb: Wandb = Wandb.off
    project: str = "dflash-trainer"  # of wandb

    def __post_init__(self):
        check_positive("log", self)


@dataclass
class EvaluateConfig:
    """Held-out measures while training, and the evaluation at its end."""

    every: int = 500  # steps between two measures on held-out rows
    rows: int = 32  # held-out rows of such a measure, at most
    sets: list[str] = field(default_factory=lambda: ["humaneval", "mt_bench"])  # others: train/sets.py, or a JSONL file
    local: dict[str, str] = field(default_factory=dict)  # copies of public sets: '+evaluate.local={gsm8k: /path}'
    prompts: int = 12  # conversations of each set, or NAME:COUNT in sets; all their turns are asked
    max_new_tokens: int = 512  # of an answer
    temperature: float = 0.0  # of both sides; 0 is greedy. Identity is compared greedily always
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    seed: int = 0  # of sampled answers: a prompt's draws depend on it and on the prompt's id
    sampled_proposals: bool = False  # let the drafter sample too, at a temperature
    identity_prompts: int = 4  # of each set, compared token for token in fp32
    identity_tokens: int = 48
    block_size: int | None = None  # at most the trained one, which is the default
    # Base URLs of vLLM or SGLang servers by the drafter's name, `alone` for the target without one: stage=evaluate
    # measures these instead. '+evaluate.servers={alone: http://HOST:8001/v1, eagle3: http://HOST:8002/v1}'
    servers: dict[str, str] = field(default_factory=dict)
    concurrency: list[int] = field(default_factory=lambda: [1, 4, 16])  # requests at a time at a server, one by one

    def __post_init__(self):
        check_positive("evaluate", self)
        for name, url in self.servers.items():
            if not re.fullmatch(r"[\w-]+", name):
                raise ValueError(f"evaluate.servers: found the name {name!r}, expected letters, digits, - and _")
            if not re.fullmatch(r"https?://[^/\s?#]+(/[^\s?#]*)?", str(url)):
                raise ValueError(f"evaluate.servers.{name}: found {url!r}, expected a base URL as http://HOST:8000/v1")
        if {*self.servers} == {"alone"}:
            raise ValueError("evaluate.servers: found alone only, expected a server with a drafter too")
        if not self.concurrency or min(self.concurrency) < 1 or len({*self.concurrency}) < len(self.concurrency):
            raise ValueError(f"evaluate.concurrency: found {self.concurrency}, expected different numbers, 1 or more")
        check_least("evaluate", self, temperature=0.0, top_k=0)
        if not 0 < self.top_p <= 1:
            raise ValueError(f"evaluate.top_p: found {self.top_p}, expected a share above 0, at most 1")


@dataclass
class ExportConfig:
    """What an export is made of, beside z-lab's format."""

    speculators: bool = False  # also write speculators' format, to runs/NAME/export-speculators
    tables: bool = False  # copy the target's embedding and head into it
    shard: str = "5GB"  # largest file of weights


@dataclass
class DiagnoseConfig:
    """Where acceptance is lost."""

    prompts: int = 32  # held-out rows, at most
    server: str = ""  # base URL of a vLLM server that runs the export, for the last rung


@dataclass
class RunConfig:
    """A run. `model` has no default: `+model=NAME` adds one of configs/model/."""

    model: ModelConfig
    drafter: DrafterConfig
    data: DataConfig
    cache: CacheConfig
    batch: BatchConfig
    optim: OptimConfig
    engine: EngineConfig
    launch: LaunchConfig
    log: LogConfig
    evaluate: EvaluateConfig
    export: ExportConfig
    diagnose: DiagnoseConfig
    stage: Stage = Stage.all
    name: str | None = None  # of the run; empty: the model's file name
    runs: Path = Path("runs")  # the run's folder is runs/name
    path: Path | None = None  # export or checkpoint to work on; it knows its model, so that +model is not needed
    save_every: int = 500  # steps between two checkpoints; the last step is saved always
    push_to_hub: str | None = None  # OWNER/NAME on the Hub, for the export, after training or with stage=push
    private: bool = False  # make that repository private
    dry_run: bool = False  # only print what would be pushed
    keep: int = 2  # newest checkpoints that stay, beside the best
    seed: int = 0
    check: bool = False  # validate everything that can be without loading weights, then stop
    profile: bool = False  # write a torch profiler trace of steps 3 to 5 to runs/name/profile.json

    def __post_init__(self):
        check_positive("", self)
        unfit = {
            f"stage={self.stage.value}": self.stage != Stage.train,
            "engine.checkpoint=true": self.engine.checkpoint,
            "model.init_from": self.model.init_from is not None,
            "cache.codec=lowrank": self.drafter.kind == Kind.mtp and self.cache.codec == CodecKind.lowrank,
        }
        if self.drafter.kind != Kind.dflash and (found := [name for name, is_so in unfit.items() if is_so]):
            raise ValueError(
                f"drafter.kind: found {self.drafter.kind.value} with {found[0]}, expected dflash; a baseline is trained"
                " (stage=train) and compared (docs/comparison.md), no engine runs it"
            )
        if self.evaluate.servers and self.stage != Stage.evaluate:
            raise ValueError(
                f"evaluate.servers: found {', '.join(self.evaluate.servers)} with stage={self.stage.value}, expected"
                " stage=evaluate path=EXPORT: a server runs an export that is there"
            )
        if self.optim.objective == Objective.distill and not self.cache.last:
            raise ValueError(
                "cache.last: found false, expected true for optim.objective=distill: it needs those states"
            )

    @property
    def folder(self) -> Path:
        return self.runs / str(self.name)
