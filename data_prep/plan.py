"""Before the work starts: what it will take, and whether it can be done at all."""

import itertools
import shutil

import torch
from transformers import AutoModelForCausalLM

from data_prep.codec import bytes_per_token
from data_prep.config import Answers, CacheConfig, DataConfig
from data_prep.encode import encode_row
from data_prep.prepare import Preparation
from data_prep.prompts import local_path, prompt_of, read_rows
from data_prep.regenerate import render
from dflash.config import ModelConfig

IN_PROCESS_PARAMETERS = 1_000_000_000  # a larger target answers too slowly without a serving engine


def num_parameters(preparation: Preparation) -> int:
    """Of the target, without loading it."""
    with torch.device("meta"):
        trusted = preparation.model.trust_remote_code
        model = AutoModelForCausalLM.from_config(preparation.target_config, trust_remote_code=trusted)
    return sum(p.numel() for p in model.parameters())


def print_plan(preparation: Preparation) -> None:
    """Rows, tokens, bytes and hours, before the work starts. Raises ValueError for what cannot be done here."""
    data, size, (rows, report) = preparation.data, preparation.bytes_per_token, preparation.rows
    some = list(itertools.islice((row for row in rows if "messages" in row), 64))
    prompts = [len(render(preparation.tokenizer, prompt_of(row), data, row.get("tools"))) for row in some]
    answers = [len(row["answer_ids"]) for row in some if "answer_ids" in row]
    answering = data.answers == Answers.target
    answer = sum(answers) / len(answers) if answers and not answering else data.max_new_tokens
    length = min(sum(prompts) / max(len(prompts), 1) + answer, data.max_length)
    tokens, parameters = round(length * report["conversations"]), num_parameters(preparation)
    speed = 1e14 if torch.cuda.is_available() else 2.5e11  # FLOP/s that a forward reaches, roughly
    hours = 2 * parameters * tokens / speed / 3600
    print(
        f"plan: {report['conversations']} rows, at most about {tokens} tokens,"
        f" {tokens * size / 1e9:.2f} GB of features ({size} bytes a token, {preparation.cache.codec.value}), capture"
        f" about {hours:.2g} h at {speed:.0e} FLOP/s"
    )
    if answering and not data.server and parameters > IN_PROCESS_PARAMETERS:
        raise ValueError(
            f"data.server: {preparation.model.target} has {parameters / 1e9:.1f}e9 parameters, too many to answer in"
            f" process; start `vllm serve {preparation.model.target} --port 8000` and add"
            " 'data.server=[http://HOST:8000/v1]'"
        )
    if answering:  # token by token, a forward is bound by memory: a twentieth of the speed, roughly
        servers = len(data.server)
        how = f"{servers} server(s), at their speed" if servers else f"in process, about {20 * hours:.2g} h"
        print(f"plan: the target answers first: {how}")


def check(model: ModelConfig, data: DataConfig, cache: CacheConfig) -> None:
    """Validate all that can be without loading weights, and say what could not be."""
    print(f"checked: the config's keys and values, taps {model.taps or 'by rule'}, mask token {model.mask_token_id}")
    try:
        preparation = Preparation(model, data, cache)
    except OSError as error:
        print(f"not checked: config, tokenizer and template of {model.target} ({str(error).splitlines()[0]})")
        size = bytes_per_token(cache, len(model.taps or range(model.num_taps)) * (model.hidden_size or 0))
    else:
        messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]
        encode_row({"id": "probe", "messages": messages}, preparation.tokenizer, preparation.stops, data)
        size = preparation.bytes_per_token
        print(f"checked: target config, tokenizer, template; stop tokens {sorted(preparation.stops)}")
    num_rows = 0
    for source in data.sources:
        if local_path(source).exists():
            found = sum(1 for _ in read_rows(DataConfig(sources=[source], limit=data.limit)))
            print(f"checked: {found} rows of {source.path}")
        else:
            found = source.limit or data.limit or 0
            print(f"not checked: the data set {source.path} on the Hub")
        num_rows += found
    cache.dir.mkdir(parents=True, exist_ok=True)
    most = min(num_rows, data.limit or num_rows) * data.max_length * size
    free = shutil.disk_usage(cache.dir).free
    print(f"checked: disk at {cache.dir}: at most {most / 1e9:.1f} GB of features, {free / 1e9:.1f} GB free")
