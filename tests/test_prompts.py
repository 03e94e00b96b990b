"""Rows come out the same whatever file they stand in, nothing is lost without being counted, and encoded rows depend on
neither processes nor order. References: the conversations that were written, counts made by hand, and the ids of the
tiny tokenizer, whose bytes are themselves.
"""

import json
import random
from collections import Counter

import datasets
import pytest
import run_helpers as helpers

from data_prep.config import DataConfig, Source
from data_prep.files import JsonLines
from data_prep.prepare import Preparation
from data_prep.prompts import read_rows
from data_prep.store import Store

WORDS = [row["messages"][0]["content"] for row in JsonLines(helpers.PROMPTS)]
SHAREGPT = {"user": "human", "assistant": "gpt", "system": "system"}


def talks(count=30, seed=0):
    """Answered conversations of one to three turns, some with a system message, all prompts different."""
    rng, found = random.Random(seed), []
    for i in range(count):
        messages = [{"role": "system", "content": "Be short."}] if i % 4 == 0 else []
        for turn in range(rng.randint(1, 3)):
            messages.append({"role": "user", "content": f"{rng.choice(WORDS)} {seed}.{i}.{turn}"})
            messages.append({"role": "assistant", "content": rng.choice(WORDS)[: rng.randint(1, 30)] + " é"})
        found.append({"id": f"talk/{i}", "messages": messages})
    return found


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def read(*sources, report=None, **changes):
    made = [Source(**source) if isinstance(source, dict) else Source(str(source)) for source in sources]
    return list(read_rows(DataConfig(sources=made, **changes), report))


def dropped(report):
    return {name.split(", ")[1]: count for name, count in report.items() if "dropped" in name}


# Sources.


def table(rows):
    return datasets.Dataset.from_list(
        [{key: row.get(key) for key in {k: 0 for row in rows for k in row}} for row in rows]
    )


def arrow_file(rows, folder):
    table(rows).save_to_disk(folder / "parts")
    (part,) = (folder / "parts").glob("*.arrow")
    part.rename(folder / "rows.arrow")
    return folder / "rows.arrow"


def saved(rows, folder):
    table(rows).save_to_disk(folder / "saved")
    return folder / "saved"


def saved_splits(rows, folder):
    splits = {"train": rows[:1], "validation": rows}
    datasets.DatasetDict({k: table(v) for k, v in splits.items()}).save_to_disk(folder / "splits")
    return {"path": str(folder / "splits"), "split": "validation"}


def parquet(rows, folder):
    table(rows).to_parquet(folder / "rows.parquet")
    return folder / "rows.parquet"


def parquet_folder(rows, folder):
    (folder / "many").mkdir()
    for part, first in enumerate(range(0, len(rows), 16)):
        table(rows[first : first + 16]).to_parquet(folder / "many" / f"part-{part}.parquet")
    return {"path": str(folder / "many"), "streaming": True}


FORMS = [arrow_file, saved, saved_splits, parquet, parquet_folder]


def test_sharegpt_says_the_same(tmp_path):
    rows = talks()
    turns = [[{"from": SHAREGPT[m["role"]], "value": m["content"]} for m in row["messages"]] for row in rows]
    other = [{"id": row["id"], "conversations": found} for row, found in zip(rows, turns)]
    expected = rows
    assert read(write(tmp_path / "a.jsonl", rows)) == expected and read(write(tmp_path / "b.jsonl", other)) == expected
    assert read(parquet(other, tmp_path)) == expected


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_file_gives_the_same_rows(tmp_path, form):
    """Also of rows that differ in their keys: columns fill up with nulls, which no template may print."""
    rows = talks()
    for i in (3, 9):
        name = f"look_{i}"
        parameters = {"type": "object", "properties": {f"place_{i}": {"type": "string"}}}
        rows[i]["tools"] = [{"type": "function", "function": {"name": name, "parameters": parameters}}]
        call = {"type": "function", "function": {"name": name, "arguments": json.dumps({f"place_{i}": "é"})}}
        rows[i]["messages"][1:1] = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "here"}]
    expected = read(write(tmp_path / "rows.jsonl", rows))
    assert expected[3]["tools"] == rows[3]["tools"] and expected[5] == rows[5]
    assert expected[9]["messages"][1]["tool_calls"][0]["function"]["arguments"] == {"place_9": "é"}
    assert read(form(rows, tmp_path)) == expected


