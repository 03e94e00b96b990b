"""What a step is made of does not depend on who computes it: the rows, anchors, labels and weights of all ranks
together are the same multiset for every number of ranks and every budget. References: double loops over the rows, and
features that carry their own row and position, by which blocks are found again in any packing.
"""

import math
from collections import Counter
from itertools import pairwise

import pytest
import run_helpers as helpers
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.store import Row
from dflash.objective import Objective
from train.data import Steps, epoch_order, make_batch, pack, split_rows

GAMMA, SLOTS, PER_ROW = 4.0, 8, 12
BUDGETS = [(400, 200), (128, 12), (111, 30)]  # of tokens and anchors


@pytest.fixture(scope="module")
def store():
    return helpers.make_store(helpers.folder() / "store", helpers.uneven_masks(), num_features=4, heldout=[1])


def loaders(store, world=1, budgets=BUDGETS[0], seed=3, rows_per_step=3):
    tokens, anchors = budgets
    config = helpers.config(
        store.folder, f"batch.rows_per_step={rows_per_step}", f"batch.anchors_per_row={PER_ROW}",
        f"batch.bin_tokens={tokens}", f"batch.bin_anchors={anchors}",
    )  # fmt: skip
    rows, _ = split_rows(store, 0.1)
    return [Steps(store, rows, config.model, config.batch, seed, rank, world) for rank in range(world)]


def slots(step):
    """Multiset of (row, anchor's position, slot, label, weight, slot's position) of a rank's weighted slots."""
    found = Counter()
    for batch in step.batches:
        blocks = batch.blocks
        weighted = set(batch.weighted_N.tolist())
        for a, anchor in enumerate(blocks.anchor_A.tolist()):
            row, at = (int(x) for x in batch.features_TF[anchor, :2])
            assert batch.position_T[anchor] == at and blocks.start_A[a] == anchor - at
            for slot in range(SLOTS):
                weight = float(blocks.weight_AS[a, slot])
                assert (weight > 0) == (a * SLOTS + slot in weighted)
                if weight:
                    label, position = int(blocks.label_AS[a, slot]), int(blocks.position_AS[a, slot])
                    found[row, at, slot, label, weight, position] += 1
    return found


def expected_slots(store, anchors):
    """The same by a double loop over the rows, for the given (row, position) of anchors. Weights in float64."""
    found = {}
    for row, at in anchors:
        held = store.row(row)
        for slot in range(1, SLOTS):
            inside = at + slot < len(held.ids_T)
            if not inside or not held.loss_mask_T[at + slot]:
                break
            found[row, at, slot, int(held.ids_T[at + slot]), at + slot] = math.exp(-(slot - 1) / GAMMA)
    return found


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("budgets", BUDGETS)
def test_a_step_is_the_same_for_every_number_of_ranks_and_every_budget(store, world, budgets):
    (single,), ranks = loaders(store), loaders(store, world, budgets)
    assert single.per_epoch() == 3
    for number in range(2 * 3):
        whole, parts = single[number], [loader[number] for loader in ranks]
        assert sum((slots(part) for part in parts), Counter()) == slots(whole)
        assert len({len(part.batches) for part in parts}) == 1 and len(parts[0].batches) > 0
        for part in parts:
            assert part.rows == whole.rows and part.num_anchors == whole.num_anchors and part.epoch == whole.epoch
            assert math.isclose(part.weight, whole.weight, rel_tol=1e-12)


def test_weight_is_the_independent_sum_over_labels_and_loads_are_as_promised(store):
    (loader,) = loaders(store, budgets=BUDGETS[1])
    for number in range(6):
        step = loader[number]
        found = slots(step)
        expected = expected_slots(store, {key[:2] for key in found})
        assert {key[:4] + key[5:] for key in found} == set(expected) and set(found.values()) == {1}
        assert all(math.isclose(key[4], expected[key[:4] + key[5:]], rel_tol=1e-6) for key in found)
        assert math.isclose(step.weight, sum(expected.values()), rel_tol=1e-6)
        assert math.isclose(step.weight, sum(key[4] for key in found), rel_tol=1e-12)
        anchors = {key[:2] for key in found}
        eligible = {row: eligible_by_loop(store.row(row).loss_mask_T.tolist()) for row in step.rows}
        assert all(at in eligible[row] for row, at in anchors)
        assert step.num_anchors == len(anchors) == sum(min(PER_ROW, len(e)) for e in eligible.values())
        assert step.num_eligible == sum(map(len, eligible.values()))
        assert step.num_tokens == sum(len(store.row(row).ids_T) for row in step.rows)


