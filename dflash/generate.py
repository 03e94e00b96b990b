"""Speculative decoding: draft a block, verify it in one forward of the target, accept, repeat.

`generate` knows no kind of drafter: it asks for `begin`, `propose`, `taps` and `block_size`. Without a drafter the same
loop decodes plainly, one token a forward, so that a speed-up compares like with like.

    round:  block = [anchor, d_1 .. d_n]   ->  target's logits at the n + 1 positions
            accept the longest right prefix, append the token that the target puts behind it (the bonus token)

Greedy: d_k is right where it equals the target's argmax. At a temperature: rejection sampling, which keeps the target's
distribution for any proposal q (Leviathan et al., arXiv 2211.17192): accept d_k when u q(d_k) < p(d_k), u in [0, 1);
behind the first rejection draw from max(p - q, 0), renormalised. A greedy proposal is the case q(d_k) = 1.

Lengths, anchors, acceptance and the answers stay on the device. Keys and values lie in buffers made once, written at
each sequence's own length: what was rejected lies behind it, is not seen, and is overwritten, so that nothing is ever
cropped. The host waits for the device once a round, to see who is done; it may look every `look_every` rounds only, and
then waits for nothing in between (keeping the host ahead of the device is what gave SGLang's Spec V2 a third more
throughput, sgl-project/sglang).

Stops and limits act by position: tokens behind the first stop token, or over the limit, are cut from the output and
from the counts. Ships with every export; needs torch and transformers only.

Shapes: B sequences, T tokens of one forward, S block size, n = S - 1 drafts, D hidden, F features (taps x hidden),
V vocabulary, G key-value heads, K head dimension.
"""

import contextlib
import inspect
import time
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from transformers import DynamicCache


class Proposal(NamedTuple):
    """Drafted ids [B, n] and, for sampled proposals, the distributions [B, n, V] that they were drawn from."""

    ids: torch.Tensor
    probs: torch.Tensor | None


class Round(NamedTuple):
    """What a drafter is told: `propose(state, round, num_drafts, choose)`."""

    anchor_B: torch.Tensor  # the last verified tokens
    length_B: torch.Tensor  # their positions: so many tokens were verified before them
    features_BTF: torch.Tensor  # the target's states of T tokens from first_B on; from length_B on they are void
    first_B: torch.Tensor
    ids_BT: torch.Tensor  # those T tokens
    bound: int  # no sequence has more than so many tokens once the block is added
    exact: bool  # the one sequence has just `bound` of them: there is nothing to hide


@dataclass
class Generation:
    """What one prompt gave. `tau` counts the bonus token; the token that the prefill gives belongs to no step.

    Seconds are those of all prompts that were answered together.
    """

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


class Buffers(DynamicCache):
    """Keys and values of all layers, in buffers [B, G, capacity, K] made at first use. `aim` before each forward."""

    def __init__(self, capacity: int):
        super().__init__()
        self.capacity, self.held = capacity, {}

    def aim(self, index_BN: torch.Tensor, bound: int) -> "Buffers":
        """Where the next forward's N tokens are kept, and how many places it sees."""
        self.places = torch.arange(len(index_BN), device=index_BN.device)[:, None], slice(None), index_BN
        self.num_new, self.bound = index_BN.shape[1], bound
        return self

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        """Keep keys and values [B, G, N, K]; return all that is seen, [B, G, bound, K]."""
        both = key_states, value_states
        if layer_idx not in self.held:  # zeros: what was never written is hidden, and hidden must not mean 0 * NaN
            shape = (*key_states.shape[:2], self.capacity)
            self.held[layer_idx] = tuple(x.new_zeros(*shape, x.shape[-1]) for x in both)
        for buffer, new in zip(self.held[layer_idx], both):
            buffer[self.places] = new.transpose(1, 2)
        return tuple(buffer[:, :, : self.bound] for buffer in self.held[layer_idx])

    def get_seq_length(self, layer_idx=0):
        """Places before the next forward's: of use where nothing is hidden; elsewhere Transformers is given a mask."""
        return self.bound - self.num_new

    def get_mask_sizes(self, *args):
        """(places seen, the first of them)"""
        return self.bound, 0


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
    """Ids [...] of the largest of each row [..., V], the first of equals. On CPUs argmax takes five times as long."""
    return logits.max(dim=-1).indices


