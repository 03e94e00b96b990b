"""`block_loss` against a float64 double loop. The reference runs one block at a time through a drafter written again
in helpers.py, sees the context of that block only, forms full logits, and sums weight times cross-entropy over blocks
and slots in Python. Compared: the loss, the gradient of every drafter parameter, and the slots that were right."""

import math

import pytest
import torch
import torch.nn.functional as F
from helpers import MASK, eligible, pack, random_rows, reference_drafter, tiny_drafter, tiny_target

from dflash import objective as objective_module
from dflash.blocks import attention_mask
from dflash.model import TargetEnds
from dflash.objective import ChunkedCrossEntropy, Objective, block_loss, padded

S, GAMMA = 8, 4.0
LENGTHS = [17, 5, 23]


def ends_of(kind):
    """Two tables and scales: plain and tied, or everything that a target may have."""
    g = torch.Generator().manual_seed(5)
    embed, head = torch.randn(80, 48, generator=g), torch.randn(80, 48, generator=g)
    if kind == "tied":
        return TargetEnds(embed, embed)
    return TargetEnds(embed, head, embed_scale=1.7, logit_scale=0.4, softcap=3.0 if kind == "capped" else None)


@pytest.fixture(scope="module")
def drafter():
    return tiny_drafter(tiny_target("Qwen3"))


@pytest.fixture(scope="module")
def case():
    """Rows with gaps and tails; anchors: every second eligible one, and always the last, whose block is cut short."""
    rows = random_rows(LENGTHS, 3 * 48, supervised=0.9)
    anchors = [sorted(set(eligible(mask)[::2] + eligible(mask)[-1:])) for _, mask, _ in rows]
    return rows, anchors


def slow_loss(drafter, rows, anchors, ends, objective=Objective.decay):
    """Loss, gradients by name, and per block {slot: was it right}. Rows of `distill` have the target's last states."""
    params = {name: p.detach().double().requires_grad_() for name, p in drafter.named_parameters()}
    loss, right = 0.0, []
    for (ids, mask, features, *last), local in zip(rows, anchors):
        for a in local:
            slots = torch.tensor([ids[a]] + [MASK] * (S - 1))
            embeds = ends.embed_VD.double()[slots] * ends.embed_scale
            hidden = reference_drafter(params, drafter.config, embeds, features[:a])
            right.append({})
            losses = []
            for k in range(1, S):
                if a + k >= len(ids) or not mask[a + k]:
                    break
                logits = slow_logits(hidden[k], ends)
                losses.append(F.cross_entropy(logits[None], ids[a + k : a + k + 1]))
                if objective == Objective.distill:
                    teacher = slow_logits(last[0][a + k - 1].double(), ends).softmax(-1)
                    losses[-1] = (teacher * (teacher.log() - logits.log_softmax(-1))).sum()
                right[-1][k] = bool(logits.argmax() == ids[a + k])
            weights = [math.exp(-k / GAMMA) for k in range(len(losses))]
            if objective == Objective.dpace:
                smooth = [0.5 * math.exp(-float(one.detach())) + 0.5 for one in losses]
                weights = [sum(math.prod(smooth[: m + 1]) for m in range(k, len(losses))) for k in range(len(losses))]
            loss = loss + sum(w * one for w, one in zip(weights, losses))
    loss.backward()
    return loss.item(), {name: p.grad for name, p in params.items()}, right


def slow_logits(hidden, ends):
    logits = ends.head_VD.double() @ hidden * ends.logit_scale
    return logits if ends.softcap is None else ends.softcap * torch.tanh(logits / ends.softcap)


@pytest.mark.parametrize("kind", ["tied", "capped"])
@pytest.mark.parametrize("objective", [Objective.dpace, Objective.distill])
def test_other_objectives_are_their_double_loops(drafter, case, kind, objective):
    rows, anchors = case
    ends, last = ends_of(kind), torch.randn(sum(LENGTHS), 48, generator=torch.Generator().manual_seed(2))
    batch = pack(rows, anchors, S, GAMMA)
    if objective == Objective.distill:
        rows = [(*row, states) for row, states in zip(rows, last.split(LENGTHS))]
        slot, block = batch.weighted_N % S, batch.weighted_N // S
        batch.teacher_ND = last[batch.blocks.anchor_A[block] + slot - 1]
    expected, grads, _ = slow_loss(drafter, rows, anchors, ends, objective)
    for chunk in (7, 10_000):
        drafter.zero_grad()
        out = block_loss(drafter, batch, ends, chunk, objective)
        out.loss.backward()
        assert out.loss.item() == pytest.approx(expected, rel=1e-5)
        for name, parameter in drafter.named_parameters():
            assert (parameter.grad - grads[name]).abs().max() < 2e-4 * grads[name].abs().max(), name


