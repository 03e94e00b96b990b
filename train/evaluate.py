"""What a drafter is worth: measures on held-out rows while training, and the evaluation on prompts at the end.

Two taus exist and are never mixed. `tau` is walked: the next anchor is where the last block ended, as in serving;
tokens emitted per verification, the bonus token counted. `tau_anchor` is teacher-forced over anchors with a label at
every slot. Both are counted per block: sums are divided once.
"""

import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from data_prep.prepare import Preparation
from data_prep.regenerate import render
from data_prep.store import Store
from dflash.blocks import eligible_anchors
from dflash.generate import Generation, generate
from dflash.model import TargetEnds
from dflash.objective import block_loss
from train.config import EvaluateConfig, RunConfig
from train.data import make_batch, to_device
from train.sets import load_set

NEAR_TIE = 2e-4  # in fp32, two orders of summation move logits by up to about 1e-4


@torch.no_grad()
def heldout_measures(drafter, ends: TargetEnds, store: Store, rows: list[int], config: RunConfig) -> dict:
    """tau, tau_anchor and slot acceptance on stored answers, every eligible anchor drafted once.

    The walked tau equals what serving gives where the answers are the target's own greedy ones.
    """
    emitted = num_steps = 0
    right_S = torch.zeros(config.model.block_size, dtype=torch.long)
    for index in rows:
        row = store.row(index)
        anchor_A = eligible_anchors(row.loss_mask_T)
        accepted, right_AS, whole_A = [], [], []
        for part_A in anchor_A.split(config.batch.bin_anchors):
            batch = to_device(make_batch([row], [part_A], config.model), drafter.device, config.batch)
            batch.features_TF = batch.features_TF.to(drafter.dtype)
            result = block_loss(drafter, batch, ends, config.batch.chunk_slots)
            run_AS = result.right_AS[:, 1:].long().cumprod(dim=1).cpu()
            accepted += run_AS.sum(dim=1).tolist()
            right_AS.append(run_AS)
            whole_A.append(batch.blocks.weight_AS[:, -1].cpu() > 0)
        run_AS, whole_A = torch.cat(right_AS), torch.cat(whole_A)
        right_S[0] += whole_A.sum()
        right_S[1:] += run_AS[whole_A].sum(dim=0)
        for taken in walk(dict(zip(anchor_A.tolist(), accepted))):
            emitted, num_steps = emitted + sum(taken), num_steps + len(taken)
    slots = (right_S[1:].double() / right_S[0].clamp(min=1)).tolist()
    return {
        "tau": emitted / max(num_steps, 1),
        "tau_anchor": 1 + sum(slots),
        "slot_acceptance": slots,
        "rows": len(rows),
        "verify_steps": num_steps,
        "blocks": int(right_S[0]),
    }


def walk(accepted: dict[int, int]) -> list[list[int]]:
    """Tokens emitted per verification of each answer of a row, as serving would walk it.

    accepted: right drafts at every eligible anchor; a run of consecutive anchors is one answer, whose last token is no
    anchor. The answer's first token comes from the prefill.
    """
    walks = []
    for first in (i for i in accepted if i - 1 not in accepted):
        last = first
        while last in accepted:  # the first index behind the run is the answer's last token
            last += 1
        walks.append([])
        while first < last:
            walks[-1].append(min(accepted[first] + 1, last - first))
            first += walks[-1][-1]
    return walks


@dataclass
class PromptResult:
    """One prompt, answered by the target alone and with the drafter."""

    id: str
    alone_tokens: int
    alone_seconds: float
    draft_tokens: int
    draft_seconds: float
    accepted: list[int]
    loops: bool
    time_shares: dict = field(default_factory=dict)