class Sampler:
    """How tokens are taken from logits: greedily at temperature 0."""

    def __init__(self, temperature: float, top_p: float, top_k: int, sampled_proposals: bool, generator):
        self.temperature, self.top_p, self.top_k = temperature, top_p, top_k
        self.sampled_proposals, self.generator = sampled_proposals, generator

    def distribution(self, logits: torch.Tensor) -> torch.Tensor | None:
        """What the target's tokens are drawn from; None for greedy."""
        return probabilities(logits, self.temperature, self.top_p, self.top_k) if self.temperature > 0 else None

    def propose(self, logits: torch.Tensor) -> Proposal:
        """A drafter's logits [B, n, V] -> its drafts."""
        if self.temperature > 0 and self.sampled_proposals:
            probs = self.distribution(logits)
            ids = torch.multinomial(probs.flatten(0, 1), 1, generator=self.generator)
            return Proposal(ids.view(probs.shape[:2]), probs)
        return Proposal(likeliest(logits), None)


def accept(proposal: Proposal, probs: torch.Tensor | None, logits: torch.Tensor, generator):
    """(tokens [B, n + 1], right [B]): the first right + 1 tokens are the accepted drafts and the bonus token.

    proposal: n drafts. logits [B, n + 1, V]: the target's at the anchor and behind each draft; probs: their
    distributions, or None for greedy.
    """
    drafts = proposal.ids
    batch, num = drafts.shape
    if probs is None:
        best = likeliest(logits)
        return best, (drafts == best[:, :num]).long().cumprod(1).sum(1)
    q = proposal.probs
    if q is None:
        q = torch.nn.functional.one_hot(drafts, probs.shape[-1]).to(probs)
    uniform = torch.rand(batch, num, device=probs.device, generator=generator)
    q_drafts, p_drafts = (x[:, :num].gather(2, drafts[..., None])[..., 0] for x in (q, probs))
    right_B = (uniform * q_drafts < p_drafts).long().cumprod(1).sum(1)
    at = right_B[:, None, None].expand(batch, 1, probs.shape[-1])
    last = probs.gather(1, at)[:, 0]
    residual = (last - torch.nn.functional.pad(q, (0, 0, 0, 1)).gather(1, at)[:, 0]).clamp(min=0.0)
    nothing = residual.sum(-1, keepdim=True) <= 0  # rounding can leave nothing where p and q are equal
    last = torch.where(nothing, last, residual)
    bonus = torch.multinomial(last / last.sum(-1, keepdim=True), 1, generator=generator)
    return torch.nn.functional.pad(drafts, (0, 1)).scatter(1, right_B[:, None], bonus), right_B


class Answers:
    """The growing answers of a batch. All of it lies on the device: no method waits for it but `look` and `tell`."""

    def __init__(self, prompts: list[list[int]], limit: int, size: int, stops, device):
        self.limit, self.steps = limit, []
        self.anchor_B = torch.tensor([ids[-1] for ids in prompts], device=device)
        self.length_B = torch.tensor([len(ids) - 1 for ids in prompts], device=device)  # where the anchor stands
        self.token_BM = torch.zeros(len(prompts), limit + size, dtype=torch.long, device=device)
        self.count_B = torch.zeros_like(self.length_B)
        self.done_B = self.count_B > 0
        self.stops = torch.tensor(sorted(stops), dtype=torch.long, device=device)

    def take(self, token_BS: torch.Tensor, right_B: torch.Tensor) -> None:
        """Append what one step yields, up to the first stop or the limit. Who is done stays as it is."""
        slot_S = torch.arange(token_BS.shape[1], device=token_BS.device)
        stop_BS = torch.isin(token_BS, self.stops)
        open_BS = (slot_S <= right_B[:, None]) & (slot_S < (self.limit - self.count_B)[:, None])
        open_BS &= (stop_BS.long().cumsum(1) - stop_BS.long() == 0) & ~self.done_B[:, None]
        self.token_BM.scatter_(1, self.count_B[:, None] + slot_S, token_BS)
        self.steps.append((open_BS.sum(1), (right_B + 1).masked_fill(self.done_B, 0)))
        self.count_B = self.count_B + self.steps[-1][0]
        self.done_B = self.done_B | (stop_BS & open_BS).any(1) | (self.count_B == self.limit)
        self.length_B = torch.where(self.done_B, self.length_B, self.length_B + right_B + 1)
        self.anchor_B = torch.where(self.done_B, self.anchor_B, token_BS.gather(1, right_B[:, None])[:, 0])

    def look(self) -> tuple[int, bool]:
        """(largest length, whether all are done): the one thing that waits for the device."""
        length, num_open = torch.stack((self.length_B.max(), (~self.done_B).sum())).tolist()
        return length, num_open == 0

    def tell(self, seconds: dict[str, float]) -> list[Generation]:
        """One result a sequence. The first step is the prefill's."""
        both = torch.stack([torch.stack(step) for step in self.steps]).tolist()
        results = []
        for b, (row, count) in enumerate(zip(self.token_BM.tolist(), self.count_B.tolist())):
            steps = [(emitted[b], yielded[b]) for emitted, yielded in both[1:] if yielded[b]]
            accepted, raw = ([list(x) for x in zip(*steps)]) or ([], [])
            results.append(Generation(row[:count], accepted, raw, **seconds))
        return results


