"""Speculative decoding: draft a block, verify it in one forward of the target, accept, repeat.

`generate` knows no kind of drafter: it asks for `begin`, `propose`, `taps` and `block_size`. Without a drafter the same
loop decodes plainly, one token a forward, so that a speed-up compares like with like.

    round:  block = [anchor, d_1 .. d_n]   ->  target's logits at the n + 1 positions
            accept the longest right prefix, append the token that the target puts behind it (the bonus token)

Greedy: d_k is right where it equals the target's argmax. At a temperature: rejection sampling, which keeps the target's
distribution for any proposal q (Leviathan et al., arXiv 2211.17192): accept d_k when u q(d_k) < p(d_k), u in [0, 1);
behind the first rejection draw from max(p - q, 0), renormalised. A greedy proposal is the case q(d_k) = 1.

Stops and limits act by position: tokens behind the first stop token, or over the limit, are cut from the output and
from the counts. Ships with every export; needs torch and transformers only.

Shapes: B sequences (1 here), T tokens of one forward, D hidden, F features (taps x hidden), V vocabulary.
"""

import contextlib
import inspect
import time
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from transformers import DynamicCache


class Proposal(NamedTuple):
    """Drafted ids [n] and, for sampled proposals, the distributions [n, V] that they were drawn from."""

    ids: torch.Tensor
    probs: torch.Tensor | None


@dataclass
class Generation:
    """What one prompt gave. `tau` counts the bonus token; the token that the prefill gives belongs to no step."""

    tokens: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)  # tokens emitted per verify step, up to stop and limit
    accepted_raw: list[int] = field(default_factory=list)  # the same before trimming, for engines that report it
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0

    @property
    def tau(self) -> float:
        return sum(self.accepted) / len(self.accepted) if self.accepted else float("nan")

    @property
    def seconds(self) -> float:
        return self.prefill_seconds + self.draft_seconds + self.verify_seconds


@contextlib.contextmanager
def tapped(target, taps):
    """While open, every forward of the target appends the outputs of its decoder layers `taps` to the yielded list.

    Tap i is the output of decoder layer i, 0-based, which equals HF `hidden_states[i + 1]` for all but the last layer
    (HF norms that one). Hooks keep only the tapped layers alive. Each entry: [B, T, D].
    """
    states = []

    def hook(module, inputs, output):
        states.append(output[0] if isinstance(output, tuple) else output)

    layers = target.get_decoder().layers
    handles = [layers[tap].register_forward_hook(hook) for tap in taps]
    try:
        yield states
    finally:
        for handle in handles:
            handle.remove()


def probabilities(logits: torch.Tensor, temperature: float, top_p: float, top_k: int) -> torch.Tensor:
    """Logits [..., V] -> the fp32 distribution that is sampled: temperature, then top-k, then top-p."""
    logits = logits.float() / temperature
    if 0 < top_k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[..., -1:], float("-inf"))
    probs = logits.softmax(-1)
    if top_p < 1.0:
        ordered, index = probs.sort(-1, descending=True)
        ordered[ordered.cumsum(-1) - ordered >= top_p] = 0.0  # keeps the token that crosses top_p
        probs = torch.zeros_like(probs).scatter(-1, index, ordered)
        probs = probs / probs.sum(-1, keepdim=True)
    return probs


def likeliest(logits: torch.Tensor) -> torch.Tensor:
    """Ids [n] of the largest of each row [n, V], the first of equals. On CPUs argmax takes five times as long."""
    return logits.max(dim=-1).indices


def accept(proposal: Proposal, probs: torch.Tensor | None, logits: torch.Tensor, generator) -> torch.Tensor:
    """The tokens that one verification yields: the accepted drafts and the bonus token, [m + 1].

    proposal: n drafts. logits [n + 1, V]: the target's at the anchor and behind each draft; probs: their distributions,
    or None for greedy.
    """
    drafts, num = proposal.ids, len(proposal.ids)
    if probs is None:
        best = likeliest(logits)
        num_right = int((drafts == best[:num]).cumprod(0).sum())
        return torch.cat((drafts[:num_right], best[num_right : num_right + 1]))
    q = proposal.probs
    if q is None:
        q = torch.nn.functional.one_hot(drafts, probs.shape[-1]).to(probs)
    at = torch.arange(num, device=drafts.device), drafts
    uniform = torch.rand(num, device=probs.device, generator=generator)
    num_right = int((uniform * q[at] < probs[:num][at]).long().cumprod(0).sum())
    last = probs[num_right]
    if num_right < num:
        residual = (last - q[num_right]).clamp(min=0.0)
        last = torch.where(residual.sum() > 0, residual, last)  # rounding can leave nothing where p and q are equal
    return torch.cat((drafts[:num_right], torch.multinomial(last / last.sum(), 1, generator=generator)))


