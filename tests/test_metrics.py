"""The reported acceptance is what serving would count. References: a decode simulated token by token, `generate` on the
same prompts with the same drafter, sums done by hand, and repetition found by comparing strings.
"""

import itertools
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import run_helpers as helpers
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.regenerate import render
from data_prep.store import Store
from dflash.flops import step_flops
from dflash.generate import generate
from dflash.objective import ChunkedCrossEntropy
from train import evaluate
from train.config import EngineConfig, EvaluateConfig, OptimConfig
from train.data import Step
from train.engine import TorchEngine, start_process_group
from train.evaluate import heldout_measures, walk
from train.figures import PromptResult, loops, summarise
from train.log import train_line
from train.trainer import SkipLimit, Sums, prefix_right

CPU = torch.device("cpu")


def decode(right, first, length):
    """Serve one answer of `length` tokens that stands at `first`: tokens given by each verification.

    right[i]: how many drafts are right behind an anchor at i. The prefill gives the answer's first token.
    """
    given_out, emitted = 1, []
    while given_out < length:
        anchor = first + given_out - 1
        for _ in range(right[anchor] + 1):  # the right drafts, then the target's own token
            if given_out == length:
                break
            given_out += 1
        emitted.append(first + given_out - 1 - anchor)
    return emitted


def test_walk_by_hand():
    # Answer at 5..12 (8 tokens); its anchors are 5..11. 5 -> 2 right: 3 tokens, 8 -> 0: 1, 9 -> 7: the 3 that are left.
    assert walk({5: 2, 6: 9, 7: 9, 8: 0, 9: 7, 10: 0, 11: 0}) == [[3, 1, 3]]
    assert walk({5: 0, 6: 0, 7: 0}) == [[1, 1, 1]]
    assert walk({5: 1, 6: 0, 20: 2, 21: 0, 22: 0}) == [[2], [3]]  # two answers of one row
    assert walk({}) == []


@given(st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=30), min_size=1, max_size=4), st.integers(0, 9))
@settings(max_examples=200, deadline=None)
def test_walk_equals_a_simulated_decode(answers, start):
    accepted, expected = {}, []
    for right in answers:
        accepted |= {start + i: n for i, n in enumerate(right)}
        expected.append(decode(accepted, start, len(right) + 1))
        start += len(right) + 3
    assert walk(accepted) == expected


@pytest.fixture(scope="module")
def trained():
    """The tiny drafter after the shared short training: it gets some drafts right, and some wrong."""
    return helpers.trained_drafter()


def test_heldout_tau_equals_tau_of_serving(trained):
    """On the target's own greedy answers in fp32, walked and served verifications are the same, one by one."""
    config, store, prepared = helpers.tiny_run()
    rows = [i for i in range(len(store)) if i % 4 == 0]
    measured = heldout_measures(trained, helpers.ends(trained.config), store, rows, config)
    prompts = {row["id"]: row["messages"] for row in prepared.rows[0]}
    accepted = []
    for i in rows:
        row = store.row(i)
        answer = row.ids_T[row.loss_mask_T].tolist()
        ids = torch.tensor([render(prepared.tokenizer, prompts[row.id], config.data)])
        served = generate(helpers.target(), ids, len(answer), trained, stop_token_ids=prepared.stops)
        assert served.tokens == answer
        accepted += served.accepted
    assert measured["verify_steps"] == len(accepted) and measured["rows"] == len(rows)
    assert math.isclose(measured["tau"], sum(accepted) / len(accepted), rel_tol=1e-9)
    assert 1.15 < measured["tau"] < 4, "a drafter that gets nothing right would not tell these apart"