@pytest.mark.parametrize("prompt", [str, list])
def test_a_prompt_is_the_users_message(tmp_path, prompt):
    given = [word if prompt is str else [{"role": "user", "content": word}] for word in WORDS[:20]]
    found = read(write(tmp_path / "a.jsonl", [{"prompt": one} for one in given]))
    assert [row["messages"] for row in found] == [[{"role": "user", "content": word}] for word in WORDS[:20]]
    assert [row["id"] for row in found] == [str(i) for i in range(20)]
    assert read(parquet([{"prompt": one} for one in given], tmp_path)) == found


def test_several_sources_keep_their_ids_apart_and_their_limits(tmp_path):
    one, other = write(tmp_path / "a.jsonl", talks()), parquet(talks(seed=1), tmp_path)
    report = Counter()
    found = read({"path": one, "limit": 4}, other, report=report)
    assert [row["id"] for row in found] == [f"0:talk/{i}" for i in range(4)] + [f"1:talk/{i}" for i in range(30)]
    assert [row["source_number"] for row in found] == [0] * 4 + [1] * 30
    assert found[4]["messages"] == talks(seed=1)[0]["messages"]
    assert report == {"conversations read": 34, "conversations": 34}
    few = read({"path": one, "limit": 4}, other, limit=7)
    assert few == found[:7]


# What is left out.


def test_drops_are_counted_by_reason_and_add_up(tmp_path):
    rows = talks()
    again = [{**rows[i], "id": f"again/{at}"} for at, i in enumerate((2, 2, 5))]
    silent = [{"id": f"s{i}", "messages": [{"role": r, "content": "x"}]} for i, r in enumerate(("system", "assistant"))]
    tools = [{**rows[7], "id": "with tools", "tools": [{"type": "function", "function": {"name": "f"}}]}]
    path, report = write(tmp_path / "a.jsonl", rows + again + silent + tools), Counter()
    found = read(path, report=report)
    assert [row["id"] for row in found] == [row["id"] for row in rows + tools]  # other tools: another prompt
    assert dropped(report) == {"same prompt as an earlier one": 3, "no user message before the first answer": 2}
    assert report["conversations read"] == 36 and report["conversations"] == 31
    report = Counter()
    assert len(read(path, report=report, dedup=False)) == 34 and sum(dropped(report).values()) == 2
    assert [row["id"] for row in read(path, limit=9)] == [row["id"] for row in rows[:9]]


def test_an_id_that_stands_twice_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match=r"a\.jsonl, row 31: id 'talk/4' stands twice") as error:
        read(write(tmp_path / "a.jsonl", [*talks(), {**talks(seed=2)[0], "id": "talk/4"}]))
    assert "\n" not in str(error.value)


# Encoded rows.


def preparation(path, cache_dir, *overrides):
    own = [f"data.path={path}", "data.answers=data", "data.heldout=0.2", *overrides]
    config = helpers.config(cache_dir, *own)
    return Preparation(config.model, config.data, config.cache)


def rows_of(store):
    """id -> (ids, loss mask) of all rows."""
    rows = [store.row(i, features=False) for i in range(len(store))]
    return {row.id: (row.ids_T.tolist(), row.loss_mask_T.int().tolist()) for row in rows}


