"""The store gives back what was written, the capture writes what the target computes, and a folder's name changes with
everything that determines its content. References: the lists that were written, one row at a time through Transformers
with output_hidden_states, and the bytes of a run that was not interrupted.
"""

import json
import random
import shutil
import types
from itertools import pairwise

import pytest
import run_helpers as helpers
import torch

from data_prep import cache, prepare
from data_prep.cache import capture, length_batches, shard_bounds
from data_prep.config import CacheConfig
from data_prep.prepare import Preparation
from data_prep.store import Store, shard_path, write_shard

TAPS = [0, 2, 4]
LENGTHS = (2, 31, 7, 90, 2, 55, 14, 14, 128, 3, 61, 40)


@pytest.mark.parametrize("num_rows", [1, 7, 32])
@pytest.mark.parametrize("num_shards", [1, 3])
def test_rows_come_back_as_they_were_written(tmp_path, num_rows, num_shards):
    rng, generator = random.Random(num_rows), torch.Generator().manual_seed(1)
    lengths = [2, *(rng.randint(2, 40) for _ in range(num_rows - 1))]
    ids = [[rng.randrange(2**17) for _ in range(n)] for n in lengths]  # beyond 16 bits
    masks = [[rng.randrange(2) for _ in range(n)] for n in lengths]
    features = [torch.randn(n, 6, generator=generator).bfloat16() for n in lengths]
    bounds = sorted({round(i * num_rows / num_shards) for i in range(num_shards + 1)})
    for number, (first, last) in enumerate(pairwise(bounds)):
        part = slice(first, last)
        write_shard(shard_path(tmp_path, number), ids[part], masks[part], torch.cat(features[part]))
    (tmp_path / "row_ids.json").write_text(json.dumps([f"r{i}" for i in range(num_rows)]))
    (tmp_path / "manifest.json").write_text(json.dumps({"first_rows": bounds}))
    assert not list(tmp_path.glob("*.part*"))
    store = Store(tmp_path)
    assert len(store) == num_rows
    for i in rng.sample(range(num_rows), num_rows):
        row = store.row(i)
        assert (row.index, row.id) == (i, f"r{i}") and row.ids_T.tolist() == ids[i]
        assert row.loss_mask_T.dtype == torch.bool and row.loss_mask_T.int().tolist() == masks[i]
        assert row.ids_T.dtype == torch.int64 and torch.equal(row.features_TF, features[i])
        assert store.row(i, features=False).features_TF is None


@pytest.fixture(scope="module")
def rows():
    """Twelve rows of random bytes, one of them twice as long as the small batches below allow."""
    return helpers.make_store(helpers.folder() / "rows", [[0] + [1] * (n - 1) for n in LENGTHS])


@pytest.fixture(scope="module")
def alone(rows):
    """Each row alone through Transformers: hidden_states[i + 1] is the output of layer i."""
    found = []
    for i in range(len(rows)):
        ids = rows.row(i, features=False).ids_T[None]
        states = helpers.target()(input_ids=ids, output_hidden_states=True).hidden_states
        found.append(torch.cat([states[tap + 1][0] for tap in TAPS], dim=-1).detach())
    return found


def run_capture(rows, folder, load_target=None, **changes):
    config = CacheConfig(**{"dtype": "float32", **changes})
    return capture(rows, folder, {"bytes_per_token": 4 * 3 * 128}, config, load_target or helpers.target, TAPS)


@pytest.mark.parametrize("batch_tokens, shard_tokens", [(64, 50), (64, 10**6), (4096, 1), (4096, 200)])
def test_captured_rows_equal_each_row_alone(rows, alone, tmp_path, batch_tokens, shard_tokens):
    store = run_capture(rows, tmp_path / "features", batch_tokens=batch_tokens, shard_tokens=shard_tokens)
    assert len(store) == len(rows) and store.row_ids == rows.row_ids
    assert len(list(store.folder.glob("shard-*"))) == len(store.first_rows) - 1
    for i, expected in enumerate(alone):
        row, source = store.row(i), rows.row(i, features=False)
        assert row.id == f"row-{i}" and torch.equal(row.ids_T, source.ids_T)
        assert torch.equal(row.loss_mask_T, source.loss_mask_T)
        assert row.features_TF.dtype == torch.float32 and row.features_TF.shape == expected.shape
        assert float((row.features_TF - expected).abs().max()) < 1e-4