def eligible_by_loop(mask):
    return [i for i in range(len(mask) - 1) if mask[i] and mask[i + 1]]


def test_ranks_read_the_features_of_their_own_bins(store):
    (single,), ranks = loaders(store), loaders(store, 2, BUDGETS[1])
    full = {row: store.row(row).features_TF for row in range(len(store))}
    for loader in (single, *ranks):
        for batch in loader[1].batches:
            for row in batch.features_TF[:, 0].unique().long().tolist():
                assert torch.equal(batch.features_TF[batch.features_TF[:, 0] == row], full[row])


@given(st.integers(1, 30), st.integers(0, 50), st.integers(0, 3))
@settings(max_examples=40, deadline=None)
def test_every_row_exactly_once_an_epoch(num_rows, seed, epoch):
    rows = [7 * i + 2 for i in range(num_rows)]
    assert sorted(epoch_order(rows, seed, epoch)) == [(row, 0) for row in rows]


def test_weights_repeat_rows_and_draw_the_rest_anew(store):
    """Three sources of weight 1, 2.5 and 0: rows 0..9, 10..13, 14..16, counted by hand."""
    sources = [0] * 10 + [1] * 4 + [2] * 3
    epochs = [epoch_order(list(range(17)), 5, epoch, sources, (1.0, 2.5, 0.0)) for epoch in range(40)]
    thirds = set()
    for items in epochs:
        assert len(items) == len(set(items)) == 10 + 10
        assert {item for item in items if item[0] < 10} == {(row, 0) for row in range(10)}
        assert {item for item in items if item[1] < 2 and item[0] >= 10} == {
            (r, k) for r in range(10, 14) for k in (0, 1)
        }
        third = [row for row, k in items if k == 2]
        assert len(third) == 2 and set(third) <= set(range(10, 14))
        thirds.add(tuple(sorted(third)))
    assert len(thirds) > 3  # of six pairs
    config = helpers.config(store.folder, "batch.rows_per_step=9", f"batch.anchors_per_row={PER_ROW}")
    twice = Steps(store, [4], config.model, config.batch, seed=0, weights=[2.0])[0]
    assert twice.rows == [4, 4] and max(slots(twice).values()) < 3
    assert len({key[:2] for key in slots(twice)}) > PER_ROW  # the second time, other anchors


def test_fixed_anchors_cut_answers_into_blocks(store):
    """The same in every epoch: neighbouring blocks of an answer stand S apart, from its first eligible token on."""
    config = helpers.config(store.folder, "batch.rows_per_step=9", "batch.anchors=fixed", "batch.anchors_per_row=64")
    rows, size = list(range(len(store))), config.model.block_size
    loader = Steps(store, rows, config.model, config.batch, seed=0)
    for step in (loader[0], loader[loader.per_epoch()]):
        found = Counter((row, at) for row, at, *_ in slots(step))
        expected = {
            (row, at) for row in step.rows for at in eligible_by_loop(store.row(row).loss_mask_T.tolist())[::size]
        }
        assert set(found) == expected and len(expected) > len(step.rows)


def test_order_and_anchors_change_with_epoch_and_seed(store):
    (loader,), (other,) = loaders(store), loaders(store, seed=4)
    assert (loader[0].epoch, loader[3].epoch) == (0, 1)
    epochs = [[loader[start + i] for i in range(3)] for start in (0, 3)] + [[other[i] for i in range(3)]]
    orders = [[row for step in epoch for row in step.rows] for epoch in epochs]
    assert len({tuple(order) for order in orders}) == 3 and len({frozenset(order) for order in orders}) == 1
    drawn = [{key[:2] for step in epoch for key in slots(step)} for epoch in epochs]
    assert drawn[0] != drawn[1] and drawn[0] != drawn[2]