def test_the_evaluators_tau_is_what_the_targets_forwards_say(trained, monkeypatch):
    """Ten real prompts: behind the prefill, tokens that came out over the target's forwards, counted outside."""
    config, store, prepared = helpers.tiny_run()
    by_id = {row["id"]: row["messages"] for row in prepared.rows[0]}
    prompts = [(i, render(prepared.tokenizer, by_id[store.row(i).id], config.data)) for i in range(10)]
    forwards, tokens, made = [], [], evaluate.generate

    def counted(target, *arguments, **options):
        before = len(forwards)
        result = made(target, *arguments, **options)
        if arguments[2] is not None:
            tokens.append((len(result.tokens) - 1, len(forwards) - before - 1))
        return result

    monkeypatch.setattr(evaluate, "generate", counted)
    handle = helpers.target().register_forward_hook(lambda module, inputs, output: forwards.append(1))
    results = evaluate.measure_speed(
        helpers.target(), trained, prompts, prepared.stops, EvaluateConfig(max_new_tokens=40)
    )
    handle.remove()
    emitted, steps = map(sum, zip(*tokens))
    report = summarise(results, trained.block_size)
    assert len(tokens) == 10 and report["tau"] == emitted / steps and report["verify_steps"] == steps
    assert 1.15 < report["tau"] < 4


def test_heldout_slots_equal_a_count_over_whole_blocks(trained):
    """tau_anchor and slot acceptance: every anchor with a label at each slot, its drafts by one block at a time."""
    config, store, _ = helpers.tiny_run()
    ends, size = helpers.ends(trained.config), config.model.block_size
    rows, runs, first = [3, 17], [], {}
    for i in rows:
        row = store.row(i)
        ids, mask = row.ids_T.tolist(), row.loss_mask_T.tolist()
        for at in range(len(ids) - 1):
            if not (mask[at] and mask[at + 1]):
                continue
            embeds = ends.embed(torch.tensor([[ids[at]] + [helpers.MASK] * (size - 1)]))
            with torch.no_grad():
                hidden = trained(embeds, row.features_TF[None, :at], torch.arange(at + size)[None])
            drafts = ends.logits(hidden[0, 1:]).argmax(-1).tolist()
            labels = ids[at + 1 : at + size]
            right = next((k for k, (a, b) in enumerate(zip(drafts, labels)) if a != b), len(labels))
            first[i, at] = right
            if len(labels) == size - 1:
                runs.append(right)
    measured = heldout_measures(trained, ends, store, rows, config)
    slots = [sum(run >= k for run in runs) / len(runs) for k in range(1, size)]
    assert measured["blocks"] == len(runs) and measured["slot_acceptance"] == pytest.approx(slots, rel=1e-6)
    assert measured["tau_anchor"] == pytest.approx(1 + sum(runs) / len(runs), rel=1e-6)
    walked = [n for i in rows for walk_ in walk({at: n for (j, at), n in first.items() if j == i}) for n in walk_]
    assert measured["tau"] == pytest.approx(sum(walked) / len(walked), rel=1e-12)


def test_heldout_measures_change_nothing_and_do_not_depend_on_budgets(trained):
    config, store, _ = helpers.tiny_run()
    ends = helpers.ends(trained.config)
    engine = TorchEngine(trained, OptimConfig(), EngineConfig(dtype="float32"), CPU)
    before = {name: value.clone() for name, value in trained.state_dict().items()}
    measured = [heldout_measures(trained, ends, store, [2, 5, 9], config)]
    small = helpers.config(store.folder, "batch.bin_anchors=16", "batch.chunk_slots=9")
    measured.append(heldout_measures(engine, ends, store, [2, 5, 9], small))
    assert measured[0] == measured[1]
    assert all(torch.equal(value, before[name]) for name, value in trained.state_dict().items())
    assert all(parameter.grad is None for parameter in trained.parameters())


PATTERNS = {  # how many drafts are right behind the anchor at a position of a row
    "none": lambda row, at: 0,
    "all": lambda row, at: 7,
    "three, of whatever": lambda row, at: 3,
    "mixed": lambda row, at: (3 * row + 5 * at) % 8,
}
BATCHINGS = (512, 16, 3)  # anchors of a bin


def synthetic(folder: Path) -> dict:
    """What this rank reports of the store in `folder`, for drafts that are right by a pattern and not by a model."""
    config, store, found = helpers.config(folder), Store(folder / "store"), {}
    for pattern, right in PATTERNS.items():

        def block_loss(drafter, batch, ends, chunk, right=right):
            blocks = batch.blocks
            places = batch.features_TF[blocks.anchor_A, :2].long().tolist()
            count_A = torch.tensor([right(row, at) for row, at in places])
            return SimpleNamespace(right_AS=(torch.arange(8) <= count_A[:, None]) & (blocks.weight_AS > 0))

        evaluate.block_loss = block_loss
        for config.batch.bin_anchors in BATCHINGS:
            rows = list(range(len(store)))
            drafter = SimpleNamespace(device=CPU, dtype=torch.float32)
            found[f"{pattern}, {config.batch.bin_anchors}"] = heldout_measures(drafter, None, store, rows, config)
    return found