def by_hand(row):
    """The tiny template: <bos>, then <user> before each question and <assistant> before each answer, which ends."""
    ids, mask = [helpers.BOS], [0]
    for message in row["messages"]:
        text = list(message["content"].encode())
        lead = {"system": [], "user": [helpers.USER], "assistant": [helpers.ASSISTANT]}[message["role"]]
        end = [helpers.END] if message["role"] == "assistant" else []
        ids += lead + text + end
        mask += [0] * len(lead) + [int(bool(end))] * len(text + end)
    return ids, mask


@pytest.mark.parametrize("num_proc", [1, 2, 3])
def test_rows_are_the_same_bytes_for_every_number_of_processes(tmp_path, num_proc):
    """More rows than a process is given at once."""
    rows = talks(300)
    path = write(tmp_path / "a.jsonl", rows)
    settings = ["cache.shard_tokens=4000", "data.max_length=9999"]
    one = preparation(path, tmp_path / "one", *settings).encode()
    store = preparation(path, tmp_path / "many", *settings, f"data.num_proc={num_proc}").encode()
    files = [{file.name: file.read_bytes() for file in made.folder.iterdir()} for made in (one, store)]
    assert files[0] == files[1] and len(files[0]) > 8 and not list((tmp_path / "many").glob("*@*"))
    assert list(rows_of(store).items()) == [(row["id"], by_hand(row)) for row in rows]


def test_ready_ids_go_through_unchanged(tmp_path):
    rng = random.Random(0)
    rows = []
    for i in range(40):
        prompt, answer = ([rng.randrange(256) for _ in range(rng.randint(2, 30))] for _ in range(2))
        mask = [0] * len(prompt) + [1] * len(answer)
        rows.append({"id": f"r{i}", "input_ids": prompt + answer + [helpers.USER], "loss_mask": [*mask, 0]})
    for path in (write(tmp_path / "a.jsonl", rows), parquet(rows, tmp_path)):
        store = preparation(path, tmp_path).encode()
        assert rows_of(store) == {row["id"]: (row["input_ids"], row["loss_mask"]) for row in rows}
    with pytest.raises(ValueError, match=r"row r0: input_ids found, .*answers=data"):
        preparation(path, tmp_path, "data.answers=target").encode()
    with pytest.raises(ValueError, match=r"token id 512 found, expected ids below 512"):
        rows[3]["input_ids"][2] = 512
        preparation(write(tmp_path / "b.jsonl", rows), tmp_path).encode()


@pytest.mark.parametrize("mask", [None, [1, 0], [0, 2, 1]])
def test_ids_without_a_fitting_mask_are_refused(tmp_path, mask):
    with pytest.raises(ValueError, match=r"row 1: input_ids without a loss_mask of 0 and 1 for each"):
        read(write(tmp_path / "a.jsonl", [{"input_ids": [5, 6, 7]} | ({} if mask is None else {"loss_mask": mask})]))


def test_the_report_accounts_for_every_row(tmp_path):
    """Conversations read = rows kept + what was dropped, by reason; the histogram is of the kept ones."""
    rows = [{**row, "messages": row["messages"][-2:]} for row in talks(60, seed=3)]  # one turn: one row each
    rows += [{**rows[i], "id": f"again/{i}"} for i in range(5)]
    for row in rows[10:20]:
        row["finish"] = "length"
    rows[30]["messages"][0]["content"] = "x" * 300  # nothing supervised is left of it
    rows[31]["messages"][1]["content"] = "y" * 400
    path = write(tmp_path / "a.jsonl", rows)
    cut = preparation(path, tmp_path, "data.max_length=256", "data.cut_answers=drop").encode()
    report = cut.manifest["report"]
    assert report["conversations read"] == 65 and report["conversations"] == 60
    drops = {"same prompt as an earlier one": 5, "answer cut at data.max_new_tokens": 10}
    assert dropped(report) == drops | {"without two supervised tokens in a row": 1}
    assert report["rows kept"] == len(cut) == 65 - sum(dropped(report).values())
    assert report["rows cut at data.max_length"] == 2
    assert not {f"talk/{i}" for i in range(10, 20)} & rows_of(cut).keys()
    lengths = [len(ids) for ids, _ in rows_of(cut).values()]
    ceilings = Counter(next(2**k for k in range(1, 20) if 2**k >= length) for length in lengths)
    assert {int(name.split()[4]): n for name, n in report.items() if name.startswith("rows of up to")} == ceilings
    assert ceilings.total() == len(cut) and report["tokens"] == sum(lengths)
    assert report["supervised tokens"] == sum(sum(mask) for _, mask in rows_of(cut).values())
    kept = rows_of(preparation(path, tmp_path, "data.max_length=256").encode())
    assert len(kept) == len(cut) + 10
    ids, mask = by_hand(rows[15])
    assert kept["talk/15"] == (ids[:-1], mask[:-1])  # the target wrote no end behind it


