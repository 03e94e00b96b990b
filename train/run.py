"""Train a DFlash drafter: `python train/run.py +model=NAME [key=value ...]`.

stage=all (default) prepares what is missing, trains, exports, evaluates, and pushes to the Hub where push_to_hub names
a repository. Alone: stage=train, export, evaluate, verify (is an export what was trained?), diagnose (where is
acceptance lost?) and push; the latter five take path=, an export or checkpoint, instead of +model.
"""

import contextlib
import os
import sys
from pathlib import Path

if not __package__:  # run as a script: python put train/ on the path, the packages lie one above
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from data_prep.run import run_main
from train.config import RunConfig, Stage


def main(config: RunConfig) -> None:
    from data_prep.plan import check
    from train import launch

    launch.adopt_slurm(config.launch)
    if config.name is None:
        config.name = next((a.split("=")[1] for a in sys.argv[1:] if a.startswith("+model=")), "")
    trains = config.stage in (Stage.all, Stage.train)
    if trains and config.path is not None:
        raise ValueError(
            f"path: found {config.path} with stage={config.stage.value}, expected a stage that works on it"
        )
    if config.stage == Stage.push and config.push_to_hub is None:
        raise ValueError("push_to_hub: nothing found, expected OWNER/NAME for stage=push")
    if config.check:
        check(config.model, config.data, config.cache)
    elif not trains:
        finish(config)
    elif launch.launched():
        train(config)
        if config.stage == Stage.all and not launch.ours() and os.environ["RANK"] == "0":
            finish(config)
        launch.leave()
    else:
        run(config)


def run(config: RunConfig) -> None:
    """Data stages in this process, before any process group exists; then the ranks; then evaluation and export."""
    from data_prep.plan import print_plan
    from data_prep.prepare import Preparation
    from train import launch
    from train.data import require_room
    from train.evaluate import evaluation_prompts
    from train.publish import check_repository

    preparation = Preparation(config.model, config.data, config.cache)
    print_plan(preparation)
    if config.stage == Stage.all:  # what cannot be had is refused now, not behind the training
        evaluation_prompts(config, preparation)
        if config.push_to_hub is not None:
            check_repository(config.push_to_hub)
    if not preparation.features_folder.exists():
        require_room(preparation.encode(), config.batch)
    preparation.features()
    if launch.num_ranks(config.launch) * config.launch.nnodes > 1:
        launch.run_ranks(str(Path(__file__).resolve()), sys.argv[1:], config.launch)
    else:
        train(config)
    if config.stage == Stage.all and config.launch.node_rank == 0:
        finish(config)


def train(config: RunConfig) -> None:
    """One rank's part of the training."""
    import torch
    import torch.distributed as dist

    from data_prep.config import CacheMode
    from data_prep.prepare import Preparation
    from data_prep.store import Online, Store
    from dflash.baselines import make_drafter
    from dflash.target import default_device, load_ends
    from train import launch
    from train.config import EngineKind
    from train.engine import start_process_group
    from train.trainer import fit, start

    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    device = default_device()
    start_process_group(device, config.engine.kind == EngineKind.deepspeed)
    preparation = Preparation(config.model, config.data, config.cache)
    with contextlib.ExitStack() as stack:
        if not launch.ours():  # ranks of another launcher prepare together; `run` has done it else
            preparation.features()
        if config.cache.mode == CacheMode.online:
            store = Online(preparation.rows_folder, stack.enter_context(preparation.running_target()))
        else:
            store = Store(preparation.features_folder)
        torch.manual_seed(config.seed)
        drafter = make_drafter(preparation.drafter, config.drafter.kind)
        ends = load_ends(
            preparation.target, preparation.drafter, dtype=getattr(torch, config.engine.dtype),
            revision=config.model.revision, trust_remote_code=config.model.trust_remote_code,
        )  # fmt: skip
        start(drafter, ends, store, preparation)
        fit(config, store, drafter, ends, device, preparation.provenance(store))
    if dist.is_initialized():
        dist.destroy_process_group()


def finish(config: RunConfig) -> None:
    """What follows the training, or works on `path` alone: export, evaluation and card, push; or one stage of it."""
    from train.diagnose import diagnose
    from train.evaluate_server import evaluate_server
    from train.export import export_checkpoint
    from train.publish import publish
    from train.report import evaluate_export
    from train.verify import verify_path

    folder, stage = config.path, config.stage
    if stage == Stage.verify:
        verify_path(folder)
    if stage == Stage.diagnose:
        diagnose(config)
    if stage in (Stage.all, Stage.export):
        folder = export_checkpoint(config)
    if stage in (Stage.all, Stage.evaluate):
        evaluate_here = evaluate_server if config.evaluate.servers else evaluate_export
        evaluate_here(config, folder or config.folder / "export")
    if config.push_to_hub is not None and stage in (Stage.all, Stage.push):
        publish(folder or config.folder / "export", config.push_to_hub, config.private, config.dry_run)


if __name__ == "__main__":
    run_main(main, "train", RunConfig)