def check_target(target, total_length: int) -> None:
    """Refuse targets whose cache cannot be cropped, and lengths that the target's positions do not reach."""
    config = target.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"]) - {"full_attention"}
    if kinds or (getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)):
        kinds = sorted(kinds) or [f"sliding_window={config.sliding_window}"]
        raise ValueError(
            f"target {config.model_type}: layers of kind {kinds} found, only full attention can be cropped"
        )
    if total_length > config.max_position_embeddings:
        raise ValueError(
            f"max_new_tokens: prompt, answer and block reach {total_length} positions, the target has"
            f" {config.max_position_embeddings}; ask for fewer tokens"
        )


def _cache_argument(target) -> str:
    """What this version of Transformers calls the cache in a model's forward."""
    return "cache" if "cache" in inspect.signature(target.forward).parameters else "past_key_values"


def _clock(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@torch.no_grad()
def generate(
    target,
    input_ids: torch.Tensor,
    max_new_tokens: int,
    drafter=None,
    *,
    block_size: int | None = None,
    stop_token_ids=(),
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    sampled_proposals: bool = False,
    generator: torch.Generator | None = None,
) -> Generation:
    """Answer one prompt, input_ids [1, P] int64.

    drafter: None for plain decoding. block_size: anchor included, at most the drafter's own (its default).
    temperature 0 is greedy. sampled_proposals: let the drafter sample too (only matters at a temperature).
    Raises ValueError for a block size that the drafter was not trained with, a target whose cache cannot be cropped,
    and more tokens than the target has positions.
    """
    size = drafter.block_size if drafter is not None else 1
    if block_size is not None and not (drafter is not None and 2 <= block_size <= size):
        raise ValueError(
            f"block_size: found {block_size}, expected 2..{size}, the size that the drafter was trained with"
        )
    size = block_size or size
    capacity = input_ids.shape[1] + max_new_tokens
    check_target(target, capacity + size)
    stops, result, cache = set(stop_token_ids), Generation(), DynamicCache()
    cached = {_cache_argument(target): cache, "use_cache": True}
    clock = _clock(input_ids.device)

    def distribution(logits):
        return probabilities(logits, temperature, top_p, top_k) if temperature > 0 else None

    def choose(logits) -> Proposal:
        if temperature > 0 and sampled_proposals:
            probs = distribution(logits)
            return Proposal(torch.multinomial(probs, 1, generator=generator)[:, 0], probs)
        return Proposal(likeliest(logits), None)

    def emit(tokens: torch.Tensor) -> bool:
        """Append tokens up to the first stop or the limit; True when the answer is complete."""
        new = tokens.tolist()[: max_new_tokens - len(result.tokens)]
        stop = next((i for i, token in enumerate(new) if token in stops), None)
        result.tokens += new if stop is None else new[: stop + 1]
        return stop is not None or len(result.tokens) == max_new_tokens

    nothing = Proposal(input_ids.new_empty(0), None)
    with tapped(target, drafter.taps if drafter is not None else ()) as states:
        logits = target(input_ids=input_ids, logits_to_keep=1, **cached).logits[0]
        token = accept(nothing, distribution(logits), logits, generator)
        done = emit(token)
        state = drafter.begin(target, capacity) if drafter is not None else None
        clock, start = _clock(input_ids.device), clock
        result.prefill_seconds = clock - start
        while not done:
            proposal = nothing
            if drafter is not None:
                features_BTF = torch.cat(states, dim=-1)
                proposal = drafter.propose(state, token, features_BTF, size - 1, choose)
                states.clear()
                clock, start = _clock(input_ids.device), clock
                result.draft_seconds += clock - start
            block = torch.cat((token, proposal.ids))[None]
            logits = target(input_ids=block, **cached).logits[0]
            tokens = accept(proposal, distribution(logits), logits, generator)
            num_wrong = len(proposal.ids) + 1 - len(tokens)
            if num_wrong:
                cache.crop(-num_wrong)  # positive and zero lengths mean different things in Transformers 4 and 5
                states[:] = [state_BTD[:, : len(tokens)] for state_BTD in states]
            before, token = len(result.tokens), tokens[-1:]
            done = emit(tokens)
            result.accepted.append(len(result.tokens) - before)
            result.accepted_raw.append(len(tokens))
            clock, start = _clock(input_ids.device), clock
            result.verify_seconds += clock - start
    return result
