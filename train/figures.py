"""Figures of an evaluation, from what each prompt gave: sums are divided once, intervals come from draws of the
conversations.
"""

from collections import defaultdict
from dataclasses import dataclass, field

import torch

DRAWS = 1000  # of the conversations, for an interval
SHORT = 128  # tokens of the first bucket of contexts; each further one is twice as long


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
    turn: int = 1
    category: str | None = None
    prompt_tokens: int = 0
    prompt_sha256: str = ""  # of its ids
    random: bool = False  # evaluate.looks_random


def loops(tokens: list[int], repeats: int = 3) -> bool:
    """Whether an answer ends in a phrase of up to 32 tokens said at least three times (and over 16 tokens)."""
    for period in range(1, min(32, len(tokens) // repeats) + 1):
        tail = tokens[-max(repeats * period, 17) :]
        if len(tail) >= 17 and all(a == b for a, b in zip(tail, tail[period:])):
            return True
    return False


def summarise(results: list[PromptResult], block_size: int) -> dict:
    """Pooled figures of a set: sums divided once; with 95 % intervals, from DRAWS draws of the conversations."""
    accepted = [n for result in results for n in result.accepted]
    # Slot k was right when a step emitted more than k tokens; a step that a stop or the limit cut tells less.
    slots = [sum(n > k for n in accepted) / max(len(accepted), 1) for k in range(1, block_size)]
    sums_NC = sums_by_conversation(results)
    total_C, drawn_DC = sums_NC.sum(dim=0), resample(sums_NC)
    _, steps, alone, alone_seconds, fast, fast_seconds = total_C.tolist()
    categories = defaultdict(list)
    for result in results:
        categories[result.category] += result.accepted
    return {
        "prompts": len(sums_NC),
        "turns": len(results),
        "tau": float(tau_of(total_C)) if steps else None,
        "tau_interval": interval(tau_of(drawn_DC)),
        "verify_steps": len(accepted),
        "slot_acceptance": slots,
        "tau_by_context": _by_context(results),
        "tau_by_category": {name: _tau(taken) for name, taken in categories.items() if name is not None},
        "tokens_per_second_alone": alone / alone_seconds,
        "tokens_per_second": fast / fast_seconds,
        "ms_per_token_alone": 1000 * alone_seconds / alone,
        "ms_per_token": 1000 * fast_seconds / fast,
        "ratio": float(ratio_of(total_C)),
        "ratio_interval": interval(ratio_of(drawn_DC)),
        "time_shares": {
            part: sum(r.time_shares.get(part, 0.0) * r.draft_seconds for r in results) / fast_seconds
            for part in ("prefill", "draft", "verify")
        },
        "looping": sum(r.loops for r in results) / len(results),
        "flags": {
            "random_looking": sum(r.random for r in results),
            "looping": sum(r.loops for r in results),
            "without_verification": sum(not r.accepted for r in results),
            "no_draft_accepted": bool(accepted) and max(accepted) == 1,
        },
    }


def _tau(accepted: list[int]) -> dict:
    return {"tau": sum(accepted) / len(accepted) if accepted else None, "verify_steps": len(accepted)}


def _by_context(results: list[PromptResult]) -> list[dict]:
    """tau of the verifications whose context, the prompt and what was emitted, has up to 128, 256, 512 ... tokens."""
    buckets = defaultdict(list)
    for result in results:
        context = result.prompt_tokens + 1  # the prefill emits a token
        for taken in result.accepted:
            buckets[max(SHORT, 1 << (context - 1).bit_length())].append(taken)
            context += taken
    return [{"up_to": bound, **_tau(buckets[bound])} for bound in sorted(buckets)]


def sums_by_conversation(results: list[PromptResult]) -> torch.Tensor:
    """What is added up, [conversations, 6]: emitted tokens, verify steps; tokens and seconds alone, and drafted.

    Turns of a conversation are drawn together: they are not independent.
    """
    sums = {}
    for r in results:
        part = r.alone_tokens, r.alone_seconds, r.draft_tokens, r.draft_seconds
        added = torch.tensor([sum(r.accepted), len(r.accepted), *part], dtype=torch.float64)
        sums[r.id] = sums.get(r.id, 0) + added
    return torch.stack(list(sums.values()))


def resample(sums_NC: torch.Tensor) -> torch.Tensor:
    """Sums over DRAWS draws of N conversations with replacement, [DRAWS, C]."""
    num = len(sums_NC)
    return sums_NC[torch.randint(num, (DRAWS, num), generator=torch.Generator().manual_seed(0))].sum(dim=1)


def tau_of(sums: torch.Tensor) -> torch.Tensor:
    return sums[..., 0] / sums[..., 1].clamp(min=1)


def ratio_of(sums: torch.Tensor) -> torch.Tensor:
    """Tokens/s with the drafter over tokens/s alone."""
    return sums[..., 4] / sums[..., 5] * sums[..., 3] / sums[..., 2]


def interval(draws_D: torch.Tensor) -> list[float]:
    """The middle 95 %."""
    return draws_D.quantile(torch.tensor([0.025, 0.975], dtype=draws_D.dtype)).tolist()
