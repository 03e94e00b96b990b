"""The data stages in order: prompts -> answers -> token ids -> features. Each result lies in a folder of the cache that
is named by the hash of all that determines it; what is there is not done again.
"""

import contextlib
import functools
import json
import shutil
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import torch
import transformers
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from data_prep.audit import check_cache, check_rows
from data_prep.cache import capture
from data_prep.codec import bytes_per_token, rank_of
from data_prep.config import Answers, Backend, CacheConfig, CacheMode, CodecKind, DataConfig
from data_prep.demo.target import NAME as DEMO_TARGET
from data_prep.demo.target import ORIGIN as DEMO_ORIGIN
from data_prep.demo.target import demo_target
from data_prep.encode import describe_report, encode_rows
from data_prep.files import JsonLines, digest, is_abandoned, part_path, sampled_digest, write_json
from data_prep.prompts import collect, prompt_of, source_identity
from data_prep.regenerate import WINDOW, regenerate, stop_ids
from data_prep.store import MANIFEST, SCHEMA, Store, write_rows
from dflash.config import ModelConfig, drafter_config
from dflash.released import adopt, read_released
from dflash.target import features, load_target


def target_folder(model: ModelConfig, cache: CacheConfig) -> str:
    """Where the target is loaded from: a folder or a Hub id."""
    return str(demo_target(cache.dir / "targets")) if model.target == "demo" else model.target


