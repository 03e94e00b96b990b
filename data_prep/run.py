"""Prepare data: `python data_prep/run.py +model=NAME stage=regenerate|encode|capture|audit [key=value ...]`.

Each stage runs those before it, and does nothing that is done already.
"""

import difflib
import os
import sys
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, get_origin

ROOT = Path(__file__).resolve().parent.parent
if not __package__:  # run as a script: python put data_prep/ on the path, the packages lie one above
    sys.path[0] = str(ROOT)

# For each shape oneDNN keeps a compiled kernel and PyTorch what it is called with, 1,024 of each by default, and most
# batches of a capture have their own (pytorch #27971). Training, which meets its shapes again, wants more than capture.
for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
    os.environ.setdefault(name, "64" if __package__ else "16")

from hydra import compose, initialize_config_dir  # noqa: E402
from hydra.core.config_store import ConfigStore  # noqa: E402
from hydra.errors import HydraException  # noqa: E402
from omegaconf import OmegaConf  # noqa: E402
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException  # noqa: E402

from data_prep.config import CacheConfig, DataConfig  # noqa: E402
from data_prep.files import read_json  # noqa: E402
from dflash.config import ModelConfig  # noqa: E402


class Stage(Enum):
    regenerate = "regenerate"
    encode = "encode"
    capture = "capture"
    audit = "audit"


@dataclass
class PrepConfig:
    """What data_prep/run.py is told. `model` has no default: `+model=NAME` adds one of configs/model/."""

    model: ModelConfig
    data: DataConfig
    cache: CacheConfig
    stage: Stage = Stage.capture
    check: bool = False  # validate everything that can be without loading weights, then stop
    batch: dict[str, Any] = field(default_factory=dict)  # what a model file says to train/run.py; not used here
    optim: dict[str, Any] = field(default_factory=dict)  # likewise
    evaluate: dict[str, Any] = field(default_factory=dict)  # likewise


def load_config(name: str, schema: type, arguments: list[str]):
    """configs/NAME.yaml and the overrides as a `schema` object. Raises ValueError, one line, for what does not fit."""
    # DeepSpeed's launcher adds --local_rank; the environment says the same.
    overrides = [argument for argument in arguments if not argument.startswith(("--local_rank", "--local-rank"))]
    models = sorted(path.stem for path in (ROOT / "configs/model").glob("*.yaml"))
    if unknown := _unknown_key(schema, overrides):
        raise ValueError(unknown)
    store = ConfigStore.instance()
    store.store(name=f"{name}_schema", node=schema)
    extra = []
    if not any(override.startswith("+model=") for override in overrides) and (saved := _saved(overrides)) is not None:
        store.store(group="model", name="saved", node=saved, package="_global_")
        extra = ["+model=saved"]
    try:
        with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
            return OmegaConf.to_object(compose(name, [*overrides, *extra]))
    except MissingMandatoryValue as error:
        raise ValueError(f"model: missing ({error.full_key}), expected +model=NAME with one of {models}") from None
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(_explain(error, overrides, models)) from None


def _saved(overrides: list[str]) -> dict | None:
    """What an export or a checkpoint at `path=` says of its own making; it stands in the place of a model file."""
    path = next((Path(override.partition("=")[2]) for override in overrides if override.startswith("path=")), None)
    if path is None:
        return None
    if (path / "trainer.json").exists():
        saved = read_json(path / "trainer.json")["config"]
    elif (path / "dflash_training.json").exists():
        training = read_json(path / "dflash_training.json")
        saved = training.get("config", {}) | {"model": training["model"]}
    else:
        raise ValueError(f"path: found {path}, expected a complete checkpoint or an export; or add +model=NAME")
    return {group: saved[group] for group in ("model", "data", "cache", "batch", "optim", "evaluate") if group in saved}


def _unknown_key(schema: type, overrides: list[str]) -> str | None:
    """One line for the first override whose key the schema does not have, with the nearest one."""
    for key in (override.lstrip("+~").split("=")[0] for override in overrides):
        if (ROOT / "configs" / key).is_dir():  # a group of files, not a key
            continue
        known = schema
        for part in key.split("."):
            if get_origin(known) is dict:  # free: passed on to a library
                break
            names = {item.name: item.type for item in fields(known)} if is_dataclass(known) else {}
            if part not in names:
                near = difflib.get_close_matches(part, names, n=1)
                hint = f"did you mean {near[0]}?" if near else "check the spelling"
                return f"{key}: no such key, expected one of {sorted(names)}; {hint}"
            known = names[part]
    return None


def _explain(error: Exception, overrides: list[str], models: list[str]) -> str:
    """One line for a config that Hydra refused."""
    given = next((override for override in overrides if override.lstrip("+~").startswith("model=")), None)
    if given is not None and given not in {f"+model={name}" for name in models}:
        return f"model: found {given!r}, expected +model=NAME with one of {models}"
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    line, *more = str(cause).splitlines()
    if line.endswith("while composing config:"):  # a file's: the reason stands in the second line
        line = more[0]
    if "is not in struct" in line:  # the key itself is known by now: it is one of a dict
        line += "; put a + before the override, as in '+evaluate.local={gsm8k: PATH}'"
    return f"{getattr(cause, 'full_key', None) or 'config'}: {line}"


def run_main(main, name: str, schema: type) -> None:
    """Load the config and call `main`; a mistake of the user ends in one line, DFLASH_TRACE=1 shows where it rose."""
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(f"{sys.modules['__main__'].__doc__}\nKeys (explained in the config.py files):\n\n{_help(schema)}")
        return
    try:
        main(load_config(name, schema, sys.argv[1:]))
    except (ValueError, OSError) as error:
        if os.environ.get("DFLASH_TRACE"):
            raise
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from None


def _help(schema: type, prefix: str = "") -> str:
    lines = []
    for item in fields(schema):
        if is_dataclass(item.type):
            lines.append(f"{prefix}{item.name}: {item.type.__doc__.splitlines()[0]}")
            lines.append(_help(item.type, f"{prefix}{item.name}."))
        else:
            values = "|".join(item.type.__members__) if isinstance(item.type, type(Enum)) else ""
            lines.append(f"  {prefix}{item.name}{'=' if values else ''}{values}")
    return "\n".join(lines)


def main(config: PrepConfig) -> None:
    from data_prep.plan import check, print_plan
    from data_prep.prepare import Preparation

    if config.check:
        check(config.model, config.data, config.cache)
        return
    preparation = Preparation(config.model, config.data, config.cache)
    if config.stage == Stage.audit:
        preparation.audit()
        return
    print_plan(preparation)
    stages = {
        Stage.regenerate: preparation.answer,
        Stage.encode: preparation.encode,
        Stage.capture: preparation.capture,
    }
    stages[config.stage]()


if __name__ == "__main__":
    run_main(main, "data_prep", PrepConfig)
