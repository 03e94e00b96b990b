"""Where a run reports: the console, `log.jsonl` in the run's folder, and wandb (off by default; its one door)."""

import json
from pathlib import Path

from train.config import LogConfig, Wandb


class Log:
    """A context manager; only rank 0 has one that writes (`enabled`)."""

    def __init__(self, folder: Path, config: LogConfig, name: str, run_config: dict, enabled: bool, run_id=None):
        self.enabled, self.wandb, self.run_id = enabled, None, run_id
        if not enabled:
            return
        folder.mkdir(parents=True, exist_ok=True)
        self.file = (folder / "log.jsonl").open("a")
        if config.wandb != Wandb.off:
            import wandb

            mode = config.wandb.value
            self.wandb = wandb.init(
                project=config.project, name=name, dir=folder, mode=mode, config=run_config, id=run_id, resume="allow"
            )
            self.run_id = self.wandb.id  # a resumed run goes on in the same curves

    def __enter__(self):
        return self

    def __exit__(self, *error):
        if self.enabled:
            self.file.close()
        if self.wandb is not None:
            self.wandb.finish()

    def write(self, line: str, values: dict) -> None:
        """`line` to the console, `values` (numbers, and lists of one number a slot) to the file and to wandb."""
        if not self.enabled:
            return
        print(line, flush=True)
        self.file.write(json.dumps(values) + "\n")
        self.file.flush()
        if self.wandb is not None:
            flat = {}
            for name, value in values.items():
                flat |= {f"{name}/{i}": v for i, v in enumerate(value, 1)} if isinstance(value, list) else {name: value}
            self.wandb.log(flat, step=values["step"])