@pytest.mark.parametrize("world", [1, 2, 4])
def test_known_patterns_give_known_figures_for_every_batching_and_number_of_ranks(world, tmp_path):
    masks = helpers.uneven_masks()
    helpers.make_store(tmp_path / "store", masks, num_features=3 * 128)
    outputs = helpers.run_ranks(Path(__file__), world, tmp_path)
    for pattern, right in PATTERNS.items():
        steps, whole = [], []
        for row, mask in enumerate(masks):
            for supervised, run in itertools.groupby(range(len(mask)), key=mask.__getitem__):
                answer = list(run)
                if supervised:
                    steps += decode({at: right(row, at) for at in answer}, answer[0], len(answer))
                    whole += [right(row, at) for at in answer[:-7]]
        slots = [sum(n >= k for n in whole) / len(whole) for k in range(1, 8)]
        expected = {"tau": sum(steps) / len(steps), "tau_anchor": 1 + sum(slots), "slot_acceptance": slots}
        expected |= {"rows": len(masks), "verify_steps": len(steps), "blocks": len(whole)}
        for output in outputs:
            found = json.loads(output.splitlines()[-1])
            assert all(found[f"{pattern}, {anchors}"] == expected for anchors in BATCHINGS), pattern


NUMBERS = itertools.count()


def result(accepted, **changes):
    values = {"alone_tokens": 10, "alone_seconds": 2.0, "draft_tokens": 10, "draft_seconds": 1.0, "loops": False}
    return PromptResult(**{"id": str(next(NUMBERS)), "accepted": accepted, **values, **changes})


def test_acceptance_is_pooled_over_blocks_however_they_are_grouped():
    """Four blocks with 3, 2, 1 and 0 right drafts: tau 2.5, slots 3/4, 2/4, 1/4. Means of means would differ."""
    groupings = ([[4, 2], [3, 1]], [[4], [2, 3, 1]], [[4, 2, 3, 1]])
    for groups in groupings:
        report = summarise([result(group) for group in groups], block_size=4)
        assert report["tau"] == 2.5 and report["slot_acceptance"] == [0.75, 0.5, 0.25] and report["verify_steps"] == 4


def test_speeds_are_pooled_by_time():
    fast = result([2], alone_tokens=30, alone_seconds=3.0, draft_tokens=30, draft_seconds=1.0)
    slow = result([2], alone_tokens=10, alone_seconds=5.0, draft_tokens=10, draft_seconds=7.0, loops=True)
    report = summarise([fast, slow], block_size=4)
    assert report["tokens_per_second_alone"] == 5 and report["tokens_per_second"] == 5 and report["ratio"] == 1
    assert report["looping"] == 0.5 and report["prompts"] == 2


def step(weight):
    return Step(
        epoch=1,
        rows=[0],
        batches=[],
        weight=weight,
        num_anchors=4,
        num_eligible=8,
        num_tokens=100,
        num_weighted=12,
        num_pairs=9,
    )


def test_training_figures_are_pooled_over_the_window():
    right = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 1], [1, 0, 1, 1], [1, 1, 1, 0]], dtype=torch.bool)  # runs 3, 1, 0, 2
    weight = torch.ones(4, 4)
    for groups in ([[0, 1], [2, 3]], [[0], [1, 2, 3]], [[0, 1, 2, 3]]):
        window = [
            (step(float(len(g))), Sums(torch.tensor(2.0 * len(g)), prefix_right(right[g], weight[g]), torch.ones(())))
            for g in groups
        ]
        taken = 0.5 * len(window)
        _, values = train_line(10, 20, window, 0.1, [1.0], 40.0 * taken, (taken, taken / 4), SkipLimit(3))
        assert values["useful_flops_per_second_per_rank"] == 40 and values["data_wait"] == 0.25
        assert values["tau_anchor"] == 2.5 and values["slot_acceptance"] == [0.75, 0.5, 0.25]
        assert values["loss"] == 2.0 and values["anchors_used"] == 0.5
        assert values["tokens_per_second_per_rank"] == 200 and values["epoch"] == 1


