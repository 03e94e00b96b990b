"""The data stages in order: prompts -> answers -> token ids -> features. Each result lies in a folder of the cache that
is named by the hash of all that determines it; what is there is not done again.
"""

import functools
import json
import shutil
from dataclasses import asdict
from pathlib import Path

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from data_prep.cache import capture
from data_prep.config import Answers, CacheConfig, DataConfig
from data_prep.demo.target import NAME as DEMO_TARGET
from data_prep.demo.target import ORIGIN as DEMO_ORIGIN
from data_prep.demo.target import demo_target
from data_prep.encode import encode_rows
from data_prep.files import digest, sampled_digest, write_json
from data_prep.prompts import prompt_of, read_rows
from data_prep.regenerate import WINDOW, regenerate, render_prompt, stop_ids
from data_prep.store import Store, shard_path, write_shard
from dflash.config import ModelConfig, drafter_config
from dflash.target import load_target

IN_PROCESS_PARAMETERS = 1_000_000_000  # a larger target answers too slowly without a serving engine


class Preparation:
    """One target and one data set on their way to the store."""

    def __init__(self, model: ModelConfig, data: DataConfig, cache: CacheConfig):
        self.model, self.data, self.cache = model, data, cache
        self.target = str(demo_target(cache.dir / "targets")) if model.target == "demo" else model.target
        origin = {"revision": model.revision, "trust_remote_code": model.trust_remote_code}
        self.target_config = AutoConfig.from_pretrained(self.target, **origin)
        self.tokenizer = AutoTokenizer.from_pretrained(self.target, **origin)
        if not self.tokenizer.chat_template:
            raise ValueError(f"model.target: {model.target} has no chat template, expected a chat model")
        self.drafter = drafter_config(self.target_config, model)
        self.taps = self.drafter.dflash_config["target_layer_ids"]
        self.bytes_per_token = len(self.taps) * self.drafter.hidden_size * getattr(torch, cache.dtype).itemsize
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
            trust_remote_code=self.model.trust_remote_code,
        )  # fmt: skip

    def num_parameters(self) -> int:
        with torch.device("meta"):
            trusted = self.model.trust_remote_code
            model = AutoModelForCausalLM.from_config(self.target_config, trust_remote_code=trusted)
        return sum(p.numel() for p in model.parameters())

    def target_name(self) -> str:
        return DEMO_TARGET if self.model.target == "demo" else self.model.target

    def print_plan(self) -> None:
        """Rows, tokens, bytes and hours, before the work starts. Raises ValueError for what cannot be done here."""
        rows = self.rows
        parameters = self.num_parameters()
        prompts = [len(render_prompt(self.tokenizer, prompt_of(row), self.data)) for row in rows[:64]]
        answers = [len(row["answer_ids"]) for row in rows[:64] if "answer_ids" in row]
        answering = self.data.answers == Answers.target
        answer = sum(answers) / len(answers) if answers and not answering else self.data.max_new_tokens
        length = min(sum(prompts) / len(prompts) + answer, self.data.max_length)
        tokens = round(length * len(rows))
        speed = 1e14 if torch.cuda.is_available() else 2.5e11  # FLOP/s that a forward reaches, roughly
        hours = 2 * parameters * tokens / speed / 3600
        print(
            f"plan: {len(rows)} rows, at most about {tokens} tokens, {tokens * self.bytes_per_token / 1e9:.2f} GB of"
            f" features ({self.bytes_per_token} bytes a token), capture about {hours:.2g} h at {speed:.0e} FLOP/s"
        )
        if answering and not self.data.server and parameters > IN_PROCESS_PARAMETERS:
            raise ValueError(
                f"data.server: {self.model.target} has {parameters / 1e9:.1f}e9 parameters, too many to answer in"
                f" process; start `vllm serve {self.model.target} --port 8000` and add"
                " 'data.server=[http://HOST:8000/v1]'"
            )
        if answering:  # token by token, a forward is bound by memory: a twentieth of the speed, roughly
            servers = len(self.data.server)
            how = f"{servers} server(s), at their speed" if servers else f"in process, about {20 * hours:.2g} h"
            print(f"plan: the target answers first: {how}")

    def provenance(self, store: Store) -> dict:
        """What a checkpoint and an export say of where they come from."""
        return {
            "target_name": self.target_name(),
            "target_id": DEMO_ORIGIN if self.model.target == "demo" else self.model.target,
            "model": describe(self.model) | {"taps": self.taps},
            "data": describe(self.data),
            "features": digest(store.manifest["recipe"]),
            "rows": len(store) - len(store.manifest["heldout"]),
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        }

    # Recipes: what determines the result of a stage. Its hash names the folder.

    @functools.cached_property
    def rows(self) -> list[dict]:
        return read_rows(self.data)

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
            "stops": sorted(self.stops),
            "weights": {path.name: sampled_digest(path) for path in sorted(Path(self.target).glob("*.safetensors"))},
            "tokenizer": digest([self.tokenizer.backend_tokenizer.to_str(), self.tokenizer.chat_template]),
        }

    @functools.cached_property
    def answers_recipe(self) -> dict:
        if self.data.answers == Answers.data:
            return {"data": digest(self.rows)}
        return {
            "prompts": digest([[row["id"], prompt_of(row)] for row in self.rows]),
            "target": self.target_identity,
            "max_new_tokens": self.data.max_new_tokens,
            "thinking": self.data.thinking,
            "by": "server" if self.data.server else [self.data.dtype, self.data.batch_size, WINDOW],
        }

    @functools.cached_property
    def rows_recipe(self) -> dict:
        return {
            "answers": digest(self.answers_recipe),
            "target": self.target_identity,
            "thinking": self.data.thinking,
            "max_length": self.data.max_length,
            "heldout_share": self.data.heldout,
            "mask_token_id": self.model.mask_token_id,
        }

    @functools.cached_property
    def features_recipe(self) -> dict:
        return {
            "rows": digest(self.rows_recipe),
            "target": self.target_identity,
            "taps": self.taps,
            "taps_are": "outputs of decoder layers, 0-based",
            "dtype": self.cache.dtype,
            "shard_tokens": self.cache.shard_tokens,
            "batch_tokens": self.cache.batch_tokens,
        }

    @property
    def features_folder(self) -> Path:
        return self.cache.dir / f"features-{digest(self.features_recipe)}"

    # Stages: each returns at once where its result is there.

    def answer(self) -> list[dict]:
        """Rows with answers: the data's own, or the target's."""
        if self.data.answers == Answers.data:
            silent = next((row["id"] for row in self.rows if row["messages"][-1]["role"] != "assistant"), None)
            if silent is not None:
                raise ValueError(
                    f"{self.data.path}, row {silent}: no answer found, and data.answers=data expects them; use"
                    " data.answers=target to let the target answer"
                )
            return self.rows
        more = sum(len(row["messages"]) > len(prompt_of(row)) + 1 for row in self.rows)
        if more:
            print(
                f"regenerate: {more} of {len(self.rows)} rows have further turns, which are not asked (only the first)"
            )
        folder = self.cache.dir / f"answers-{digest(self.answers_recipe)}"
        path = regenerate(
            self.rows,
            self.data,
            lambda: (self.load_target(self.data.dtype), self.tokenizer),
            self.target_name(),
            folder,
        )
        with path.open() as lines:
            return [json.loads(line) for line in lines]

    def encode(self) -> Store:
        """Token ids and loss masks, with the held-out rows marked."""
        folder = self.cache.dir / f"rows-{digest(self.rows_recipe)}"
        if not (folder / "manifest.json").exists():
            self._encode_into(folder)
        store = Store(folder)
        print(f"encode: {store.manifest['report']}, {len(store.manifest['heldout'])} rows held out", flush=True)
        return store

    def _encode_into(self, folder: Path) -> None:
        rows = self.answer()
        encoded, report = encode_rows(rows, self.tokenizer, self.stops, self.data)
        seen = next((row.id for row in encoded if self.model.mask_token_id in row.ids), None)
        if seen is not None:
            raise ValueError(
                f"model.mask_token_id: {self.model.mask_token_id} stands in row {seen}, expected an unused token"
            )
        held = {row["id"] for row in rows if _is_heldout(row, self.data.heldout)}
        heldout = [i for i, row in enumerate(encoded) if row.source in held]
        if not 0 < len(heldout) < len(encoded):
            raise ValueError(
                f"data.heldout: {len(heldout)} of {len(encoded)} rows held out at a share of {self.data.heldout},"
                " expected some and not all; raise or lower it"
            )
        folder.mkdir(parents=True, exist_ok=True)
        write_shard(shard_path(folder, 0), [row.ids for row in encoded], [row.loss_mask for row in encoded])
        write_json(folder / "row_ids.json", [row.id for row in encoded])
        manifest = {
            "recipe": self.rows_recipe,
            "first_rows": [0, len(encoded)],
            "longest": max(len(row.ids) for row in encoded),
            "heldout": heldout,
            "report": report,
        }
        write_json(folder / "manifest.json", manifest)

    def features(self) -> Store:
        """The store that training reads."""
        if (self.features_folder / "manifest.json").exists():
            return Store(self.features_folder)
        rows = self.encode()
        manifest = {"recipe": self.features_recipe, "bytes_per_token": self.bytes_per_token}
        manifest |= {name: rows.manifest[name] for name in ("heldout", "longest", "report")}
        load = lambda: self.load_target(self.cache.dtype)  # noqa: E731
        return capture(rows, self.features_folder, manifest, self.cache, load, self.taps)


