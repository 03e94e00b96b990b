"""What runs a step: plain torch on one process, DeepSpeed ZeRO 0, 1 or 2 on several. The one door to deepspeed.

Both engines compute in `engine.dtype`, keep fp32 master weights and moments, divide the sum of losses by the step's one
global weight, clip, and give and take their whole state as plain named tensors, so that a checkpoint of one resumes in
the other: `name` the fp32 weight, `name/exp_avg` and `name/exp_avg_sq` AdamW's moments.
"""

import contextlib
import os
import socket

import torch
import torch.distributed as dist
from torch import nn

from data_prep.files import read_json
from train.config import EngineConfig, EngineKind, OptimConfig

MOMENTS = ("exp_avg", "exp_avg_sq")


def param_groups(module: nn.Module, optim: OptimConfig) -> list[dict]:
    """AdamW's groups: weight decay on matrices, none on norms."""
    parameters = list(module.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": optim.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return groups


def adamw(module: nn.Module, optim: OptimConfig, fused: bool = False) -> torch.optim.AdamW:
    betas = (optim.beta1, optim.beta2)
    return torch.optim.AdamW(param_groups(module, optim), lr=optim.lr, betas=betas, eps=1e-8, fused=fused)


class TorchEngine:
    """One process: fp32 module, autocast to the compute dtype."""

    def __init__(self, drafter: nn.Module, optim: OptimConfig, engine: EngineConfig, device: torch.device):
        self.module = drafter.float().to(device)
        self.optimizer = adamw(self.module, optim, fused=True)
        self.clip, self.dtype, self.device = optim.clip, getattr(torch, engine.dtype), device

    def forward(self, *inputs):
        with self.compute():
            return self.module(*inputs)

    __call__ = forward

    def compute(self):
        if self.dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, self.dtype)

    def backward(self, loss: torch.Tensor, step_weight: float, last: bool) -> None:
        """Add the gradient of loss / step_weight. last: whether this is the step's last micro-batch of this rank."""
        (loss / step_weight).backward()

    def step(self, lr: float) -> torch.Tensor:
        """Clip, update, clear; returns the gradient's norm before clipping, on the device: nothing here waits for it.

        Where the norm is not finite, weights, moments and step count stay as they are.
        """
        norm = nn.utils.clip_grad_norm_(self.module.parameters(), self.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.found_inf = (~norm.isfinite()).float()  # how AMP's scaler tells the fused AdamW to skip
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    def state(self) -> dict[str, torch.Tensor]:
        tensors = {}
        for name, parameter in self.module.named_parameters():
            tensors[name] = parameter.detach().clone()
            for moment in MOMENTS:
                held = self.optimizer.state.get(parameter, {}).get(moment)
                tensors[f"{name}/{moment}"] = torch.zeros_like(parameter) if held is None else held.clone()
        return tensors

    @torch.no_grad()
    def load_state(self, tensors: dict[str, torch.Tensor], step: int) -> None:
        for name, parameter in self.module.named_parameters():
            parameter.copy_(tensors[name])
            self.optimizer.state[parameter] = {
                "step": torch.tensor(float(step), device=parameter.device),
                **{moment: tensors[f"{name}/{moment}"].to(parameter.device).clone() for moment in MOMENTS},
            }


def deepspeed_config(optim: OptimConfig, engine: EngineConfig) -> dict:
    """What DeepSpeed is told: the user's own file (engine.deepspeed), and what the run itself decides.

    Raises ValueError where the file says otherwise.
    """
    own = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,  # the boundary is set by hand: bins per step vary
        "gradient_clipping": optim.clip,  # its default is 1.0, not "off"
        "bf16": {"enabled": engine.dtype == "bfloat16"},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    theirs = read_json(engine.deepspeed) if engine.deepspeed is not None else {}
    for name in ("optimizer", "scheduler", "fp16"):
        if name in theirs:
            raise ValueError(f"engine.deepspeed: {engine.deepspeed} has {name}, expected none; use optim.* instead")
    stage = theirs.get("zero_optimization", {}).get("stage", engine.zero_stage)
    for name, value in {**own, "zero_optimization": {"stage": engine.zero_stage}}.items():
        found = stage if name == "zero_optimization" else theirs.get(name, value)
        expected = engine.zero_stage if name == "zero_optimization" else value
        if found not in (expected, "auto"):
            raise ValueError(
                f"engine.deepspeed: {engine.deepspeed} has {name}={found}, expected {expected}, which the run decides"
            )
    zero = {**theirs.get("zero_optimization", {}), "stage": engine.zero_stage}
    return {"steps_per_print": 10**9, **theirs, **own, "zero_optimization": zero}


class DeepSpeedEngine:
    """Several processes: ZeRO 0, 1 or 2 with a client AdamW; bf16 module with fp32 masters, or all fp32."""

    def __init__(self, drafter: nn.Module, optim: OptimConfig, engine: EngineConfig, device: torch.device):
        import deepspeed

        masters = {name: p.detach().float().clone() for name, p in drafter.named_parameters()}
        self.module, self.device, self.stage = drafter.float().to(device), device, engine.zero_stage
        self.dtype, self.world = getattr(torch, engine.dtype), dist.get_world_size()
        self.engine, *_ = deepspeed.initialize(
            model=self.module,
            optimizer=adamw(self.module, optim),
            config=deepspeed_config(optim, engine),
        )
        if self.stage:
            self.engine.optimizer.check_grad_overflow = True  # in fp32, too, it shall skip what is not finite
        # DeepSpeed rounds the module to bf16 before it makes the masters, and at stage 0 runs one optimiser step on
        # zero gradients; setting the state anew undoes both.
        zeros = {f"{name}/{moment}": torch.zeros_like(p) for name, p in masters.items() for moment in MOMENTS}
        self.load_state(masters | zeros, step=0)

    def forward(self, *inputs):
        return self.engine(*inputs)

    __call__ = forward

    def backward(self, loss: torch.Tensor, step_weight: float, last: bool) -> None:
        """Add the gradient of loss / step_weight; ranks are averaged by DeepSpeed, hence the factor."""
        self.engine.set_gradient_accumulation_boundary(last)
        self.engine.backward(loss * (self.world / step_weight), scale_wrt_gas=False)
        if not last:
            self.engine.step()

    def step(self, lr: float) -> torch.Tensor:
        """As TorchEngine's."""
        for group in self.engine.optimizer.param_groups:
            group["lr"] = lr
        norm = None
        if self.stage == 0 and self.dtype == torch.float32:  # the one case in which DeepSpeed tells no norm
            norm = nn.utils.get_total_norm([p.grad for p in self.module.parameters()])
            if not norm.isfinite():
                self.engine.zero_grad()
                self.engine.optimizer.zero_grad()
                for p in self.module.parameters():
                    p.grad = torch.zeros_like(p)
                return norm
        self.engine.step()
        norm = torch.as_tensor(float(self.engine.get_global_grad_norm() if norm is None else norm))
        return norm if norm >= 0 else torch.full_like(norm, torch.inf)  # -1 is how it reports one that is not finite

    def _base(self) -> torch.optim.Optimizer:
        return getattr(self.engine.optimizer, "optimizer", self.engine.optimizer)

    def _unsharded(self) -> dict | None:
        """Parameter -> its fp32 master, at stage 0; None where ZeRO shards the masters."""
        if self.stage:
            return None
        if self.dtype == torch.float32:
            return {p: p for p in self.module.parameters()}
        optimizer = self.engine.optimizer
        low = [p for group in optimizer.fp16_groups for p in group]
        return dict(zip(low, (p for group in optimizer.fp32_groups for p in group)))

    def state(self) -> dict[str, torch.Tensor]:
        """Whole tensors, on every rank. A collective: all ranks call it."""
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        tensors, unsharded = {}, self._unsharded()
        for name, p in self.module.named_parameters():
            if unsharded is not None:
                master = unsharded[p]
                found = {"": master, **{f"/{m}": self._base().state[master][m] for m in MOMENTS}}
            else:
                found = {"": safe_get_full_fp32_param(p)}
                found |= {f"/{m}": safe_get_full_optimizer_state(p, m) for m in MOMENTS}
            tensors |= {name + key: value.detach().view_as(p).float().clone() for key, value in found.items()}
        return tensors

    @torch.no_grad()
    def load_state(self, tensors: dict[str, torch.Tensor], step: int) -> None:
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

        base, unsharded = self._base(), self._unsharded()
        masters = [p for group in base.param_groups for p in group["params"]]
        base.state.clear()
        for master in masters:
            zeros = {moment: torch.zeros_like(master) for moment in MOMENTS}
            base.state[master] = {"step": torch.tensor(float(step)), **zeros}
        if self.stage:  # link the masters' fragments to the states just made; DeepSpeed does so only at its first step
            self.engine.optimizer._hp_optimizer_states_linked = False
            self.engine.optimizer._lazy_init_hp_params_optimizer_state()
        for name, p in self.module.named_parameters():
            if unsharded is not None:
                master = unsharded[p]
                master.copy_(tensors[name])
                for moment in MOMENTS:
                    base.state[master][moment].copy_(tensors[f"{name}/{moment}"])
            else:
                safe_set_full_fp32_param(p, tensors[name].to(self.device))
                for moment in MOMENTS:
                    safe_set_full_optimizer_state(p, tensors[f"{name}/{moment}"].to(self.device), moment)
            p.copy_(tensors[name])


def make_engine(drafter: nn.Module, optim: OptimConfig, engine: EngineConfig, device: torch.device):
    """The engine that the config names; `auto` takes torch for one process and deepspeed for several."""
    drafter.recompute = engine.checkpoint
    if engine.compile:
        drafter.compile()
    world = ranks()[1]
    kind = engine.kind
    if kind == EngineKind.auto:
        kind = EngineKind.deepspeed if world > 1 else EngineKind.torch
    if kind == EngineKind.torch:
        if world > 1:
            raise ValueError(f"engine.kind: found torch on {world} processes; use deepspeed")
        return TorchEngine(drafter, optim, engine, device)
    return DeepSpeedEngine(drafter, optim, engine, device)


def ranks() -> tuple[int, int]:
    """(this process's rank, how many there are)."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def start_process_group(device: torch.device, deepspeed: bool) -> None:
    """Join the group of the launcher, or make one of a single process where deepspeed needs it."""
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}.items():
        os.environ.setdefault(name, value)
    if "MASTER_PORT" not in os.environ:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            os.environ["MASTER_PORT"] = str(free.getsockname()[1])
    if deepspeed or int(os.environ["WORLD_SIZE"]) > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
