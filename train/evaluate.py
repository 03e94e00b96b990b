"""What a drafter is worth: measures on held-out rows while training, and the evaluation on prompts at the end.

Two taus exist and are never mixed. `tau` is walked: the next anchor is where the last block ended, as in serving;
tokens emitted per verification, the bonus token counted. `tau_anchor` is teacher-forced over anchors with a label at
every slot. Both are counted per block: sums are divided once.
"""

import hashlib
import json
import math
import time
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from data_prep.config import DataConfig
from data_prep.prepare import Preparation
from data_prep.regenerate import render
from data_prep.store import Row, Store
from dflash.blocks import eligible_anchors
from dflash.generate import Generation, generate
from dflash.model import TargetEnds
from dflash.objective import block_loss
from train.config import EvaluateConfig, RunConfig
from train.data import make_batch, to_device
from train.engine import ranks
from train.figures import PromptResult, loops, summarise
from train.sets import load_set

NEAR_TIE = 2e-4  # in fp32, two orders of summation move logits by up to about 1e-4


@torch.no_grad()
def heldout_measures(drafter, ends: TargetEnds, store: Store, rows: list[int], config: RunConfig) -> dict:
    """tau, tau_anchor and slot acceptance on stored answers, every eligible anchor drafted once.

    The walked tau equals what serving gives where the answers are the target's own greedy ones. Ranks share the rows
    and exchange sums and counts: all return the same.
    """
    rank, world = ranks()
    counts = torch.zeros(2 + config.model.block_size, dtype=torch.long)
    for index in rows[rank::world]:
        counts += row_counts(drafter, ends, store.row(index), config)
    if world > 1:
        dist.all_reduce(counts := counts.to(drafter.device))
    emitted, num_steps, num_blocks, *right = counts.tolist()
    slots = [count / max(num_blocks, 1) for count in right]
    return {
        "tau": emitted / max(num_steps, 1),
        "tau_anchor": 1 + sum(slots),
        "slot_acceptance": slots,
        "rows": len(rows),
        "verify_steps": num_steps,
        "blocks": num_blocks,
    }


def row_counts(drafter, ends: TargetEnds, row: Row, config: RunConfig) -> torch.Tensor:
    """int64 [2 + S]: tokens and verifications when walked; whole blocks, and of these right up to slot 1, 2, ..."""
    anchor_A = eligible_anchors(row.loss_mask_T)
    accepted, counts = [], torch.zeros(2 + config.model.block_size, dtype=torch.long)
    for part_A in anchor_A.split(config.batch.bin_anchors):
        batch = to_device(make_batch([row], [part_A], config.model), drafter.device, config.batch)
        batch.features_TF = batch.features_TF.to(drafter.dtype)
        right_AS = block_loss(drafter, batch, ends, config.batch.chunk_slots).right_AS
        run_AS = right_AS[:, 1:].long().cumprod(dim=1).cpu()
        accepted += run_AS.sum(dim=1).tolist()
        whole_A = batch.blocks.weight_AS[:, -1].cpu() > 0
        counts[2] += whole_A.sum()
        counts[3:] += run_AS[whole_A].sum(dim=0)
    for taken in walk(dict(zip(anchor_A.tolist(), accepted))):
        counts[:2] += torch.tensor([sum(taken), len(taken)])
    return counts


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


class Prompt(NamedTuple):
    """One turn of a conversation, rendered."""

    id: str  # of the conversation
    ids: list[int]
    turn: int = 1
    messages: list = []
    row: dict = {}  # of the set


def render_turn(tokenizer, data: DataConfig, row: dict, turn: int = 1, before: list | None = None) -> Prompt:
    """The conversation of a set's row up to its turn number `turn`; before: the messages of the turns before."""
    asked = row["turns"][turn - 1]
    if isinstance(asked[0], int):  # ready ids
        return Prompt(row["id"], asked, turn, [], row)
    messages = [*(before or []), *asked]
    return Prompt(row["id"], render(tokenizer, messages, data, row.get("tools")), turn, messages, row)


def next_turn(tokenizer, data: DataConfig, stops, prompt: Prompt, answer: list[int]) -> Prompt | None:
    """The turn after `prompt`, or None behind the last. `answer` is what the target alone said to it: the same context
    for both sides, whatever the drafter's side said (at a temperature, something else)."""
    if prompt.turn >= len(prompt.row.get("turns", ())):
        return None
    said = {"role": "assistant", "content": tokenizer.decode([token for token in answer if token not in stops])}
    return render_turn(tokenizer, data, prompt.row, prompt.turn + 1, [*prompt.messages, said])


@torch.no_grad()
def looks_random(target, ids_BT: torch.Tensor) -> bool:
    """Whether a prompt is hardly text: its last 1,024 tokens have a mean log-probability below -log(vocabulary) / 2.

    Ids that are drawn blindly have -log(vocabulary) or less under any target, on average (Gibbs' inequality), and text
    a small part of it. The half leaves room for a template's own tokens.
    """
    ids_BT = ids_BT[:, -1024:]
    if ids_BT.shape[1] < 2:
        return False
    logits_TV = target(input_ids=ids_BT).logits[0, :-1].float()
    log_probs_T = logits_TV.gather(-1, ids_BT[0, 1:, None])[:, 0] - logits_TV.logsumexp(-1)
    return float(log_probs_T.mean()) < -math.log(logits_TV.shape[-1]) / 2