def check(model: ModelConfig, data: DataConfig, cache: CacheConfig) -> None:
    """Validate all that can be without loading weights, and say what could not be."""
    print(f"checked: the config's keys and values, taps {model.taps or 'by rule'}, mask token {model.mask_token_id}")
    try:
        preparation = Preparation(model, data, cache)
    except OSError as error:
        print(f"not checked: config, tokenizer and template of {model.target} ({str(error).splitlines()[0]})")
        bytes_per_token = len(model.taps or range(model.num_taps)) * (model.hidden_size or 0) * 2
    else:
        messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]
        encode_rows([{"id": "probe", "messages": messages}], preparation.tokenizer, preparation.stops, data)
        bytes_per_token = preparation.bytes_per_token
        print(f"checked: target config, tokenizer, template; stop tokens {sorted(preparation.stops)}")
    if Path(data.path).suffix == ".jsonl" or Path(data.path).exists():
        num_rows = len(read_rows(data))
        print(f"checked: {num_rows} rows of {data.path}")
    else:
        num_rows = data.limit or 0
        print(f"not checked: the data set {data.path} on the Hub")
    cache.dir.mkdir(parents=True, exist_ok=True)
    most = num_rows * data.max_length * bytes_per_token
    free = shutil.disk_usage(cache.dir).free
    print(f"checked: disk at {cache.dir}: at most {most / 1e9:.1f} GB of features, {free / 1e9:.1f} GB free")


def _is_heldout(row: dict, share: float) -> bool:
    """By a hash of the prompt: the same whatever the order or size of the data."""
    return int(digest(prompt_of(row)), 16) / 16**12 < share


def describe(config) -> dict:
    """A dataclass as plain JSON values."""
    return json.loads(json.dumps(asdict(config), default=lambda value: getattr(value, "value", str(value))))