@pytest.mark.parametrize("dense", [False, True])
def test_padding_to_static_shapes_changes_nothing(drafter, case, dense, monkeypatch):
    """Loss, gradients and right slots of the bin as it is, by the grouped mask of the CPU and by the dense one."""
    rows, anchors = case
    batch, ends = pack(rows, anchors, S, GAMMA), ends_of("scaled")
    filled = padded(batch, sum(LENGTHS) + 19, len(batch.blocks.anchor_A) + 5)
    assert len(filled.position_T) == sum(LENGTHS) + 19 and filled.blocks.input_AS.shape == (
        len(batch.blocks.anchor_A) + 5,
        S,
    )
    if dense:
        monkeypatch.setattr(objective_module, "grouped_mask", lambda *g: attention_mask(*g, dense=True))
    results = []
    for each in (batch, filled):
        drafter.zero_grad()
        out = block_loss(drafter, each, ends, 16)
        out.loss.backward()
        results.append((out, torch.cat([p.grad.flatten().clone() for p in drafter.parameters()])))
    (one, grad), (other, grad_filled) = results
    assert other.loss.item() == pytest.approx(one.loss.item(), rel=1e-6)
    assert (grad - grad_filled).abs().max() < 1e-5 * grad.abs().max()
    assert (
        torch.equal(other.right_AS[: len(one.right_AS)], one.right_AS) and not other.right_AS[len(one.right_AS) :].any()
    )


def test_distilling_the_targets_own_states_is_at_its_minimum():
    """The drafter's state equal to the target's: no divergence, no gradient, whatever the labels."""
    states, ends = torch.randn(9, 48, generator=torch.Generator().manual_seed(4)), ends_of("scaled")
    hidden = states.clone().requires_grad_()
    loss_N, _ = ChunkedCrossEntropy.apply(hidden, torch.arange(9), ends, 4, states)
    loss_N.sum().backward()
    assert loss_N.abs().max() < 1e-5 and hidden.grad.abs().max() < 1e-5


@pytest.mark.parametrize("kind", ["tied", "scaled", "capped"])
def test_block_loss_is_the_double_loop(drafter, case, kind):
    rows, anchors = case
    ends = ends_of(kind)
    expected, grads, right = slow_loss(drafter, rows, anchors, ends)
    assert any(len(slots) < S - 1 for slots in right), "no block is cut short: a weak test"
    results = {}
    for chunk in (1, 7, 10_000):
        drafter.zero_grad()
        out = block_loss(drafter, pack(rows, anchors, S, GAMMA), ends, chunk)
        out.loss.backward()
        results[chunk] = out
        assert out.loss.dtype == torch.float32
        assert out.loss.item() == pytest.approx(expected, rel=1e-5)
        for name, parameter in drafter.named_parameters():
            scale = grads[name].abs().max()
            assert scale > 0, f"{name} has no gradient in the reference: a weak test"
            assert (parameter.grad - grads[name]).abs().max() < 2e-4 * scale, name
        for row, slots in zip(out.right_AS.tolist(), right):
            assert row == [slots.get(k, False) for k in range(S)]
    for chunk in (1, 7):
        assert torch.equal(results[chunk].right_AS, results[10_000].right_AS)


def test_right_slots_are_found(drafter, case):
    """With labels replaced by the drafter's own predictions, every weighted slot is right; with others, none."""
    rows, anchors = case
    ends = ends_of("tied")
    batch = pack(rows, anchors, S, GAMMA)
    seen = []
    handle = drafter.register_forward_hook(lambda module, args, output: seen.append(output[0]))
    block_loss(drafter, batch, ends, 64)
    handle.remove()
    predicted_AS = (seen[0] @ ends.head_VD.T).argmax(-1).view_as(batch.blocks.label_AS)
    batch.blocks.label_AS = predicted_AS
    assert torch.equal(block_loss(drafter, batch, ends, 64).right_AS, batch.blocks.weight_AS > 0)
    batch.blocks.label_AS = (predicted_AS + 1) % 80
    assert not block_loss(drafter, batch, ends, 64).right_AS.any()


def test_target_ends_get_no_gradient(drafter, case):
    ends = ends_of("scaled")
    ends.head_VD.requires_grad_()
    block_loss(drafter, pack(*case, S, GAMMA), ends, 64).loss.backward()
    assert ends.head_VD.grad is None
    drafter.zero_grad()


@pytest.mark.parametrize("anchors", [[[], [], []], [[len_ - 1] for len_ in LENGTHS]])
def test_nothing_to_learn(drafter, case, anchors):
    """No anchors (the bin that fills up a rank), or anchors without a label: loss 0, zero gradients, and a graph."""
    drafter.zero_grad()
    out = block_loss(drafter, pack(case[0], anchors, S, GAMMA), ends_of("capped"), 64)
    assert out.loss.item() == 0 and out.right_AS.shape == (sum(map(len, anchors)), S)
    out.loss.backward()
    for name, parameter in drafter.named_parameters():
        assert parameter.grad is not None and not parameter.grad.any(), name
