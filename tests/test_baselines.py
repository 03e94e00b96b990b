"""The baselines. Reference: Transformers' Qwen3 layers on the whole text of each draft, run anew for every step and
without caches; training's unrolled steps and serving's drafts must equal it. Then the loop: the target's own words."""

import pytest
import torch
from helpers import MASK, eligible, greedy, pack, random_rows, tiny_drafter, tiny_target
from transformers import Qwen3Config, Qwen3Model

from dflash.baselines import AutoregressiveDrafter, FusedDrafter, make_drafter
from dflash.config import ModelConfig, drafter_config
from dflash.generate import Proposal, Round, generate_batch
from dflash.model import DFlashDraftModel, TargetEnds
from dflash.objective import block_loss

S, TAPS = 5, [0, 2, 4]
KINDS = ["eagle3", "mtp", "fused", "tokens"]


@pytest.fixture(scope="module")
def target():
    return tiny_target("Llama", seed=1).double()


def baseline(target, kind, layers=2):
    return tiny_drafter(target, block_size=S, num_layers=layers, taps=TAPS, kind=kind).double()


def reference(drafter, target, ids, features_TF, anchor):
    """Logits [S - 1, V] of the drafts behind an anchor, tokens forced: each from the whole text so far."""
    kind = drafter.config.drafter_kind
    config = Qwen3Config(**{**drafter.config.to_dict(), "num_hidden_layers": len(drafter.layers), "is_causal": True})
    config._attn_implementation = "eager"
    plain = Qwen3Model(config).double().eval()
    plain.layers.load_state_dict(drafter.layers.state_dict(), strict=True)
    plain.norm = torch.nn.Identity()
    norm = lambda x, layer: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + layer.eps) * layer.weight  # noqa: E731
    table, size = target.get_input_embeddings().weight, drafter.fc.in_features
    states = torch.stack([torch.zeros(size, dtype=torch.double), *features_TF[:anchor, -size:]])
    read = list(states @ drafter.fc.weight.T * (kind != "tokens"))  # goes with tokens 0 .. anchor

    def through(tokens, mask=None):
        both = torch.cat(
            (norm(table[tokens], drafter.embed_norm), norm(torch.stack(read), drafter.hidden_norm)), dim=-1
        )
        embeds = (both @ drafter.merge.weight.T)[None]
        return plain(inputs_embeds=embeds, attention_mask=mask, use_cache=False).last_hidden_state[0]

    hidden = []
    if kind in ("fused", "tokens"):
        read += [torch.zeros_like(read[0])] * (S - 1)
        hidden_from = torch.ones(len(read), len(read)).triu(1)
        hidden_from[anchor + 1 :] = 0.0  # slots see the whole block
        mask = (hidden_from.double() * torch.finfo(torch.double).min)[None, None]
        hidden = through(torch.cat((ids[: anchor + 1], torch.full((S - 1,), MASK))), mask)[anchor + 1 :]
    for step in range(S - 1) if not len(hidden) else ():
        hidden.append(through(ids[: anchor + step + 1])[-1])
        read.append(hidden[-1])
    return norm(torch.stack(list(hidden)), drafter.norm) @ target.lm_head.weight.T


