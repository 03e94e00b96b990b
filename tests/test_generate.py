"""The decoding loop against Transformers' own greedy generation, token for token in fp32, and the acceptance rule
against the distribution it must keep. Scripted drafters know the target's text and get a chosen number of drafts
right, so that stops, limits and counts can be worked out by hand. Sampling: chi-square of the first two emitted tokens
against p(a) p(b | a) over 20,000 draws from a small table of distributions, for both kinds of proposals."""

import copy
import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from helpers import SHAPE, greedy, reference_drafter, scripted_drafter, tiny_drafter, tiny_target
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from dflash.generate import Answers, Buffers, Proposal, accept, generate, generate_batch, probabilities
from train.config import EvaluateConfig
from train.evaluate import compare_outputs, measure_speed, summarise

S = 8


@pytest.fixture(scope="module")
def target():
    return tiny_target("Llama", seed=1, vocab_size=1000)  # so many tokens that greedy answers do not soon repeat


@pytest.fixture(scope="module")
def text(target):
    """A prompt of 6 tokens and the target's greedy answer of 60, whose first 12 tokens all differ."""
    for seed in range(100):
        prompt = torch.randint(2, 1000, (6,), generator=torch.Generator().manual_seed(seed)).tolist()
        answer = greedy(target, prompt, 60)
        if len(set(answer[:12])) == 12:
            return prompt, answer
    raise AssertionError("no such prompt")


def run(target, prompt, max_new_tokens, drafter=None, **options):
    return generate(target, torch.tensor([prompt]), max_new_tokens, drafter, **options)


def accepted(drafts, q, p, logits, generator=None):
    """What `accept` yields for one sequence."""
    several = Proposal(drafts[None], None if q is None else q[None]), None if p is None else p[None], logits[None]
    token_BS, right_B = accept(*several, generator)
    return token_BS[0, : int(right_B) + 1].tolist()


# greedy: the target's own tokens