def measure_speed(target, drafter, prompts: list, stops, config: EvaluateConfig, follow=None) -> list[PromptResult]:
    """Answer each prompt alone and with the drafter, alternately, in the same loop.

    prompts: of Prompt, or (id, ids). follow(prompt, answer of the target alone) -> the next turn or None; it is put
    into `prompts` behind its turn. At a temperature, both sides draw from generators of one seed.
    """
    results = []
    for number, prompt in enumerate(prompts):
        prompt = Prompt(*prompt)
        input_ids = torch.tensor([prompt.ids], device=target.device)
        runs = {}
        for used in (None, drafter) if number % 2 == 0 else (drafter, None):
            size = config.block_size if used is not None else None
            runs[used is not None] = generate(
                target, input_ids, config.max_new_tokens, used, stop_token_ids=stops, block_size=size,
                temperature=config.temperature, top_p=config.top_p, top_k=config.top_k,
                sampled_proposals=config.sampled_proposals, generator=_generator(config, prompt, target.device),
            )  # fmt: skip
        alone, fast = runs[False], runs[True]
        shares = {part: getattr(fast, f"{part}_seconds") / fast.seconds for part in ("prefill", "draft", "verify")}
        results.append(
            PromptResult(
                prompt.id, len(alone.tokens), alone.seconds, len(fast.tokens), fast.seconds, fast.accepted,
                loops(alone.tokens), shares, prompt.turn, prompt.row.get("category"), len(prompt.ids),
                sha256(prompt.ids), looks_random(target, input_ids),
            )
        )  # fmt: skip
        if follow is not None and (following := follow(prompt, alone.tokens)) is not None:
            prompts.insert(number + 1, following)
    return results


def _generator(config: EvaluateConfig, prompt: Prompt, device) -> torch.Generator:
    return torch.Generator(device).manual_seed(prompt_seed(config, prompt))


def prompt_seed(config: EvaluateConfig, prompt: Prompt) -> int:
    """Of a prompt's draws: whatever the order of the prompts."""
    return int(sha256([config.seed, prompt.id, prompt.turn])[:12], 16)


def sha256(value) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def compare_outputs(target, drafter, prompts, stops, config: EvaluateConfig) -> dict:
    """Greedy outputs with and without the drafter, token for token, in fp32.

    A difference is allowed only where the target's two best logits lie within NEAR_TIE; it is counted, and the prompt
    is answered again in float64, where it must vanish.
    """
    counts = {"prompts": len(prompts), "identical": 0, "near_ties": 0, "different": 0}
    for _, ids, *_ in prompts:
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


def evaluate(load_target, load_drafter, sets: dict[str, list], stops, config: EvaluateConfig, follow=None) -> dict:
    """Every set: speed in bf16, then identity in fp32, greedily. load_target(dtype), load_drafter(dtype) -> models.

    follow: see measure_speed.
    """
    report, asked, started = {}, {name: list(prompts) for name, prompts in sets.items()}, time.perf_counter()
    target, drafter = load_target("bfloat16"), load_drafter(torch.bfloat16)
    size = config.block_size or drafter.block_size
    measure_speed(target, drafter, next(iter(sets.values()), [])[:2], stops, config)  # warms up; not counted
    for name, prompts in asked.items():
        speed = measure_speed(target, drafter, prompts, stops, config, follow)
        steady = [result for result in speed if not result.loops]
        report[name] = summarise(speed, size)
        report[name]["prompts_sha256"] = sha256([prompt.ids for prompt in prompts])
        report[name]["ratio_without_looping"] = summarise(steady, size)["ratio"] if steady else None
        report[name]["per_prompt"] = [asdict(result) for result in speed]
        print(f"evaluate: {name} done after {time.perf_counter() - started:.0f} s", flush=True)
    del target, drafter  # before the next pair is loaded
    target, drafter = load_target("float32"), load_drafter(torch.float32)
    for name, prompts in asked.items():
        report[name]["identity"] = compare_outputs(target, drafter, prompts[: config.identity_prompts], stops, config)
        print(f"evaluate: {name} identity {report[name]['identity']}", flush=True)
    return report


def evaluation_prompts(config: RunConfig, preparation: Preparation) -> dict[str, list[Prompt]]:
    """The first turns of every configured set, by its name. Raises ValueError for a set that cannot be had."""
    size, trained = config.evaluate.block_size, config.model.block_size
    if size is not None and not 2 <= size <= trained:
        raise ValueError(f"evaluate.block_size: found {size}, expected 2..{trained}, the size of training")
    sets = {}
    for wish in config.evaluate.sets:
        name, count = wish, config.evaluate.prompts
        if wish.rpartition(":")[2].isdigit():  # NAME:COUNT
            name, count = wish.rpartition(":")[0], int(wish.rpartition(":")[2])
        rows = load_set(name, count, config.cache.dir / "sets", config.evaluate.local)
        if Path(name).stem in sets:
            raise ValueError(f"evaluate.sets: found two sets named {Path(name).stem}, expected different names")
        sets[Path(name).stem] = [render_turn(preparation.tokenizer, config.data, row) for row in rows]
    return sets
