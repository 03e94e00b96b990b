"""Make the tiny target model of the CPU tests: `tests/assets/tiny/` and `tests/assets/prompts.jsonl`.

The model is a randomly initialised Qwen3 of 1.2 million parameters over raw bytes, trained here for some minutes on
two CPU threads to complete short Python functions. Its text is the standard library of the interpreter that runs
this script (PSF licence): every top-level or class-level `def` of at most 400 bytes is one chat, in which the user
gives the first one to three lines and the assistant answers with the rest and `<|end|>`. The prompts are the first
lines of functions that were held out. Nothing is downloaded.

    python tests/assets/make_tiny.py
"""

import ast
import json
import math
import random
import sysconfig
import textwrap
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

HERE = Path(__file__).parent
SPECIALS = ["<|bos|>", "<|end|>", "<|user|>", "<|assistant|>", "<|mask|>", "<|pad|>"]  # ids 256 to 261
BOS, END, USER, ASSISTANT, MASK, PAD = range(256, 262)
TEMPLATE = (
    "{{- '<|bos|>' }}{%- for m in messages %}"
    "{%- if m['role'] == 'system' %}{{- m['content'] }}"
    "{%- elif m['role'] == 'user' %}{{- '<|user|>' + m['content'] }}"
    "{%- elif m['role'] == 'assistant' %}{{- '<|assistant|>' + m['content'] + '<|end|>' }}"
    "{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"
)
STEPS, BATCH, ROW, PEAK_LR, WARMUP, HELD_OUT = 1000, 8, 512, 3e-3, 50, 256


def make_tokenizer():
    """One token per byte, with the byte's value as its id, then the special tokens; it adds nothing by itself."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]  # the ByteLevel alphabet shows these as U+0100 and up
    symbol = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}
    core = Tokenizer(models.BPE(vocab={symbol[b]: b for b in range(256)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in SPECIALS])
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<|bos|>", eos_token="<|end|>", pad_token="<|pad|>", mask_token="<|mask|>",
        chat_template=TEMPLATE, model_max_length=2048, clean_up_tokenization_spaces=False,
    )  # fmt: skip


def save_tokenizer(folder):
    make_tokenizer().save_pretrained(folder, save_jinja_files=False)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text("utf-8"))
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"  # the name that transformers 4 knows too
    path.write_text(json.dumps(settings, indent=2) + "\n", "utf-8")


def snippets():
    """The short functions of the standard library, dedented and without duplicates, in a fixed order."""
    found, lib = {}, Path(sysconfig.get_paths()["stdlib"])
    skipped = {"test", "tests", "site-packages", "idlelib", "lib2to3"}
    for path in sorted(lib.rglob("*.py")):
        if skipped & set(path.relative_to(lib).parts):
            continue
        try:
            text = path.read_text("utf-8")
            tree = ast.parse(text)
        except (SyntaxError, UnicodeDecodeError):
            continue
        lines = text.split("\n")
        bodies = [tree.body] + [node.body for node in tree.body if isinstance(node, ast.ClassDef)]
        for node in (node for body in bodies for node in body if isinstance(node, ast.FunctionDef)):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            code = textwrap.dedent("\n".join(lines[first - 1 : node.end_lineno])).strip()
            if "\n" in code and len(code.encode()) <= 400:
                found[code] = None
    return list(found)


def split(code, rng):
    """(what the user says, what the assistant answers): the first one to three lines, and the others."""
    lines = code.split("\n")
    cut = rng.randint(1, min(3, len(lines) - 1))
    return "\n".join(lines[:cut]), "\n".join(lines[cut:])


def chat(code, rng):
    prompt, answer = split(code, rng)
    return [BOS, USER, *prompt.encode(), ASSISTANT, *answer.encode(), END]


def batches(codes, rng):
    """Batches without end. A row starts with a new chat and cuts its last one where it ends, so nothing is padded."""
    rows, row = [], []
    while True:
        for code in rng.sample(codes, len(codes)):
            row += chat(code, rng)
            if len(row) >= ROW:
                rows.append(row[:ROW])
                row = []
            if len(rows) == BATCH:
                yield torch.tensor(rows)
                rows = []


def loss_of(model, ids, reduction="mean"):
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction=reduction)


def train(model, codes, rng):
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, betas=(0.9, 0.95), weight_decay=0.1)
    started = time.time()
    for step, ids in zip(range(STEPS), batches(codes, rng)):
        progress = max(0, step - WARMUP) / (STEPS - WARMUP)
        lr = PEAK_LR * min((step + 1) / WARMUP, 0.5 * (1 + math.cos(math.pi * progress)))
        optimizer.param_groups[0]["lr"] = lr
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, ids)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0 or step == STEPS - 1:
            bits = loss.item() / math.log(2)
            print(f"step {step:4d}  {bits:.3f} bits per byte  {time.time() - started:4.0f} s", flush=True)


@torch.no_grad()
def bits_per_byte(model, codes, rng):
    """Over whole chats, each alone in its row; the special tokens count as bytes."""
    rows = [chat(code, rng) for code in codes]
    total = sum(loss_of(model, torch.tensor([row]), "sum").item() for row in rows)
    return total / math.log(2) / sum(len(row) - 1 for row in rows)


def prompts(held_out, training, rng, count=48):
    """First lines of held-out functions, 10 to 120 bytes, with which no function of the training text begins."""
    chosen = {}
    for prompt in (split(code, rng)[0] for code in held_out):
        if 10 <= len(prompt.encode()) <= 120 and not any(code.startswith(prompt) for code in training):
            chosen[prompt] = None
    assert len(chosen) >= count, len(chosen)
    return list(chosen)[:count]


def main():
    torch.set_num_threads(2)
    torch.manual_seed(0)
    rng = random.Random(0)
    codes = snippets()
    rng.shuffle(codes)
    held_out, training = codes[:HELD_OUT], codes[HELD_OUT:]
    print(f"{len(training)} functions to train on, {sum(len(c.encode()) for c in training)} bytes")

    config = Qwen3Config(
        vocab_size=512, hidden_size=128, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, intermediate_size=384, tie_word_embeddings=True, max_position_embeddings=2048,
        rope_theta=10000.0, bos_token_id=BOS, eos_token_id=END, pad_token_id=PAD,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    train(model, training, rng)

    model.to(torch.bfloat16)
    model.generation_config = GenerationConfig(bos_token_id=BOS, eos_token_id=END, pad_token_id=PAD, do_sample=False)
    model.save_pretrained(HERE / "tiny")
    save_tokenizer(HERE / "tiny")
    print(f"held-out: {bits_per_byte(model.float(), held_out, rng):.3f} bits per byte")
    with open(HERE / "prompts.jsonl", "w", encoding="utf-8") as file:
        for number, prompt in enumerate(prompts(held_out, training, rng), 1):
            row = {"id": f"py-{number:03d}", "messages": [{"role": "user", "content": prompt}]}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