def test_shards_and_batches_hold_every_row_once():
    rng = random.Random(0)
    for _ in range(50):
        lengths = [rng.randint(2, 99) for _ in range(rng.randint(1, 40))]
        bounds = shard_bounds(lengths, 150)
        assert bounds[0] == 0 and bounds[-1] == len(lengths) and bounds == sorted(set(bounds))
        held = [sum(lengths[a:b]) for a, b in pairwise(bounds)]
        assert all(150 <= n < 150 + 99 for n in held[:-1])
        batches = length_batches(lengths, 120)
        assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
        assert all(len(b) == 1 or max(lengths[i] for i in b) * len(b) <= 120 for b in batches)


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_resume_writes_only_what_is_missing_and_the_same_bytes(rows, tmp_path, monkeypatch):
    folder = tmp_path / "features"
    run_capture(rows, folder, shard_tokens=100)
    expected, written = files(folder), []
    assert sum(name.startswith("shard") for name in expected) >= 3
    (folder / "manifest.json").unlink()
    shard_path(folder, 1).unlink()
    (folder / "shard-00001.safetensors.part77").write_bytes(b"half")
    real = cache.write_shard
    monkeypatch.setattr(cache, "write_shard", lambda path, *rest: (written.append(path.name), real(path, *rest)))
    run_capture(rows, folder, shard_tokens=100)
    assert written == ["shard-00001.safetensors"] and files(folder) == expected
    run_capture(rows, folder, lambda: pytest.fail("loaded the target again"), shard_tokens=100)
    assert written == ["shard-00001.safetensors"]


def test_a_capture_that_dies_leaves_no_half_shard(rows, tmp_path, monkeypatch):
    folder, real, calls = tmp_path / "features", cache.features, []

    def dying(*arguments):
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(cache, "features", dying)
    with pytest.raises(KeyboardInterrupt):
        run_capture(rows, folder, shard_tokens=100, batch_tokens=64)
    with pytest.raises(ValueError, match="is not complete"):
        Store(folder)
    monkeypatch.setattr(cache, "features", real)
    run_capture(rows, folder, shard_tokens=100, batch_tokens=64)
    run_capture(rows, tmp_path / "whole", shard_tokens=100, batch_tokens=64)
    assert files(folder) == files(tmp_path / "whole")


def test_states_that_are_not_finite_are_refused(rows, tmp_path, monkeypatch):
    broken = lambda target, some, taps: [torch.full((len(row), 384), float("nan")) for row in some]  # noqa: E731
    monkeypatch.setattr(cache, "features", broken)
    with pytest.raises(ValueError, match="not finite"):
        run_capture(rows, tmp_path / "features")


def test_too_small_a_disk_is_refused_before_the_target_loads(rows, tmp_path, monkeypatch):
    needed = sum(LENGTHS) * 4 * 3 * 128
    load = lambda: pytest.fail("loaded the target")  # noqa: E731
    monkeypatch.setattr(shutil, "disk_usage", lambda _: types.SimpleNamespace(free=needed))
    with pytest.raises(OSError, match=r"^cache\.dir: .* GB needed, .* GB free") as error:
        run_capture(rows, tmp_path / "features", load)
    assert "\n" not in str(error.value)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: types.SimpleNamespace(free=int(needed * 1.2)))
    run_capture(rows, tmp_path / "features")


def test_a_folder_without_manifest_is_refused_in_one_line(tmp_path):
    with pytest.raises(ValueError, match=r"manifest\.json") as error:
        Store(tmp_path)
    assert "\n" not in str(error.value) and str(tmp_path) in str(error.value)