@pytest.fixture(scope="module")
def rows():
    return [(ids, mask, x.double()) for ids, mask, x in random_rows([17, 9, 23], len(TAPS) * 48, supervised=2.0)]


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_unrolled_training_is_the_reference(target, rows, kind):
    """Neighbouring anchors, the first and last possible, several documents in a bin."""
    drafter = baseline(target, kind)
    anchors = [[0, 5, 6, 11], [3, 4], [1, 18]]
    batch, ends = pack(rows, anchors, S, 2.0), TargetEnds.of(target, drafter.config)
    found = iter(ends.logits(drafter(*drafter.block_inputs(batch, ends))[0].unflatten(0, (-1, S))))
    for (ids, _, features_TF), local in zip(rows, anchors):
        for anchor in local:
            expected = reference(drafter, target, ids, features_TF, anchor)
            known = min(S - 1, len(ids) - anchor) if kind in ("eagle3", "mtp") else S - 1  # what can be forced
            assert (next(found)[1 : known + 1] - expected[:known]).abs().max() < 1e-5


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_serving_is_the_reference(target, rows, kind):
    """Two texts in a batch, context in uneven pieces, void features behind each; drafts forced to the true tokens."""
    drafter, texts = baseline(target, kind), (rows[0], rows[2])
    state, bound = drafter.begin(target, 40), 32
    done = [0, 0]
    for at in ([2, 7], [3, 8], [8, 9], [12, 17]):
        length = [a - d for a, d in zip(at, done)]
        void = torch.full((1, len(TAPS) * 48), 7.0, dtype=torch.double)
        pieces, tokens = [], []
        for (ids, _, features_TF), d, a in zip(texts, done, at):
            fill = max(length) + 1 - (a - d)
            pieces.append(torch.cat((features_TF[d:a], void.expand(fill, -1))))
            tokens.append(torch.cat((ids[d:a], torch.zeros(fill, dtype=torch.long))))
        seen = []

        def choose(logits, at=tuple(at), seen=seen):
            seen.extend(logits.unbind(1))
            drafted = slice(1 + len(seen) - logits.shape[1], 1 + len(seen))
            return Proposal(torch.stack([ids[a:][drafted] for (ids, *_), a in zip(texts, at)]), None)

        anchor_B = torch.tensor([int(ids[a]) for (ids, *_), a in zip(texts, at)])
        features_BTF = torch.stack(pieces)[..., -drafter.fc.in_features :]  # the loop gives a drafter its own taps
        told = Round(
            anchor_B, torch.tensor(at), features_BTF, torch.tensor(done), torch.stack(tokens), bound, False
        )  # fmt: skip
        proposal = drafter.propose(state, told, S - 1, choose)
        assert proposal.ids.shape == (2, S - 1)
        for b, ((ids, _, features_TF), a) in enumerate(zip(texts, at)):
            expected = reference(drafter, target, ids, features_TF, a)
            assert (torch.stack(seen)[:, b] - expected).abs().max() < 1e-5
        done = list(at)


@pytest.mark.parametrize("kind", KINDS)
def test_the_loop_says_the_targets_words(target, kind):
    """Several prompts at once, and each alone: the same words, the same counts."""
    drafter = baseline(target, kind, layers=1)
    draw = torch.Generator().manual_seed(3)
    prompts = [torch.randint(2, 80, (n,), generator=draw).tolist() for n in (5, 1, 12)]
    together = generate_batch(target, prompts, 25, drafter)
    for prompt, result in zip(prompts, together):
        (alone,) = generate_batch(target, [prompt], 25, drafter)
        assert result.tokens == alone.tokens == greedy(target, prompt, 25)
        assert result.accepted_raw == alone.accepted_raw


@pytest.mark.parametrize("kind", KINDS)
def test_training_learns_to_draft(target, kind):
    """After some steps on the target's own greedy answers, drafts are accepted in the loop that were not before."""
    drafter = baseline(target, kind, layers=1).float()
    mine = tiny_target("Llama", seed=1)
    prompts = [torch.randint(2, 80, (6,), generator=torch.Generator().manual_seed(n)).tolist() for n in range(4)]
    rows = []
    for prompt in prompts:
        ids = torch.tensor(prompt + greedy(mine, prompt, 30))
        states = mine(ids[None], output_hidden_states=True).hidden_states
        features_TF = torch.cat([states[tap + 1][0] for tap in TAPS], dim=-1)
        rows.append((ids, torch.arange(len(ids)) >= 6, features_TF))
    batch, ends = (
        pack(rows, [eligible(mask.tolist()) for _, mask, _ in rows], S, 2.0),
        TargetEnds.of(mine, drafter.config),
    )
    before = [result.tau for result in generate_batch(mine, prompts, 30, drafter)]
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=3e-3)
    for _ in range(80):
        optimizer.zero_grad()
        block_loss(drafter, batch, ends, chunk=64).loss.backward()
        optimizer.step()
    after = [result.tau for result in generate_batch(mine, prompts, 30, drafter)]
    assert sum(after) > 2 * sum(before) and min(after) > 2


def test_kinds():
    target = tiny_target("Llama")
    eagle, mtp = baseline(target, "eagle3"), baseline(target, "mtp")
    assert isinstance(eagle, AutoregressiveDrafter) and eagle.taps == TAPS and eagle.fc.in_features == 3 * 48
    assert mtp.taps == TAPS[-1:] and mtp.fc.in_features == 48
    assert isinstance(baseline(target, "fused"), FusedDrafter) and baseline(target, "fused").fc.in_features == 3 * 48
    model = ModelConfig("tiny", block_size=S, num_layers=1, taps=TAPS, mask_token_id=1)
    assert type(make_drafter(drafter_config(target.config, model))) is DFlashDraftModel