def test_anchors_of_a_row_do_not_depend_on_its_company(store):
    """Other rows a step, hence other neighbours, another order within the step, other steps: the same anchors."""
    (loader,), (other,) = loaders(store), loaders(store, rows_per_step=8)
    drawn = sum((slots(loader[number]) for number in range(3)), Counter())
    assert drawn == slots(other[0])


def test_the_loader_is_a_function_of_the_step(store):
    (loader,), (again,) = loaders(store, budgets=BUDGETS[1]), loaders(store, budgets=BUDGETS[1])
    forward = [loader[number] for number in range(5)]
    for number in (4, 0, 3, 0):
        one, other = forward[number], again[number]
        assert (one.rows, one.weight) == (other.rows, other.weight) and len(one.batches) == len(other.batches)
        for a, b in zip(one.batches, other.batches):
            assert torch.equal(a.features_TF, b.features_TF) and torch.equal(a.blocks.anchor_A, b.blocks.anchor_A)


def test_heldout_rows_are_never_trained_on(store):
    rows, heldout = split_rows(store, 0.1)
    assert heldout == [1] and rows == [0, 2, 3, 4, 5, 6, 7, 8]
    (loader,) = loaders(store)
    assert all(1 not in loader[number].rows for number in range(9))


@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(0, 20)), min_size=1, max_size=40),
    st.integers(50, 120), st.integers(20, 60),
)  # fmt: skip
@settings(max_examples=200, deadline=None)
def test_bins_keep_to_both_budgets_and_drop_nothing(items, max_tokens, max_anchors):
    tokens, anchors = [t for t, _ in items], [a for _, a in items]
    bins = pack(tokens, anchors, max_tokens, max_anchors)
    assert sorted(item for one in bins for item in one) == list(range(len(items)))
    for one in bins:
        assert sum(tokens[i] for i in one) <= max_tokens and sum(anchors[i] for i in one) <= max_anchors
    assert bins == pack(tokens, anchors, max_tokens, max_anchors)
    for first, second in pairwise(bins):  # first fit: no bin's first item would have gone into the one before
        item = second[0]
        before = [i for i in first if (-tokens[i], i) < (-tokens[item], item)]
        full = sum(tokens[i] for i in before) + tokens[item] > max_tokens
        assert full or sum(anchors[i] for i in before) + anchors[item] > max_anchors


def test_the_teachers_state_stands_one_before_the_label():
    """What predicts the token at a position is the target's state one before it; states tell their place."""
    model = helpers.config("unused").model
    rows = []
    for number, length in enumerate((14, 9)):
        last = torch.stack([torch.full((length,), float(number)), torch.arange(length).float()], dim=1)
        ids, mask = torch.arange(length) + 10 * number, torch.ones(length, dtype=torch.bool)
        rows.append(Row(number, f"r{number}", ids, mask, last, last))
    batch = make_batch(rows, [torch.tensor([2, 11]), torch.tensor([0])], model)
    labels = batch.blocks.label_AS.flatten()[batch.weighted_N].tolist()
    found = [(int(row), int(at)) for row, at in batch.teacher_ND]
    assert len(found) == len(labels) > 10 and {row for row, _ in found} == {0, 1}
    assert [10 * row + at + 1 for row, at in found] == labels


def test_d_pace_is_divided_by_the_number_of_blocks(store):
    """Those with a label behind the anchor, counted by hand; the empty bin that fills up a rank counts for nothing."""
    config = helpers.config(store.folder, "batch.rows_per_step=9", f"batch.anchors_per_row={PER_ROW}")
    rows = list(range(len(store)))
    for world in (1, 2):
        step = Steps(store, rows, config.model, config.batch, 3, 0, world, objective=Objective.dpace)[0]
        anchors = sum(min(PER_ROW, len(eligible_by_loop(store.row(row).loss_mask_T.tolist()))) for row in rows)
        assert step.weight == anchors == step.num_anchors