@pytest.mark.parametrize("kind", ["Llama", "Qwen3"])
def test_greedy_equals_hf(kind):
    target = tiny_target(kind, seed=2, vocab_size=1000)
    compared = 0
    for seed, length, limit in [(0, 1, 25), (1, 9, 40), (2, 30, 17), (3, 5, 30), (4, 12, 20)]:
        prompt = torch.randint(2, 80, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
        expected = greedy(target, prompt, limit)
        best = target(torch.tensor([prompt + expected])).logits[0, length - 1 : -1].topk(2).values
        if float((best[:, 0] - best[:, 1]).min()) < 2e-4:
            continue  # a near tie: one more or less thread may flip it
        compared += 1
        plain = run(target, prompt, limit)
        drafted = run(target, prompt, limit, tiny_drafter(target, seed=seed))
        assert plain.tokens == drafted.tokens == expected
        assert plain.accepted == [1] * (limit - 1)
        for right in ([0, 1, 2, 3, 4, 5, 6, 7], [7, 0, 7, 0, 7], [3] * 20):
            drafter = scripted_drafter(prompt + expected, S, right)
            assert run(target, prompt, limit, drafter).tokens == expected
    assert compared >= 3


def test_greedy_acceptance_is_the_longest_right_prefix():
    """Every pattern of right and wrong drafts, also right ones behind a wrong one."""
    best = torch.tensor([5, 9, 7, 3])
    logits = torch.nn.functional.one_hot(best, 12).float()
    for right in itertools.product([True, False], repeat=3):
        drafts = [int(b) if ok else int(b) + 1 for b, ok in zip(best, right)]
        num_right = next((i for i, ok in enumerate(right) if not ok), 3)
        assert accepted(torch.tensor(drafts), None, None, logits) == best[: num_right + 1].tolist()


def test_spec_generate_returns_prompt_and_answer(target, text):
    prompt, answer = text
    out = tiny_drafter(target).spec_generate(target, torch.tensor([prompt]), 20, stop_token_ids=[answer[9]])
    assert out.tolist() == [prompt + answer[:10]]


# stops: the first token, each place in a block, the bonus token


@pytest.mark.parametrize("at", range(11))
@pytest.mark.parametrize("right", [[7, 7], [4, 4], [0] * 12])
def test_stop_token(target, text, at, right):
    """With 7 right, answer[1..7] are drafts and answer[8] the bonus token; with 4, 1..4 and 5; with 0 all are bonus."""
    prompt, answer = text
    result = run(target, prompt, 60, scripted_drafter(prompt + answer, S, right), stop_token_ids=[answer[at], 999])
    assert result.tokens == greedy(target, prompt, 60, stop=[answer[at], 999]) == answer[: at + 1]
    step = right[0] + 1
    assert result.accepted_raw == [step] * -(-at // step)
    assert result.accepted == [step] * (at // step) + ([at % step] if at % step else [])


def test_stop_token_without_drafter(target, text):
    prompt, answer = text
    assert run(target, prompt, 60, stop_token_ids=[answer[5]]).tokens == answer[:6]


@pytest.mark.parametrize("at", [0, 3, 8])
def test_mask_id_is_an_ordinary_token(target, text, at):
    """The target says the drafter's mask token, or finds it in the prompt: it is kept, whether drafted or not."""
    prompt, answer = text
    drafter = tiny_drafter(target, mask_token_id=answer[at])
    assert run(target, prompt, 25, drafter).tokens == answer[:25]
    assert run(target, [answer[at], *prompt], 9, drafter).tokens == greedy(target, [answer[at], *prompt], 9)
    known = scripted_drafter(prompt + answer, S)
    drafter.begin, drafter.propose, drafter.taps = known.begin, known.propose, known.taps
    result = run(target, prompt, 25, drafter)
    assert result.tokens == answer[:25] and result.accepted == [8, 8, 8]


# limits and counts


@pytest.mark.parametrize(
    "limit, right, accepted, raw",
    [
        (12, [], [8, 3], [8, 8]),
        (1, [], [], []),
        (2, [], [1], [8]),
        (9, [], [8], [8]),
        (10, [2, 0, 7], [3, 1, 5], [3, 1, 8]),
        (17, [7, 6, 5], [8, 7, 1], [8, 7, 6]),
        (6, [0, 0, 3], [1, 1, 3], [1, 1, 4]),
    ],
)
def test_counts_by_hand(target, text, limit, right, accepted, raw):
    prompt, answer = text
    result = run(target, prompt, limit, scripted_drafter(prompt + answer, S, right))
    assert result.tokens == answer[:limit]
    assert (result.accepted, result.accepted_raw) == (accepted, raw)
    if accepted:
        assert result.tau == pytest.approx((limit - 1) / len(accepted))
    else:
        assert math.isnan(result.tau)


@pytest.mark.parametrize("blocks", [1, 3, 7])
def test_oracle_drafter_has_tau_of_the_block_size(target, text, blocks):
    prompt, answer = text
    result = run(target, prompt, 1 + blocks * S, scripted_drafter(prompt + answer, S))
    assert result.tau == S and result.tokens == answer[: 1 + blocks * S]


def test_one_target_forward_for_each_step(target, text):
    """The prefill and one forward per verify step; a forward never sees the verified text again."""
    prompt, answer = text
    lengths = []
    handle = target.model.embed_tokens.register_forward_hook(lambda module, args, out: lengths.append(out.shape[1]))
    result = run(target, prompt, 30, scripted_drafter(prompt + answer, S, [2, 5, 0]))
    handle.remove()
    assert lengths == [6] + [S] * len(result.accepted)


def test_the_drafter_sees_all_verified_text(target, text):
    """Blocks accepted in part, whole and not at all: each draft's logits equal a drafter that is run afresh (float64)
    on the features of the whole text before the anchor, which Transformers gives."""
    prompt, answer = text
    known, drafter = scripted_drafter(prompt + answer, S, [2, 7, 0, 5, 7, 1]), tiny_drafter(target)
    states = target(torch.tensor([prompt + answer]), output_hidden_states=True).hidden_states
    context = torch.cat([states[tap + 1][0] for tap in drafter.taps], dim=-1)
    params = {name: p.detach().double() for name, p in drafter.named_parameters()}
    embed, head = target.get_input_embeddings().weight.double(), target.lm_head.weight.double()
    steps = []

    def propose(state, told, num_drafts, choose):
        seen = []
        drafter.propose(state[0], told, num_drafts, seen.append)
        proposal = known.propose(state[1], told, num_drafts, choose)
        at = int(told.length_B)
        block = embed[torch.tensor([(prompt + answer)[at]] + [drafter.mask_token_id] * num_drafts)]
        expected = reference_drafter(params, drafter.config, block, context[:at])[1:] @ head.T
        steps.append(float((seen[0][0] - expected).abs().max()))
        return proposal

    begin = lambda target, capacity: (drafter.begin(target, capacity), known.begin(target, capacity))  # noqa: E731
    both = SimpleNamespace(taps=drafter.taps, block_size=S, begin=begin, propose=propose)
    assert run(target, prompt, 30, both).tokens == answer[:30]
    assert len(steps) == 7 and max(steps) < 1e-4


def test_generations_do_not_touch_each_other(target):
    """Long, short, long with one drafter: each equals a run with a drafter of its own."""
    drafter, hooks = tiny_drafter(target, seed=3), [len(layer._forward_hooks) for layer in target.model.layers]
    for seed, length, limit in [(0, 20, 30), (1, 2, 5), (2, 11, 40)]:
        prompt = torch.randint(2, 80, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
        shared = run(target, prompt, limit, drafter)
        alone = run(target, prompt, limit, tiny_drafter(target, seed=3))
        assert (shared.tokens, shared.accepted_raw) == (alone.tokens, alone.accepted_raw)
    assert [len(layer._forward_hooks) for layer in target.model.layers] == hooks, "a hook was left behind"


def test_smaller_blocks(target, text):
    prompt, answer = text
    for size in (2, 5, 8):
        result = run(target, prompt, 1 + 3 * size, scripted_drafter(prompt + answer, S), block_size=size)
        assert result.accepted == [size] * 3 and result.tokens == answer[: 1 + 3 * size]
        assert run(target, prompt, 20, tiny_drafter(target), block_size=size).tokens == answer[:20]


@pytest.mark.parametrize("size", [0, 1, 9, 16])
def test_other_block_sizes_are_refused(target, text, size):
    with pytest.raises(ValueError, match=rf"block_size: found {size}, expected 2\.\.8"):
        run(target, text[0], 20, tiny_drafter(target), block_size=size)


def test_block_size_needs_a_drafter(target, text):
    with pytest.raises(ValueError, match="block_size"):
        run(target, text[0], 20, block_size=4)


@pytest.mark.parametrize(
    "kind, extra",
    [
        ("Mistral", {"sliding_window": 16}),
        ("Gemma2", {"sliding_window": 16}),
        ("Gemma3", {"sliding_window": 16}),
        ("Qwen3", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2}),
    ],
)
def test_sliding_window_targets_are_refused_by_name(kind, extra):
    windowed = tiny_target(kind, **extra)
    with pytest.raises(ValueError, match=rf"{windowed.config.model_type}.*sliding"):
        run(windowed, [5, 6, 7], 5)


@pytest.mark.parametrize("kind, extra", [("Mistral", {"sliding_window": None}), ("Qwen2", {"sliding_window": 4096})])
def test_windows_that_are_off_are_no_reason_to_refuse(kind, extra):
    full = tiny_target(kind, **extra)
    assert run(full, [5, 6, 7], 12, tiny_drafter(full)).tokens == greedy(full, [5, 6, 7], 12)


def test_lengths_beyond_the_target_are_refused(target, text):
    limit = SHAPE["max_position_embeddings"] - 6 - S
    with pytest.raises(ValueError, match=r"max_new_tokens.*513.*512"):
        run(target, text[0], limit + 1, tiny_drafter(target))


# several prompts at once


LENGTHS, LIMIT = (6, 1, 23, 6, 11), 30


@pytest.fixture(scope="module")
def several():
    """A target in float64, so that no tie is near; prompts of several lengths, and its answers."""
    target = tiny_target("Llama", seed=1, vocab_size=1000).double()
    draw = torch.Generator().manual_seed(7)
    prompts = [torch.randint(2, 1000, (length,), generator=draw).tolist() for length in LENGTHS]
    return target, prompts, [greedy(target, prompt, LIMIT + S) for prompt in prompts]


def drafters(several):
    """Of each kind: none, an untrained one, one that knows the answers and is right so often."""
    target, prompts, answers = several
    texts = [prompt + answer for prompt, answer in zip(prompts, answers)]
    rights = [[7, 0, 3], [2, 2, 2, 2, 2], [], [0, 5, 7, 1], [6, 0, 0, 7]]
    alone = lambda i: scripted_drafter(texts[i], S, rights[i])  # noqa: E731
    untrained = tiny_drafter(target).double()
    return {
        "none": (None, lambda i: None),
        "untrained": (untrained, lambda i: untrained),
        "scripted": (scripted_drafter(texts, S, rights), alone),
    }


@pytest.mark.parametrize("look_every", [1, 2, 5, 100])
@pytest.mark.parametrize("kind", ["none", "untrained", "scripted"])
def test_batched_equals_single(several, kind, look_every):
    """Tokens and counts, with stops in several places, and whenever the host looks."""
    target, prompts, answers = several
    together, alone = drafters(several)[kind]
    stops = {answers[0][13], answers[3][0], answers[4][8]}
    found = generate_batch(target, prompts, LIMIT, together, stop_token_ids=stops, look_every=look_every)
    for i, (prompt, result) in enumerate(zip(prompts, found)):
        single = run(target, prompt, LIMIT, alone(i), stop_token_ids=stops)
        assert result.tokens == single.tokens == greedy(target, prompt, LIMIT, stop=list(stops))
        assert (result.accepted, result.accepted_raw) == (single.accepted, single.accepted_raw)
    assert len({len(result.tokens) for result in found}) > 2, "some stop, and some reach the limit"


def test_a_batch_is_drafted_as_single_runs_are(several, monkeypatch):
    """The drafter's own logits, whatever was rejected before; and no place but the spare one is written twice."""
    target, prompts, _ = several
    drafter, (known, alone) = tiny_drafter(target).double(), drafters(several)["scripted"]
    seen, aim = {}, Buffers.aim

    def aimed(self, index_BN, bound):
        for places in index_BN.tolist():
            own = [place for place in places if place != self.capacity - 1]
            assert len(set(own)) == len(own) and max(own) < bound
        return aim(self, index_BN, bound)

    def both(known, numbers, out):
        def propose(state, told, num_drafts, choose):
            logits = []
            drafter.propose(state[0], told, num_drafts, logits.append)
            for i, length, of_one in zip(numbers, told.length_B.tolist(), logits[0]):
                out[i, length] = of_one
            return known.propose(state[1], told, num_drafts, choose)

        begin = lambda target, capacity: (drafter.begin(target, capacity), known.begin(target, capacity))  # noqa: E731
        return SimpleNamespace(taps=drafter.taps, block_size=S, begin=begin, propose=propose)

    monkeypatch.setattr(Buffers, "aim", aimed)
    generate_batch(target, prompts, LIMIT, both(known, range(len(prompts)), seen))
    for i, prompt in enumerate(prompts):
        single = {}
        run(target, prompt, LIMIT, both(alone(i), [i], single), look_every=1)
        assert len(single) > 3 and all((seen[key] - value).abs().max() < 1e-9 for key, value in single.items())


@pytest.mark.parametrize("kind", ["Qwen3", "Gemma", "Mistral"])
def test_batched_equals_single_for_other_targets(kind):
    target = tiny_target(kind, seed=3, vocab_size=1000, **({"sliding_window": None} if kind == "Mistral" else {}))
    target, drafter = target.double(), tiny_drafter(target).double()
    prompts = [torch.randint(2, 1000, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (9, 4, 17)]
    for prompt, result in zip(prompts, generate_batch(target, prompts, 20, drafter)):
        assert result.tokens == greedy(target, prompt, 20)


def test_attention_without_masks_is_refused_for_several_prompts(target):
    other = copy.deepcopy(target)
    other.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="attn_implementation: found flash_attention_2, expected sdpa or eager"):
        generate_batch(other, [[5, 6], [7, 8]], 5)


class Waits(TorchDispatchMode):
    """Counts what makes a host wait for its device: scalars that are read, and shapes that depend on values."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "unique_dim", "_unique2"):
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("look_every", [1, 4])
def test_the_host_waits_once_a_look(target, text, monkeypatch, look_every, batch, temperature):
    """`tolist`, which no dispatch mode sees, is counted by hand; what follows the last round belongs to no round."""
    prompt, drafter, waits, lists = text[0], tiny_drafter(target), Waits(), []
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda x: lists.append(len(waits.seen)) or tolist(x))
    monkeypatch.setattr(Answers, "tell", lambda self, seconds: self)
    options = {"temperature": temperature, "sampled_proposals": True, "look_every": look_every}
    prompts = [prompt, prompt[:3], prompt + prompt][:batch]
    with torch.no_grad(), waits:  # in inference mode the dispatch mode would see less: `item`, not what it is made of
        answers = generate_batch.__wrapped__(target, prompts, 24, drafter, **options)
    rounds = len(answers.steps) - 1
    assert rounds >= 8 and not waits.seen
    assert len(lists) == 1 + (rounds if look_every == 1 else len(answers.steps) // look_every)


# sampling


VOCAB = 5


def tables(seed, temperature, top_p, top_k):
    """Distributions p[previous] of the target and q1, q2 of the drafter, all of them warped the same way."""
    logits = 1.5 * torch.randn(VOCAB + 2, VOCAB, generator=torch.Generator().manual_seed(seed))
    probs = warp(logits, temperature, top_p, top_k)
    return logits[:VOCAB], probs[:VOCAB], probs[VOCAB:]


def warp(logits, temperature, top_p, top_k):
    """Transformers' warpers, in the order in which its `generate` applies them."""
    logits = TemperatureLogitsWarper(float(temperature))(None, logits)
    if top_k:
        logits = TopKLogitsWarper(top_k)(None, logits)
    if top_p < 1:
        logits = TopPLogitsWarper(top_p)(None, logits)
    return logits.softmax(-1)


WARPS = [(0.7, 1.0, 0), (1.0, 1.0, 0), (1.0, 0.75, 0), (0.7, 0.8, 3), (1.3, 1.0, 2), (1.0, 0.05, 0)]


@pytest.mark.parametrize("temperature, top_p, top_k", WARPS)
def test_probabilities_are_hfs_warpers(temperature, top_p, top_k):
    logits = 2 * torch.randn(200, 40, generator=torch.Generator().manual_seed(9))
    found = probabilities(logits, temperature, top_p, top_k)
    expected = warp(logits, temperature, top_p, top_k)
    assert torch.equal(found > 0, expected > 0)
    assert torch.allclose(found, expected, atol=1e-6)
    assert torch.allclose(probabilities(logits[3], temperature, top_p, top_k), expected[3], atol=1e-6)


def chi_square(counts, expected):
    """(statistic, bound): the bound is the 1 - 1e-5 quantile (Wilson and Hilferty). Rare cells are put together."""
    assert counts[expected == 0].sum() == 0, "a token that has no probability was emitted"
    rare = (expected < 5) & (expected > 0)
    counts = torch.cat((counts[expected >= 5], counts[rare].sum()[None]))
    expected = torch.cat((expected[expected >= 5], expected[rare].sum()[None]))
    counts, expected = counts[expected > 0], expected[expected > 0]
    df = len(expected) - 1
    bound = df * (1 - 2 / (9 * df) + 4.265 * math.sqrt(2 / (9 * df))) ** 3
    return float(((counts - expected) ** 2 / expected).sum()), bound


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("temperature, top_p, top_k", WARPS[:4])
def test_acceptance_keeps_the_targets_distribution(temperature, top_p, top_k, sampled):
    """Blocks of two drafts behind anchor 0, verified by `accept` until two tokens are out."""
    draws = 20_000
    logits, p, q = tables(11, temperature, top_p, top_k)
    code = probabilities(logits, temperature, top_p, top_k)
    generator = torch.Generator().manual_seed(4)
    if sampled:
        drafts = torch.stack([torch.multinomial(row, 2 * draws, True, generator=generator) for row in q], dim=1)
    else:
        drafts = q.argmax(-1)[None].expand(2 * draws, 2)
    kinds = {}  # what accept is given, for every pair of drafts and every anchor
    for a in range(VOCAB):
        for first in range(VOCAB):
            for second in range(VOCAB):
                block = torch.tensor([a, first, second])
                kinds[a, first, second] = block[1:], q if sampled else None, code[block], logits[block]
    counts = torch.zeros(VOCAB, VOCAB)
    for first, again in zip(drafts[:draws].tolist(), drafts[draws:].tolist()):
        out = accepted(*kinds[0, *first], generator)
        if len(out) < 2:
            out += accepted(*kinds[out[0], *again], generator)
        counts[out[0], out[1]] += 1
    statistic, bound = chi_square(counts, draws * p[0][:, None] * p)
    assert statistic < bound


@pytest.mark.parametrize("sampled", [False, True])
def test_impossible_tokens_are_never_accepted(sampled, monkeypatch):
    """u = 0 exactly: a draft with p = 0 is still wrong, a draft with any p > 0 is right."""
    monkeypatch.setattr(torch, "rand", lambda *size, **_: torch.zeros(*size))
    p = torch.tensor([[0.0, 0.5, 0.5], [0.3, 0.0, 0.7], [1.0, 0.0, 0.0]])
    q = torch.tensor([[0.6, 0.4, 0.0], [0.1, 0.9, 0.0]]) if sampled else None
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        out = accepted(torch.tensor([0, 1]), q, p, p, generator)
        assert len(out) == 1 and out[0] in (1, 2)
        out = accepted(torch.tensor([1, 1]), q, p, p, generator)
        assert len(out) == 2 and out[0] == 1 and out[1] in (0, 2)
        out = accepted(torch.tensor([1, 0]), q, p, p, generator)
        assert out == [1, 0, 0]


def test_residual_by_hand(monkeypatch):
    """u close to 1 rejects the first draft; the new token comes from max(p - q, 0) = [0, 0.1, 0.3] / 0.4."""
    monkeypatch.setattr(torch, "rand", lambda *size, **_: torch.full(size, 0.999))
    p, q = torch.tensor([[0.2, 0.5, 0.3]] * 2), torch.tensor([[0.6, 0.4, 0.0]])
    generator = torch.Generator().manual_seed(1)
    drawn = [accepted(torch.tensor([0]), q, p, p, generator) for _ in range(4000)]
    assert all(len(tokens) == 1 for tokens in drawn)
    counts = torch.bincount(torch.tensor(drawn)[:, 0], minlength=3)
    statistic, bound = chi_square(counts.float(), 4000 * torch.tensor([0.0, 0.25, 0.75]))
    assert statistic < bound


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("kind", ["dflash", "eagle3", "mtp"])
@pytest.mark.parametrize("temperature, top_p, top_k", [(0.7, 0.95, 4), (1.0, 0.95, 4), (1.5, 0.9, 0)])
def test_sampling_through_the_whole_loop(temperature, top_p, top_k, kind, sampled):
    """6,000 answers with each kind of drafter, many at once: tokens 2 and 3 against the target's distributions."""
    target = tiny_target(
        "Llama", seed=5, vocab_size=6, hidden_size=16, intermediate_size=16, num_hidden_layers=3, num_attention_heads=2
    )
    drafter = tiny_drafter(target, taps=(0, 1), num_layers=1, block_size=3, kind=kind)
    prompt, runs = [2, 3, 4], 6000
    generator = torch.Generator().manual_seed(6)
    options = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "sampled_proposals": sampled}
    options["generator"], warped = generator, (temperature, top_p, top_k)
    found = [r for _ in range(12) for r in generate_batch(target, [prompt] * (runs // 12), 3, drafter, **options)]
    answers = [result.tokens for result in found]
    expected = torch.zeros(6, 6)
    with torch.no_grad():
        first = warp(target(torch.tensor([prompt])).logits[0, -1:], *warped)[0]
        for a in range(6):
            second = warp(target(torch.tensor([[*prompt, a]])).logits[0, -1:], *warped)[0]
            for b in range(6):
                third = warp(target(torch.tensor([[*prompt, a, b]])).logits[0, -1:], *warped)[0]
                expected[b] += first[a] * second[b] * third
    counts = torch.zeros(6, 6)
    for _, b, c in answers:
        counts[b, c] += 1
    statistic, bound = chi_square(counts, runs * expected)
    assert statistic < bound


def test_an_oracle_scores_the_block_size_in_the_evaluator(target, text):
    """A drafter that knows the answer, on an answer of 1 + nS tokens: tau is S, speed and identity see one text."""
    prompt, _ = text
    config = EvaluateConfig(max_new_tokens=1 + 4 * S, identity_tokens=1 + 2 * S)
    answer = greedy(target, prompt, 1 + 4 * S)
    oracle = scripted_drafter(prompt + answer, S)
    (result,) = measure_speed(target, oracle, [("one", prompt)], {999}, config)
    report = summarise([result], S)
    assert report["tau"] == S and report["verify_steps"] == 4 and report["slot_acceptance"] == [1.0] * (S - 1)
    assert (result.alone_tokens, result.draft_tokens) == (1 + 4 * S, 1 + 4 * S)
    assert compare_outputs(target, oracle, [("one", prompt)], {999}, config)["identical"] == 1


def test_the_evaluator_finds_different_words(target, text):
    """A drafter that changes the target's words is found out, and not excused as a near tie."""
    prompt, _ = text
    target = copy.deepcopy(target)
    config = EvaluateConfig(identity_tokens=20)

    class Liar:
        taps, block_size, dtype = [1], S, torch.float32
        begin = staticmethod(lambda target, capacity: None)
        double = float = lambda self: self

        def propose(self, state, told, num_drafts, choose):
            target.lm_head.weight.mul_(-1)  # the target itself answers otherwise once a drafter is at work
            return Proposal(torch.zeros(1, num_drafts, dtype=torch.long), None)

    counts = compare_outputs(target, Liar(), [("one", prompt)], {999}, config)
    assert counts == {"prompts": 1, "identical": 0, "near_ties": 0, "different": 1}