def loops(tokens: list[int], repeats: int = 3) -> bool:
    """Whether an answer ends in a phrase of up to 32 tokens said at least three times (and over 16 tokens)."""
    for period in range(1, min(32, len(tokens) // repeats) + 1):
        tail = tokens[-max(repeats * period, 17) :]
        if len(tail) >= 17 and all(a == b for a, b in zip(tail, tail[period:])):
            return True
    return False


def measure_speed(target, drafter, prompts: list[tuple[str, list[int]]], stops, config: EvaluateConfig) -> list:
    """Answer each prompt alone and with the drafter, alternately, in the same loop. Greedy."""
    results = []
    for number, (name, ids) in enumerate(prompts):
        input_ids = torch.tensor([ids], device=target.device)
        runs = {}
        for used in (None, drafter) if number % 2 == 0 else (drafter, None):
            size = config.block_size if used is not None else None
            runs[used is not None] = generate(
                target, input_ids, config.max_new_tokens, used, stop_token_ids=stops, block_size=size
            )
        alone, fast = runs[False], runs[True]
        shares = {part: getattr(fast, f"{part}_seconds") / fast.seconds for part in ("prefill", "draft", "verify")}
        results.append(
            PromptResult(
                name, len(alone.tokens), alone.seconds, len(fast.tokens), fast.seconds, fast.accepted,
                loops(alone.tokens), shares,
            )
        )  # fmt: skip
    return results


def summarise(results: list[PromptResult], block_size: int, draws: int = 1000) -> dict:
    """Pooled figures of a set: sums divided once; with 95 % intervals, from so many draws of the prompts."""
    accepted = [n for result in results for n in result.accepted]
    # Slot k was right when a step emitted more than k tokens; a step that a stop or the limit cut tells less.
    slots = [sum(n > k for n in accepted) / max(len(accepted), 1) for k in range(1, block_size)]
    sums_PN = torch.tensor([_sums(result) for result in results], dtype=torch.float64)
    picked = torch.randint(len(results), (draws, len(results)), generator=torch.Generator().manual_seed(0))
    drawn_DN = sums_PN[picked].sum(dim=1)
    emitted, steps, alone, alone_seconds, fast, fast_seconds = sums_PN.sum(dim=0).tolist()
    return {
        "prompts": len(results),
        "tau": emitted / steps if steps else None,
        "tau_interval": _interval(drawn_DN[:, 0] / drawn_DN[:, 1].clamp(min=1)),
        "verify_steps": len(accepted),
        "slot_acceptance": slots,
        "tokens_per_second_alone": alone / alone_seconds,
        "tokens_per_second": fast / fast_seconds,
        "ratio": (fast / fast_seconds) / (alone / alone_seconds),
        "ratio_interval": _interval(drawn_DN[:, 4] / drawn_DN[:, 5] * drawn_DN[:, 3] / drawn_DN[:, 2]),
        "looping": sum(r.loops for r in results) / len(results),
    }


def _sums(r: PromptResult) -> tuple:
    """What of a prompt is added up."""
    return sum(r.accepted), len(r.accepted), r.alone_tokens, r.alone_seconds, r.draft_tokens, r.draft_seconds


def _interval(draws_D: torch.Tensor) -> list[float]:
    return draws_D.quantile(torch.tensor([0.025, 0.975], dtype=draws_D.dtype)).tolist()


def compare_outputs(target, drafter, prompts, stops, config: EvaluateConfig) -> dict:
    """Greedy outputs with and without the drafter, token for token, in fp32.

    A difference is allowed only where the target's two best logits lie within NEAR_TIE; it is counted, and the prompt
    is answered again in float64, where it must vanish.
    """
    counts = {"prompts": len(prompts), "identical": 0, "near_ties": 0, "different": 0}
    for _, ids in prompts:
        input_ids = torch.tensor([ids], device=target.device)
        both = [_answer(target, used, input_ids, stops, config) for used in (None, drafter)]
        if both[0].tokens == both[1].tokens:
            counts["identical"] += 1
            continue
        gap = _gap_at_difference(target, input_ids, both[0], both[1])
        target.double(), drafter.double()
        both = [_answer(target, used, input_ids, stops, config) for used in (None, drafter)]
        target.float(), drafter.float()
        counts["near_ties" if gap < NEAR_TIE and both[0].tokens == both[1].tokens else "different"] += 1
    return counts


def _answer(target, drafter, input_ids, stops, config: EvaluateConfig) -> Generation:
    size = config.block_size if drafter is not None else None
    return generate(target, input_ids, config.identity_tokens, drafter, stop_token_ids=stops, block_size=size)


@torch.no_grad()
def _gap_at_difference(target, input_ids, one: Generation, other: Generation) -> float:
    same = next((i for i, (a, b) in enumerate(zip(one.tokens, other.tokens)) if a != b), 0)
    ids = torch.cat((input_ids, torch.tensor([one.tokens[:same]], device=input_ids.device, dtype=torch.long)), dim=1)
    best = target(input_ids=ids, logits_to_keep=1).logits[0, -1].topk(2).values
    return float(best[0] - best[1])


def evaluate(load_target, load_drafter, sets: dict[str, list], stops, config: EvaluateConfig) -> dict:
    """Every set: speed in bf16, then identity in fp32. load_target(dtype), load_drafter(dtype) -> models."""
    report, started = {}, time.perf_counter()
    target, drafter = load_target("bfloat16"), load_drafter(torch.bfloat16)
    size = config.block_size or drafter.block_size
    measure_speed(target, drafter, next(iter(sets.values()), [])[:2], stops, config)  # warms up; not counted
    for name, prompts in sets.items():
        speed = measure_speed(target, drafter, prompts, stops, config)
        steady = [result for result in speed if not result.loops]
        report[name] = summarise(speed, size)
        report[name]["ratio_without_looping"] = summarise(steady, size)["ratio"] if steady else None
        report[name]["per_prompt"] = [asdict(result) for result in speed]
        print(f"evaluate: {name} done after {time.perf_counter() - started:.0f} s", flush=True)
    del target, drafter  # before the next pair is loaded
    target, drafter = load_target("float32"), load_drafter(torch.float32)
    for name, prompts in sets.items():
        report[name]["identity"] = compare_outputs(target, drafter, prompts[: config.identity_prompts], stops, config)
        print(f"evaluate: {name} identity {report[name]['identity']}", flush=True)
    return report


def evaluation_prompts(config: RunConfig, preparation: Preparation) -> dict[str, list[tuple[str, list[int]]]]:
    """The rendered prompts of every configured set, by its name. Raises ValueError for a set that cannot be had."""
    size, trained = config.evaluate.block_size, config.model.block_size
    if size is not None and not 2 <= size <= trained:
        raise ValueError(f"evaluate.block_size: found {size}, expected 2..{trained}, the size of training")
    sets = {}
    for name in config.evaluate.sets:
        rows = load_set(name, config.evaluate.prompts, config.cache.dir / "sets")
        if Path(name).stem in sets:
            raise ValueError(f"evaluate.sets: found two sets named {Path(name).stem}, expected different names")
        prompts = [(row["id"], render(preparation.tokenizer, row["messages"], config.data)) for row in rows]
        sets[Path(name).stem] = prompts
    return sets