@pytest.fixture(scope="module")
def chats():
    """A file of answered chats, and a copy of the tiny target that a test may change."""
    path = helpers.folder()
    rows = [json.loads(line) for line in helpers.PROMPTS.read_text().splitlines()][:24]
    for row in rows:
        row["messages"].append({"role": "assistant", "content": f"return {row['id']}"})
    (path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shutil.copytree(helpers.TINY, path / "tiny")
    return path


def preparation(chats, cache_dir, *overrides):
    own = [f"model.target={chats}/tiny", f"data.path={chats}/chats.jsonl", "data.answers=data", *overrides]
    config = helpers.config(cache_dir, *own)
    return Preparation(config.model, config.data, config.cache)


def folder_name(chats, cache_dir, *overrides):
    return preparation(chats, cache_dir, *overrides).features_folder.name


def edit(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


OTHER_FOLDER = ["data.max_length=200", "model.taps=[1,2,4]", "model.revision=abc", "cache.dtype=float32"]
OTHER_FOLDER += ["data.thinking=false", "data.heldout=0.3", "data.limit=20", "model.mask_token_id=300"]


def test_all_that_determines_the_content_changes_the_folder(chats, tmp_path):
    names = [folder_name(chats, tmp_path)] + [folder_name(chats, tmp_path, change) for change in OTHER_FOLDER]
    assert len(set(names)) == len(names) and names[0] == folder_name(chats, tmp_path)


@pytest.mark.parametrize(
    "file, old, new",
    [
        ("chats.jsonl", "return py-003", "return py-33"),
        ("chats.jsonl", '"id": "py-002"', '"id": "py-2"'),
        ("tiny/tokenizer_config.json", "<|user|>' + m", "<|user|> ' + m"),
        ("tiny/generation_config.json", '"eos_token_id": 257', '"eos_token_id": [257, 10]'),
        ("tiny/config.json", '"rope_theta": 10000.0', '"rope_theta": 20000.0'),
    ],
)
def test_content_behind_the_same_path_changes_the_folder(chats, tmp_path, file, old, new):
    before = folder_name(chats, tmp_path)
    edit(chats / file, old, new)
    after = folder_name(chats, tmp_path)
    edit(chats / file, new, old)
    assert after != before and folder_name(chats, tmp_path) == before


def test_other_weights_behind_the_same_path_change_the_folder(chats, tmp_path):
    """A local target that was trained on: its old features are not its own any more."""
    before, path = folder_name(chats, tmp_path), chats / "tiny/model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-2] + bytes([data[-2] ^ 1, data[-1]]))
    after = folder_name(chats, tmp_path)
    path.write_bytes(data)
    assert after != before


def test_cosmetic_changes_keep_the_folder(chats, tmp_path):
    changes = ["batch.bin_tokens=600", "batch.rows_per_step=4", "log.every=3", "optim.lr=1e-4", "seed=5"]
    changes += ["model.num_layers=2", "model.block_size=4", "engine.zero_stage=2", "evaluate.every=7", "name=other"]
    assert folder_name(chats, tmp_path, *changes) == folder_name(chats, tmp_path)


def test_heldout_rows_are_chosen_by_prompt_whatever_the_ids_and_the_order(chats, tmp_path):
    """Ids with a slash are common (HumanEval/12); all turns of a conversation lie on one side."""
    rows = [json.loads(line) for line in (chats / "chats.jsonl").read_text().splitlines()]
    for i, row in enumerate(rows):
        row["id"] = f"chat/{i}"
    rows[3]["messages"] += [{"role": "user", "content": "more"}, {"role": "assistant", "content": "ok"}]
    path = tmp_path / "renamed.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in reversed(rows)))
    plain = preparation(chats, tmp_path).encode()
    renamed = preparation(chats, tmp_path, f"data.path={path}").encode()
    prompts = []
    for store in (plain, renamed):
        ids = [store.row(i, features=False).ids_T.tolist() for i in store.manifest["heldout"]]
        prompts.append(sorted(row[: row.index(helpers.ASSISTANT)] for row in ids))
    assert prompts[0] == prompts[1] and 0 < len(prompts[0]) < 24
    assert renamed.row_ids == [row["id"] for row in reversed(rows)]


def test_a_stage_whose_result_is_there_is_not_done_again(chats, tmp_path, monkeypatch):
    first = preparation(chats, tmp_path).features()
    for name in ("encode_rows", "capture", "regenerate"):
        monkeypatch.setattr(prepare, name, lambda *_: pytest.fail("done again"))
    again = preparation(chats, tmp_path).features()
    assert again.folder == first.folder and len(again) == 24