def test_a_slot_that_is_always_right_raises_an_alarm():
    right, weight = torch.ones(120, 4, dtype=torch.bool), torch.ones(120, 4)
    for share, alarmed in ((0, False), (120, True)):
        right[:, 1:] = (torch.arange(120) < share)[:, None]
        sums = Sums(torch.tensor(2.0), prefix_right(right, weight), torch.ones(()))
        line, _ = train_line(1, 2, [(step(1.0), sums)], 0.1, [1.0], 1.0, (1.0, 0.0), SkipLimit(3))
        assert ("alarm: slot 1" in line) == alarmed


def test_useful_flops_are_those_of_the_matrices():
    """Counted by torch's own FLOP counter over forward and backward of one bin without padding or masked pairs."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    drafter = helpers.new_drafter()
    config, T, S = drafter.config, 40, 8
    features = torch.randn(1, T, drafter.fc.in_features)
    embeds, positions = torch.randn(1, S, config.hidden_size, requires_grad=True), torch.arange(T + S)[None]
    ends = helpers.ends(config)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:  # the fused kernel is not counted
        hidden = drafter(embeds, features, positions)
        loss, _ = ChunkedCrossEntropy.apply(hidden[0, 1:], torch.zeros(S - 1, dtype=torch.long), ends, 100)
        loss.sum().backward()
    expected = step_flops(config, drafter.fc.in_features, T, S, S - 1, pairs=S * (T + S))
    assert counter.get_total_flops() == expected


@given(st.lists(st.tuples(st.lists(st.booleans(), min_size=5, max_size=5), st.integers(1, 5)), max_size=12))
@settings(max_examples=100, deadline=None)
def test_prefix_right_counts_whole_blocks(blocks):
    """A block with a label at every slot counts; a block whose labels end early tells nothing about later slots."""
    right_AS = torch.tensor([right for right, _ in blocks], dtype=torch.bool).reshape(len(blocks), 5)
    weight_AS = torch.tensor([[0.0] + [0.5] * (n - 1) + [0.0] * (5 - n) for _, n in blocks]).reshape(len(blocks), 5)
    whole = [right for right, n in blocks if n == 5]
    expected = [len(whole)] + [sum(all(right[1 : k + 1]) for right in whole) for k in range(1, 5)]
    assert prefix_right(right_AS, weight_AS).tolist() == expected


def loops_by_comparing(tokens):
    """A tail of at least 17 tokens that is one phrase of at most 32, said three times or more (the last may be cut)."""
    for period in range(1, 33):
        length = max(3 * period, 17)
        if length <= len(tokens):
            tail = tokens[len(tokens) - length :]
            if tail == (tail[:period] * length)[:length]:
                return True
    return False


TOKEN = st.integers(0, 3)


@given(st.lists(TOKEN, max_size=20), st.lists(TOKEN, min_size=1, max_size=34), st.integers(0, 20))
@settings(max_examples=300, deadline=None)
def test_loops_equals_comparing_strings(start, phrase, times):
    tokens = start + phrase * times
    assert loops(tokens) == loops_by_comparing(tokens)


def test_loops_by_hand():
    assert loops([1, 2, 3] + [7] * 17) and not loops([1, 2, 3] + [7] * 16) and not loops([7] * 40 + [1])
    assert loops(list(range(32)) * 3) and not loops(list(range(33)) * 3) and not loops(list(range(32)) * 2)
    assert not loops([]) and not loops(list(range(200)))


def test_intervals_are_quantiles_of_draws_of_the_prompts():
    """Of two prompts, a quarter of all draws with replacement has the one twice, a quarter the other: the 2.5 % and
    97.5 % quantiles are those of each alone, sums divided once. A dozen equal prompts leave no doubt."""
    few = PromptResult("few", 10, 1.0, 10, 1.0, [1] * 9, False)  # tau 1, ratio 1
    many = PromptResult("many", 30, 3.0, 30, 1.0, [4, 4, 4, 4, 4, 4, 4, 1], False)  # tau 29 / 8, ratio 3
    found = summarise([few, many], 4)
    assert found["tau"] == pytest.approx(38 / 17) and found["tau_interval"] == pytest.approx([1.0, 29 / 8])
    assert found["ratio"] == pytest.approx(2.0) and found["ratio_interval"] == pytest.approx([1.0, 3.0])
    same = summarise([replace(many, id=str(i)) for i in range(12)], 4)
    assert same["tau_interval"] == pytest.approx([29 / 8] * 2) and same["ratio_interval"] == pytest.approx([3.0] * 2)
    more = [replace(one, id=f"{one.id} {i}") for one in (few, many) for i in range(20)]
    assert summarise(more, 4)["tau_interval"][0] > 1.2  # more prompts, a narrower interval


def test_turns_of_a_conversation_are_drawn_together():
    """The two conversations above, each in three turns: they are no surer than in one."""
    few = [PromptResult("few", 10, 1.0, 10, 1.0, [1] * 3, False, turn=turn) for turn in (1, 2, 3)]
    many = [PromptResult("many", 10, 1.0, 10, 1 / 3, [4, 4, 4], False, turn=turn) for turn in (1, 2, 3)]
    found = summarise([*few, *many], 4)
    assert (found["prompts"], found["turns"]) == (2, 6) and found["tau"] == 2.5
    assert found["tau_interval"] == pytest.approx([1, 4]) and found["ratio_interval"] == pytest.approx([1, 3])


def test_tau_by_context_by_hand():
    """A step's context: the prompt, the prefill's token and what was emitted before; 128 tokens are still up to 128."""
    one = result([1, 3, 2, 4], prompt_tokens=127)  # contexts of 128, 129, 132 and 134 tokens
    other = result([2, 1], prompt_tokens=255)  # 256, 258
    assert summarise([one, other], 5)["tau_by_context"] == [
        {"up_to": 128, "tau": 1.0, "verify_steps": 1},
        {"up_to": 256, "tau": 11 / 4, "verify_steps": 4},
        {"up_to": 512, "tau": 1.0, "verify_steps": 1},
    ]
    (alone,) = summarise([result([3], prompt_tokens=5)], 5)["tau_by_context"]
    assert alone == {"up_to": 128, "tau": 3.0, "verify_steps": 1}


def test_tau_by_category_by_hand():
    code, prose = result([4, 2, 3], category="code"), result([1], category="prose")
    more, none = result([1], category="code"), result([3])
    found = summarise([code, prose, more, none], 4)["tau_by_category"]
    assert found == {"code": {"tau": 2.5, "verify_steps": 4}, "prose": {"tau": 1.0, "verify_steps": 1}}


def test_times_are_pooled_by_time():
    """1 s of 4 drafting and 3 of 6: 4 of 10 s. 20 tokens in 10 s are 500 ms each, 20 in 4 s 200 ms."""
    one = result([2], draft_seconds=4.0, time_shares={"prefill": 0.25, "draft": 0.25, "verify": 0.5})
    other = result([2], draft_seconds=6.0, time_shares={"prefill": 0.0, "draft": 0.5, "verify": 0.5})
    found = summarise([one, other], 4)
    assert found["time_shares"] == pytest.approx({"prefill": 0.1, "draft": 0.4, "verify": 0.5})
    assert found["ms_per_token"] == pytest.approx(500) and found["ms_per_token_alone"] == pytest.approx(200)


def test_what_is_no_measure_is_counted():
    plain, random = result([2, 1]), result([1, 1], random=True)
    empty, looped = result([]), result([1], loops=True)
    flags = {"random_looking": 1, "looping": 1, "without_verification": 1, "no_draft_accepted": False}
    assert summarise([plain, random, empty, looped], 4)["flags"] == flags
    assert summarise([random, empty], 4)["flags"]["no_draft_accepted"]
    nothing = summarise([empty], 4)
    assert nothing["tau"] is None and not nothing["flags"]["no_draft_accepted"]


if __name__ == "__main__":  # one rank of the patterns' test
    torch.set_num_threads(1)
    start_process_group(CPU, deepspeed=False)
    print(json.dumps(synthetic(Path(sys.argv[1]))), flush=True)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