def checked_size(drafter, block_size: int | None) -> int:
    """Slots of a block, the anchor counted; 1 without a drafter. Refuses what the drafter was not trained for."""
    size = drafter.block_size if drafter is not None else 1
    if block_size is not None and not (drafter is not None and 2 <= block_size <= size):
        raise ValueError(
            f"block_size: found {block_size}, expected 2..{size}, the size that the drafter was trained with"
        )
    return block_size or size


def check_target(target, total_length: int) -> None:
    """Refuse targets with windows, whose layers must not see all, and lengths that their positions do not reach."""
    config = target.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"]) - {"full_attention"}
    if kinds or (getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)):
        kinds = sorted(kinds) or [f"sliding_window={config.sliding_window}"]
        raise ValueError(f"target {config.model_type}: layers of kind {kinds} found, expected full attention in all")
    if total_length > config.max_position_embeddings:
        raise ValueError(
            f"max_new_tokens: prompt, answer and block reach {total_length} positions, the target has"
            f" {config.max_position_embeddings}; ask for fewer tokens"
        )


def _cache_argument(target) -> str:
    """What this version of Transformers calls the cache in a model's forward."""
    return "cache" if "cache" in inspect.signature(target.forward).parameters else "past_key_values"


def check_mask(target) -> None:
    """Refuse attention that takes no mask: prompts of different lengths need one."""
    found = getattr(target.config.get_text_config(), "_attn_implementation", "sdpa")
    if found not in ("sdpa", "eager"):
        raise ValueError(f"attn_implementation: found {found}, expected sdpa or eager for several prompts at a time")


class Forward:
    """The target behind buffers of its own."""

    def __init__(self, target, capacity: int, exact: bool):
        self.target, self.exact, self.cache = target, exact, Buffers(capacity)
        self.named = {_cache_argument(target): self.cache, "use_cache": True}

    def __call__(self, ids_BT: torch.Tensor, first_B: torch.Tensor, bound: int) -> torch.Tensor:
        """Logits [B, T, V] of tokens that stand at first_B and behind."""
        position_BT = first_B[:, None] + torch.arange(ids_BT.shape[1], device=ids_BT.device)
        self.cache.aim(position_BT, bound)
        mask = None
        if not self.exact:
            hidden = torch.arange(bound, device=ids_BT.device) > position_BT[..., None]
            mask = torch.zeros(hidden.shape, dtype=self.target.dtype, device=ids_BT.device)
            mask = mask.masked_fill(hidden, torch.finfo(mask.dtype).min)[:, None]
        return self.target(input_ids=ids_BT, attention_mask=mask, position_ids=position_BT, **self.named).logits

    def prefill(self, ids_BT: torch.Tensor, last_B: torch.Tensor, even: bool) -> torch.Tensor:
        """Logits [B, 1, V] behind each prompt, whose last token stands at last_B; even: at the end of all."""
        longest = ids_BT.shape[1]
        self.cache.aim(torch.arange(longest, device=last_B.device).expand_as(ids_BT), longest)
        logits = self.target(input_ids=ids_BT, logits_to_keep=1, **self.named).logits
        if even:
            return logits
        return self(ids_BT.gather(1, last_B[:, None]), last_B, longest)  # the last tokens lie apart: ask again