@pytest.mark.parametrize(
    "mask, words",
    [
        ([0, 0, 0], "0 of 0 tokens are supervised, expected a part"),
        ([0, 1, 0], "0 of 0 tokens are supervised, expected a part"),  # no token whose next one is supervised too
        ([1, 1, 1], "has no rows that can be used: .*no user message before the first answer': 30"),
    ],
)
def test_nothing_or_all_supervised_is_refused(tmp_path, mask, words):
    rows = [{"input_ids": [i, i, 7], "loss_mask": mask} for i in range(30)]
    with pytest.raises(ValueError, match=rf"^data\.path: .*{words}") as error:
        preparation(write(tmp_path / "a.jsonl", rows), tmp_path, "data.dedup=false").encode()
    assert "\n" not in str(error.value) and not [path for path in tmp_path.rglob("*") if "@" in path.name]


def heldout_prompts(path, cache_dir, *overrides):
    store = preparation(path, cache_dir, *overrides).encode()
    rows = list(rows_of(store).values())
    prompts = [tuple(ids[: mask.index(1)]) for ids, mask in rows]
    held = store.heldout(0.2).tolist()
    sides = {}
    for prompt, side in zip(prompts, held):
        assert sides.setdefault(prompt, side) == side  # one prompt, one side
    return {prompt for prompt, side in sides.items() if side}, set(prompts)


def test_the_held_out_prompts_are_the_same_whatever_the_order_size_and_ids(tmp_path):
    rows = talks(60)
    shuffled = random.Random(1).sample(rows, len(rows))
    doubled = [{**row, "id": f"{row['id']}/{n}"} for row in rows for n in range(2)]
    longer = [{"messages": row["messages"] + talks(1, seed=9)[0]["messages"][1:]} for row in rows]
    files = {"plain": rows, "shuffled": shuffled, "doubled": doubled}
    files["extended"] = [*rows, *({**row, "id": f"more/{i}"} for i, row in enumerate(talks(60, seed=5)))]
    paths = {name: write(tmp_path / f"{name}.jsonl", some) for name, some in (files | {"longer": longer}).items()}
    held, seen = heldout_prompts(paths["plain"], tmp_path)
    assert len(seen) == 60 and 3 <= len(held) <= 25
    for name in ("shuffled", "doubled", "longer"):
        assert heldout_prompts(paths[name], tmp_path, "data.dedup=false") == (held, seen)
    more, all_seen = heldout_prompts(paths["extended"], tmp_path)
    assert more & seen == held and len(all_seen) == 120 and more > held


def test_a_new_share_needs_no_new_folder(tmp_path):
    """More held out holds out the same prompts and some more."""
    path = write(tmp_path / "a.jsonl", talks(60))
    stores = [preparation(path, tmp_path, f"data.heldout={share}").encode() for share in (0.2, 0.5)]
    assert stores[0].folder == stores[1].folder
    few, many = (Store(stores[0].folder).heldout(share) for share in (0.2, 0.5))
    assert bool((few <= many).all()) and 0 < int(few.sum()) < int(many.sum()) < 60
