"""Where a run reports: the console, `log.jsonl` in the run's folder, and wandb (off by default; its one door)."""

import json
from pathlib import Path

from train.config import LogConfig, Wandb


class Log:
    """Use as a context manager on rank 0; `write` takes plain numbers and lists of them."""

    def __init__(self, folder: Path, config: LogConfig, name: str, run_config: dict):
        folder.mkdir(parents=True, exist_ok=True)
        self.file = (folder / "log.jsonl").open("a")
        self.wandb = None
        if config.wandb != Wandb.off:
            import wandb

            self.wandb = wandb.init(
                project=config.project, name=name, dir=folder, mode=config.wandb.value, config=run_config
            )

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.file.close()
        if self.wandb is not None:
            self.wandb.finish()

    def write(self, line: str, values: dict) -> None:
        """`line` to the console, `values` to the file and to wandb (lists as one number a slot)."""
        print(line, flush=True)
        self.file.write(json.dumps(values) + "\n")
        self.file.flush()
        if self.wandb is not None:
            flat = {}
            for name, value in values.items():
                flat |= {f"{name}/{i}": v for i, v in enumerate(value, 1)} if isinstance(value, list) else {name: value}
            self.wandb.log(flat, step=values["step"])