class Preparation:
    """One target and one data set on their way to the store."""

    def __init__(self, model: ModelConfig, data: DataConfig, cache: CacheConfig):
        self.model, self.data, self.cache = model, data, cache
        self.target = target_folder(model, cache)
        origin = {"revision": model.revision, "trust_remote_code": model.trust_remote_code}
        self.target_config = AutoConfig.from_pretrained(self.target, **origin)
        self.tokenizer = AutoTokenizer.from_pretrained(self.target, **origin)
        if not self.tokenizer.chat_template:
            raise ValueError(f"model.target: {model.target} has no chat template, expected a chat model")
        self.drafter = drafter_config(self.target_config, model)
        self.released = None
        if model.init_from is not None:
            if cache.codec == CodecKind.lowrank:
                raise ValueError(
                    "cache.codec: found lowrank with model.init_from, expected bf16 or int8: the released drafter's fc"
                    " reads all features, of which a low-rank cache keeps a part"
                )
            self.released = read_released(model.init_from)
            self.released.check(model)
            self.drafter = adopt(self.drafter, self.released)
        self.taps = self.drafter.dflash_config["target_layer_ids"]
        num_features = len(self.taps) * self.drafter.hidden_size
        self.bytes_per_token = bytes_per_token(cache, num_features) + cache.last * 2 * self.drafter.hidden_size
        self.stops = self._stops()
        self._check_mask_token()

    def _stops(self) -> set[int]:
        try:
            config = GenerationConfig.from_pretrained(self.target, revision=self.model.revision)
        except OSError:  # a target without one: its own config says
            config = self.target_config
        return stop_ids(getattr(config, "eos_token_id", None), self.tokenizer)

    def _check_mask_token(self) -> None:
        mask = self.model.mask_token_id
        used = {"pad": self.tokenizer.pad_token_id, "bos": self.tokenizer.bos_token_id}
        used |= {f"stop {i}": stop for i, stop in enumerate(sorted(self.stops))}
        for name, token in used.items():
            if token == mask:
                raise ValueError(f"model.mask_token_id: {mask} is the target's {name} token, expected an unused one")

    def load_target(self, dtype: str):
        return load_target(
            self.target, dtype=getattr(torch, dtype), revision=self.model.revision,
            trust_remote_code=self.model.trust_remote_code, **self.model.load,
        )  # fmt: skip

    def target_name(self) -> str:
        return DEMO_TARGET if self.model.target == "demo" else self.model.target

    def provenance(self, store: Store) -> dict:
        """What a checkpoint and an export say of where they come from."""
        return {
            "target_name": self.target_name(),
            "licence": self.model.licence,
            "target_id": DEMO_ORIGIN if self.model.target == "demo" else self.model.target,
            "target_architectures": self.target_config.architectures or [],
            "model": describe(self.model) | {"taps": self.taps},
            "data": describe(self.data),
            "features": digest(store.manifest["recipe"]),
            "captured_taps": store.manifest["recipe"].get("taps", self.taps),  # online: those of this process
            "rows": len(store) - int(store.heldout(self.data.heldout).sum()),
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        }

    # Recipes: what determines the result of a stage. Its hash names the folder.

    @functools.cached_property
    def data_recipe(self) -> dict:
        sources = [source_identity(source, self.cache.dir) for source in self.data.sources]
        return {"sources": sources, "limit": self.data.limit, "dedup": self.data.dedup}

    @functools.cached_property
    def rows(self) -> tuple[JsonLines, dict]:
        """All rows, and the report of what was left out."""
        return collect(self.data, self.cache.dir / f"data-{digest(self.data_recipe)}")

    @functools.cached_property
    def target_identity(self) -> dict:
        """What names the target's weights, config and tokenizer."""
        config = {key: str(value) for key, value in self.target_config.to_dict().items()}
        for cosmetic in ("transformers_version", "_name_or_path"):
            config.pop(cosmetic, None)
        return {
            "target": self.model.target,
            "revision": getattr(self.target_config, "_commit_hash", None) or self.model.revision,
            "config": digest(config),
            "load": {key: str(value) for key, value in self.model.load.items()},
            "stops": sorted(self.stops),
            "weights": {path.name: sampled_digest(path) for path in sorted(Path(self.target).glob("*.safetensors"))},
            "tokenizer": digest([self.tokenizer.backend_tokenizer.to_str(), self.tokenizer.chat_template]),
        }

    @functools.cached_property
    def answers_recipe(self) -> dict:
        data = self.data
        if data.answers == Answers.data:
            return {"data": digest(self.data_recipe)}
        return {
            "data": digest(self.data_recipe),
            "target": self.target_identity,
            "thinking": data.thinking,
            "sampling": [data.max_new_tokens, data.temperature]
            + ([data.top_p, data.top_k, data.seed] if data.temperature else []),
            "by": "server" if data.server else [data.dtype, data.batch_size, WINDOW],
        }

    @functools.cached_property
    def rows_recipe(self) -> dict:
        return {
            "answers": digest(self.answers_recipe),
            "target": self.target_identity,
            "thinking": self.data.thinking,
            "max_length": self.data.max_length,
            "cut_answers": self.data.cut_answers.value,
            "shard_tokens": self.cache.shard_tokens,
            "schema": SCHEMA,
        }

    @functools.cached_property
    def features_recipe(self) -> dict:
        cache = self.cache
        recipe = {
            "rows": digest(self.rows_recipe),
            "target": self.target_identity,
            "taps": self.taps,
            "taps_are": "outputs of decoder layers, 0-based",
            "hidden_size": self.drafter.hidden_size,
            "dtype": cache.dtype,
            "codec": cache.codec.value,
            "last": cache.last,
            "bytes_per_token": self.bytes_per_token,
            "batch_tokens": cache.batch_tokens,
            "threads": cache.threads,
            "backend": cache.backend.value,
        }
        if cache.codec != CodecKind.bf16:
            recipe |= {"fit_tokens": cache.fit_tokens, "tokens_are": "of one length"}
        if cache.codec == CodecKind.lowrank:
            recipe["rank"] = rank_of(cache, len(self.taps) * self.drafter.hidden_size)
        return recipe

    @property
    def rows_folder(self) -> Path:
        return self.cache.dir / f"rows-{digest(self.rows_recipe)}"

    @property
    def features_name(self) -> str:
        return digest(self.features_recipe)

    @property
    def features_folder(self) -> Path:
        return self.cache.dir / f"features-{self.features_name}"

    # Stages: each returns at once where its result is there.

    def answer(self) -> JsonLines:
        """Rows with answers: the data's own, or the target's."""
        rows, _ = self.rows
        if self.data.answers == Answers.data:
            answered = lambda row: "input_ids" in row or row["messages"][-1]["role"] == "assistant"  # noqa: E731
            silent = next((row["id"] for row in rows if not answered(row)), None)
            if silent is not None:
                raise ValueError(
                    f"{self.data.path}, row {silent}: no answer found, and data.answers=data expects them; use"
                    " data.answers=target to let the target answer"
                )
            return rows
        ready = next((row["id"] for row in rows if "input_ids" in row), None)
        if ready is not None:
            raise ValueError(
                f"{self.data.path}, row {ready}: input_ids found, which nobody can be asked; use data.answers=data"
            )
        folder = self.cache.dir / f"answers-{digest(self.answers_recipe)}"
        if not folder.exists():
            more = sum(len(row["messages"]) > len(prompt_of(row)) + 1 for row in rows)
            if more:
                print(f"regenerate: {more} rows have further turns, which are not asked (only the first)")
        load = lambda: self.load_target(self.data.dtype)  # noqa: E731
        return regenerate(rows, self.data, self.tokenizer, self.stops, load, self.target_name(), folder)

    def encode(self) -> Store:
        """Token ids and loss masks. Raises ValueError for a mask token that stands in the data."""
        return self._encoded

    @functools.cached_property
    def _encoded(self) -> Store:
        if not (self.rows_folder / MANIFEST).exists():
            self._encode_into(self.rows_folder)
        store = Store(self.rows_folder)
        print(f"encode: {describe_report(store.manifest['report'])}", flush=True)
        self._check_rows(store)
        return store

    def _check_rows(self, store: Store) -> None:
        """What may change without making the cache anew: mask token and held-out share."""
        seen, mask = store.index["seen"], self.model.mask_token_id
        if len(seen) > self.drafter.vocab_size:
            raise ValueError(
                f"data.path: token id {len(seen) - 1} found, expected ids below {self.drafter.vocab_size}, the target's"
            )
        if mask < len(seen) and seen[mask]:
            raise ValueError(f"model.mask_token_id: {mask} stands in the data, expected an unused token")
        heldout = int(store.heldout(self.data.heldout).sum())
        print(f"data: {len(store) - heldout} rows to train on, {heldout} held out", flush=True)
        if not 0 < heldout < len(store):
            raise ValueError(
                f"data.heldout: {heldout} of {len(store)} rows held out at a share of {self.data.heldout}, expected"
                " some and not all; raise or lower it"
            )

    def _encode_into(self, folder: Path) -> None:
        report, part = Counter(self.rows[1]), part_path(folder)
        rows = self.answer()
        for old in folder.parent.glob("rows-*.part@*"):
            if old == part or is_abandoned(old):
                shutil.rmtree(old, ignore_errors=True)
        part.mkdir(parents=True)
        try:
            written = write_rows(
                part, encode_rows(rows, self.tokenizer, self.stops, self.data, report), self.cache.shard_tokens
            )
            manifest = {"schema": SCHEMA, "recipe": self.rows_recipe, "report": dict(report), **written}
            write_json(part / MANIFEST, manifest)
            try:
                part.rename(folder)
            except OSError:
                if not (folder / MANIFEST).exists():  # else another process was first, and has the same
                    raise
        finally:
            shutil.rmtree(part, ignore_errors=True)

    @contextlib.contextmanager
    def running_target(self):
        """run(rows of ids) -> [(features [T, F],)] by the configured backend; with cache.last also [T, D]."""
        cache = self.cache
        if cache.backend == Backend.transformers or cache.mode == CacheMode.online:
            target = [self.load_target(cache.dtype)]
            yield lambda ids: features(target[0], ids, self.taps, cache.last)
            target.clear()  # its memory is for the training
            torch.cuda.empty_cache()
            return
        from data_prep.capture_vllm import VllmFeatures

        longest = self.encode().manifest["longest"]
        options = {"revision": self.model.revision, "trust_remote_code": self.model.trust_remote_code, **cache.engine}
        options = {name: value for name, value in options.items() if value}
        expected = self._states_of_first_rows()  # before vLLM takes the memory
        with VllmFeatures(cache.python, self.target, self.taps, cache.dtype, longest, options) as run:
            self._compare_backend(run, expected)
            yield lambda ids: [(states_TF,) for states_TF in run(ids)]

    def _states_of_first_rows(self) -> list[tuple[str, list[int], torch.Tensor]]:
        """(row id, token ids, features) of cache.check_rows rows, by Transformers."""
        rows, out = Store(self.rows_folder), []
        target = self.load_target(self.cache.dtype) if self.cache.check_rows else None
        for i in range(min(self.cache.check_rows, len(rows))):
            ids = rows.row(i, features=False).ids_T.tolist()
            out.append((rows.row_id(i), ids, features(target, [ids], self.taps)[0][0].cpu().float()))
        del target
        torch.cuda.empty_cache()
        return out

    def _compare_backend(self, run, expected) -> None:
        """Raise ValueError where another backend's states are not those of Transformers."""
        most = 1e-4 if self.cache.dtype == "float32" else 0.03
        for name, ids, states_TF in expected:
            error = float((run([ids])[0].float() - states_TF).norm() / states_TF.norm())
            if not error <= most:
                raise ValueError(
                    f"cache.backend: row {name}: {self.cache.backend.value}'s states differ by {error:.3g} of their"
                    f" norm from those of Transformers, at most {most} expected"
                )
            print(f"capture: {self.cache.backend.value} and Transformers differ by {error:.1e} on row {name}")

    def features(self) -> Store:
        """The store that training reads; online, the encoded rows."""
        if self.cache.mode == CacheMode.online:
            return self.encode()
        if (self.features_folder / MANIFEST).exists():
            store = Store(self.features_folder)
            check_cache(store, self.features_recipe, self.features_name)
            self._check_rows(store)
            return store
        return self.capture()

    def capture(self) -> Store:
        recipe, name = self.features_recipe, self.features_name
        return capture(self.encode(), self.features_folder, recipe, name, self.cache, self.running_target)

    def audit(self, num_rows: int = 8) -> None:
        """Check every byte of the cache, and some rows against the target."""
        store = Store(self.features_folder)
        check_cache(store, self.features_recipe, self.features_name, deep=True)
        with self.running_target() as run:
            worst = check_rows(store, run, self.cache.codec, num_rows)
        print(
            f"audit: {len(store)} rows in {len(store.first_rows) - 1} shards are sound; {num_rows} rows run again"
            f" differ by {worst:.2g} of their norm at most"
        )


def describe(config) -> dict:
    """A dataclass as plain JSON values."""
    return json.loads(json.dumps(asdict(config), default=lambda value: getattr(value, "value", str(value))))