class Watch:
    """Seconds by what they were spent on; on a GPU by events, which do not wait for it."""

    def __init__(self, device: torch.device):
        self.on_gpu, self.marks = device.type == "cuda", []
        self.mark("")

    def mark(self, name: str) -> None:
        """What was done since the last mark."""
        if self.on_gpu:
            now = torch.cuda.Event(enable_timing=True)
            now.record()
        else:
            now = time.perf_counter()
        self.marks.append((name, now))

    def seconds(self) -> dict[str, float]:
        if self.on_gpu:
            torch.cuda.synchronize()
        spent = {"prefill": 0.0, "draft": 0.0, "verify": 0.0}
        for (_, before), (name, now) in zip(self.marks, self.marks[1:]):
            spent[name] += before.elapsed_time(now) / 1000 if self.on_gpu else now - before
        return {f"{name}_seconds": value for name, value in spent.items()}


def generate(target, input_ids: torch.Tensor, max_new_tokens: int, drafter=None, **options) -> Generation:
    """Answer one prompt, input_ids [1, P] int64. Arguments and errors: as of `generate_batch`."""
    return generate_batch(target, input_ids.tolist(), max_new_tokens, drafter, **options)[0]


@torch.inference_mode()
def generate_batch(
    target,
    prompts: list[list[int]],
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
    look_every: int = 1,
) -> list[Generation]:
    """Answer prompts together, each as if it were alone (at a temperature: as likely).

    drafter: None for plain decoding. block_size: anchor included, at most the drafter's own (its default).
    temperature 0 is greedy. sampled_proposals: let the drafter sample too (only matters at a temperature).
    look_every: rounds between two looks at who is done; tokens behind a stop are drafted in vain until then.
    Raises ValueError for a block size that the drafter was not trained with, a target whose attention has windows,
    or takes no mask where one is needed, and more tokens than the target has positions.
    """
    size, longest = checked_size(drafter, block_size), max(map(len, prompts))
    check_target(target, longest + max_new_tokens + size)
    exact = len(prompts) == 1 and look_every == 1
    if not exact:
        check_mask(target)
    capacity = longest + max_new_tokens + size + 1  # the last place is for what nobody shall see
    device = target.get_input_embeddings().weight.device
    watch, answers = Watch(device), Answers(prompts, max_new_tokens, size, stop_token_ids, device)
    sampler = Sampler(temperature, top_p, top_k, sampled_proposals, generator)
    with tapped(target, drafter.taps if drafter is not None else ()) as states:
        run = Forward(target, capacity, exact)
        ids_BT = torch.tensor([ids + [0] * (longest - len(ids)) for ids in prompts], device=device)
        logits = run.prefill(ids_BT, answers.length_B, min(map(len, prompts)) == longest)
        nothing = Proposal(answers.anchor_B.new_empty(len(prompts), 0), None)
        answers.take(*accept(nothing, sampler.distribution(logits), logits, generator))
        state = drafter.begin(target, capacity) if drafter is not None else None
        first_B = torch.zeros_like(answers.length_B)
        length, done = answers.look()
        watch.mark("prefill")
        while not done:
            bound = min(length + size, capacity - 1)
            proposal = nothing
            if drafter is not None:
                features_BTF = torch.cat(states[: len(drafter.taps)], dim=-1)
                states.clear()
                told = Round(answers.anchor_B, answers.length_B, features_BTF, first_B, ids_BT, bound, exact)
                proposal = drafter.propose(state, told, size - 1, sampler.propose)
                watch.mark("draft")
            first_B, ids_BT = answers.length_B, torch.cat((answers.anchor_B[:, None], proposal.ids), dim=1)
            logits = run(ids_BT, first_B, bound)
            answers.take(*accept(proposal, sampler.distribution(logits), logits, generator))
            length, done = answers.look() if len(answers.steps) % look_every == 0 else (length + size, False)
            watch.mark("verify")
    return answers.tell(watch.seconds())
