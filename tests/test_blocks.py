"""Blocks and the one mask against brute force. The references here are loops over Python integers: which keys a query
may see, which tokens a block learns, with which weight and position. The BlockMask is checked twice: its predicate
densified, and its block table, so that a kernel that skips blocks skips nothing visible."""

import math
import random

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_mask, flex_attention

from dflash.blocks import (
    attention_mask,
    decay_weights,
    eligible_anchors,
    grouped_mask,
    make_blocks,
    sample_anchors,
    visible,
)


def slow_mask(starts, anchors, num_context, block_size):
    """May slot s of block b see key n? A list of rows."""
    rows = []
    for start, anchor in zip(starts, anchors):
        b = len(rows) // block_size
        row = [start <= n < anchor for n in range(num_context)]
        row += [m // block_size == b for m in range(len(anchors) * block_size)]
        rows += [row] * block_size
    return torch.tensor(rows, dtype=torch.bool)


@st.composite
def layouts(draw):
    """Document bounds, and anchors in any document: adjacent, repeated, first and last token included."""
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    bounds = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    anchors = draw(st.lists(st.integers(0, bounds[-1] - 1), min_size=1, max_size=6))
    return bounds, sorted(anchors), draw(st.integers(2, 5))


def starts_of(bounds, anchors):
    return [max(b for b in bounds if b <= anchor) for anchor in anchors]


@settings(max_examples=100)
@given(layouts())
def test_dense_mask(layout):
    bounds, anchors, size = layout
    starts = starts_of(bounds, anchors)
    mask = attention_mask(torch.tensor(anchors), torch.tensor(starts), bounds[-1], size, dense=True)
    assert torch.equal(mask, slow_mask(starts, anchors, bounds[-1], size))


EDGES = [
    ([0, 40], [0, 1, 1, 39], 4),  # start, adjacent, repeated, end
    ([0, 7, 8, 300], [0, 6, 7, 8, 9, 150, 298, 299], 16),  # a document of one token; more keys than one flex block
    ([0, 130, 140], [129, 130, 131], 8),
]


@pytest.mark.parametrize("bounds, anchors, size", EDGES)
def test_block_mask_is_the_dense_mask(bounds, anchors, size):
    starts = starts_of(bounds, anchors)
    expected = slow_mask(starts, anchors, bounds[-1], size)
    arguments = torch.tensor(anchors), torch.tensor(starts), bounds[-1], size
    assert torch.equal(attention_mask(*arguments, dense=True), expected)
    assert torch.equal(create_mask(visible(*arguments), 1, 1, *expected.shape, device="cpu")[0, 0], expected)
    block_mask = attention_mask(*arguments, dense=False)
    assert block_mask.shape[-2:] == expected.shape
    rows, columns = (-(-n // 128) for n in expected.shape)
    wide = F.pad(expected, (0, columns * 128 - expected.shape[1], 0, rows * 128 - expected.shape[0]))
    tiles = wide.view(rows, 128, columns, 128)
    assert torch.equal(block_mask.to_dense()[0, 0].bool(), tiles.any(dim=3).any(dim=1))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("bounds, anchors, size", EDGES)
def test_flex_attention_equals_sdpa(bounds, anchors, size):
    starts = starts_of(bounds, anchors)
    expected = slow_mask(starts, anchors, bounds[-1], size)
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, n, 16) for n in (expected.shape[0], expected.shape[1], expected.shape[1]))
    block_mask = attention_mask(torch.tensor(anchors), torch.tensor(starts), bounds[-1], size, dense=False)
    with torch.no_grad():
        flex = flex_attention(q, k, v, block_mask=block_mask)
    plain = (q @ k.transpose(-1, -2) / 4).masked_fill(~expected, -math.inf).softmax(-1) @ v
    assert (flex - plain).abs().max() < 1e-5
    assert (F.scaled_dot_product_attention(q, k, v, attn_mask=expected) - plain).abs().max() < 1e-5


@settings(deadline=None, max_examples=30)
@given(layouts(), st.integers(1, 5))
def test_grouped_mask_is_the_dense_mask(layout, group_size):
    """Put back into their places, the groups give the brute-force mask, and every query stands in one group."""
    bounds, anchors, size = layout
    starts = starts_of(bounds, anchors)
    num_context = bounds[-1]
    whole = torch.zeros(len(anchors) * size, num_context + len(anchors) * size, dtype=torch.bool)
    times = torch.zeros(len(anchors) * size)
    for group in grouped_mask(torch.tensor(anchors).long(), torch.tensor(starts).long(), num_context, size, group_size):
        keys = [*range(group.context.start, group.context.stop), *range(group.slots.start, group.slots.stop)]
        whole[group.queries, keys] = group.mask
        times[group.queries] += 1
        assert group.mask.any(dim=0).all()  # no key is paid for that no query sees
    assert torch.equal(whole, slow_mask(starts, anchors, num_context, size)) and (times == 1).all()


def slow_block(ids, mask, start, end, anchor, size, mask_token, gamma):
    """(inputs, labels, weights, positions) of one block; the label is None where nothing is learned."""
    inputs, labels, weights = [ids[anchor]] + [mask_token] * (size - 1), [None], [0.0]
    alive = True
    for k in range(1, size):
        alive = alive and anchor + k < end and mask[anchor + k]
        labels.append(ids[anchor + k] if alive else None)
        weights.append(math.exp(-(k - 1) / gamma) if alive else 0.0)
    return inputs, labels, weights, [anchor - start + k for k in range(size)]


@pytest.mark.parametrize("seed", range(12))
def test_make_blocks(seed):
    r = random.Random(seed)
    size, gamma = r.choice([(4, 1.5), (8, 4.0), (16, 7.0)])
    lengths = [r.randint(1, 25) for _ in range(r.randint(1, 4))]
    bounds = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    ids = [r.randint(10, 99) for _ in range(bounds[-1])]
    mask = [r.random() < 0.85 for _ in ids]
    anchors = sorted(r.choices(range(len(ids)), k=7)) + [bounds[-1] - 1, 0]  # repeats, the very end, the very start
    made = make_blocks(
        torch.tensor(ids), torch.tensor(mask), torch.tensor(bounds), torch.tensor(anchors), size, 3, gamma
    )
    for a, anchor in enumerate(anchors):
        start = starts_of(bounds, [anchor])[0]
        end = min(b for b in bounds if b > anchor)
        inputs, labels, weights, positions = slow_block(ids, mask, start, end, anchor, size, 3, gamma)
        assert made.input_AS[a].tolist() == inputs
        assert made.position_AS[a].tolist() == positions
        assert made.weight_AS[a].tolist() == pytest.approx(weights, rel=1e-6)
        found = [label if weight > 0 else None for label, weight in zip(made.label_AS[a].tolist(), made.weight_AS[a])]
        assert found == labels
        assert (made.start_A[a], made.anchor_A[a]) == (start, anchor)


def test_make_blocks_by_hand():
    """Document [10..15], [20..25]; token 13 and 24 unsupervised. Blocks of 4 from the first document's every token."""
    ids = torch.tensor([10, 11, 12, 13, 14, 15, 20, 21, 22, 23, 24, 25])
    mask = (ids != 13) & (ids != 24)
    made = make_blocks(ids, mask, torch.tensor([0, 6, 12]), torch.tensor([0, 3, 4, 5, 7]), 4, 1, 1.0)
    w1 = math.exp(-1)
    assert made.weight_AS.tolist() == [
        pytest.approx(row) for row in ([0, 1, w1, 0], [0, 1, w1, 0], [0, 1, 0, 0], [0] * 4, [0, 1, w1, 0])
    ]
    assert made.label_AS[[0, 1, 2, 4], 1].tolist() == [11, 14, 15, 22]
    assert made.input_AS.tolist() == [[10, 1, 1, 1], [13, 1, 1, 1], [14, 1, 1, 1], [15, 1, 1, 1], [21, 1, 1, 1]]
    assert made.position_AS[:, 0].tolist() == [0, 3, 4, 5, 1]


def test_decay_weights_golden():
    """The paper's curve at block 16, gamma 7 and block 8, gamma 4, to six digits."""
    wide = [0, 1, 0.866878, 0.751477, 0.651439, 0.564718, 0.489542, 0.424373, 0.367879, 0.318907, 0.276453, 0.239651]
    wide += [0.207749, 0.180092, 0.156118, 0.135335]
    narrow = [0, 1, 0.778801, 0.606531, 0.472367, 0.367879, 0.286505, 0.223130]
    assert decay_weights(16, 7.0).tolist() == pytest.approx(wide, abs=1e-6)
    assert decay_weights(8, 4.0).tolist() == pytest.approx(narrow, abs=1e-6)
    assert decay_weights(8, 4.0).dtype == torch.float32


@settings(max_examples=100)
@given(st.lists(st.booleans(), min_size=1, max_size=30), st.integers(0, 40))
def test_eligible_and_sampled_anchors(mask, count):
    expected = [i for i in range(len(mask) - 1) if mask[i] and mask[i + 1]]
    assert eligible_anchors(torch.tensor(mask)).tolist() == expected
    drawn = sample_anchors(torch.tensor(mask), count, seed=1, epoch=2, row_id="r").tolist()
    assert drawn == sorted(set(drawn)) and set(drawn) <= set(expected)
    assert len(drawn) == min(count, len(expected))


def test_anchors_depend_on_the_arguments_alone():
    mask = torch.ones(60, dtype=torch.bool)

    def draw(**key):
        return sample_anchors(mask, 5, **{"seed": 0, "epoch": 0, "row_id": "a", **key}).tolist()

    torch.manual_seed(1)
    first = draw()
    torch.manual_seed(2)
    torch.rand(3)
    state = torch.get_rng_state()
    assert draw() == first
    assert torch.equal(torch.get_rng_state(), state), "the global random state is left alone"
    others = [draw(seed=1), draw(epoch=1), draw(row_id="b"), draw(occurrence=1), draw(seed=10, epoch=0)]
    assert len({tuple(x) for x in [first, *others]}) == 6
    assert first == GOLDEN["first"] and draw(epoch=1) == GOLDEN["epoch"] and draw(occurrence=1) == GOLDEN["again"]


GOLDEN = {"first": [25, 26, 28, 33, 36], "epoch": [7, 13, 19, 21, 27], "again": [19, 20, 29, 44, 56]}


def test_anchors_are_uniform():
    """10 of 40 over 2000 epochs: each is drawn 500 times, give or take five standard deviations (19 each)."""
    counts = torch.zeros(41)
    for epoch in range(2000):
        counts[sample_anchors(torch.ones(41, dtype=torch.bool), 10, seed=0, epoch=epoch, row_id="x")] += 1
    assert counts[40] == 0
    assert (counts[:40] - 500).abs().max() < 97
