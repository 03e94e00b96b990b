"""Token ids and loss masks of conversations, written out by hand. The tiny tokenizer maps bytes to themselves, so an
expected row is spelt as text with its supervised stretches in brackets: `⟦...⟧`. Templates stand in full in the tests.
"""

import re
from collections import Counter

import pytest
from run_helpers import END, MASK, TINY, tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from data_prep.config import DataConfig
from data_prep.encode import encode_row, encode_rows

SPECIALS = {name: 256 + i for i, name in enumerate(["<|bos|>", "<|end|>", "<|user|>", "<|assistant|>", "<|mask|>"])}

# A newline stands behind every message, as in ChatML.
NEWLINE = (
    "{{- '<|bos|>' }}{%- for m in messages %}{{- '<|' + m['role'] + '|>' + m['content'] + '<|end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"
)
# Reasoning of earlier turns is dropped, as in Qwen3; without reasoning the last turn gets an empty think block, and so
# does the generation prompt when thinking is off.
HISTORY = (
    "{{- '<|bos|>' }}{%- for m in messages %}{%- set text = m['content'] %}"
    "{%- if m['role'] == 'assistant' %}"
    "{%- if '</think>' in text and not loop.last %}{%- set text = text.split('</think>')[1] %}{%- endif %}"
    "{%- if loop.last and '</think>' not in text %}{%- set text = '<think></think>' + text %}{%- endif %}{%- endif %}"
    "{{- '<|' + m['role'] + '|>' + text + '<|end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>' }}"
    "{%- if enable_thinking is defined and not enable_thinking %}{{- '<think></think>' }}{%- endif %}{%- endif %}"
)
# The prompt ends in something that the full conversation does not have.
NOT_A_PREFIX = NEWLINE.replace("'<|assistant|>'", "'<|assistant|>Answer: '")
# A second special token stands behind the end of the turn, as where a template closes the document too.
CLOSED = NEWLINE + "{%- if not add_generation_prompt %}{{- '<|user|>' }}{%- endif %}"


def config(**changes):
    return DataConfig(**{"path": "unused", "max_length": 512, **changes})


def chat(*texts, system=None, **more):
    roles = ["user", "assistant"] * len(texts)
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts)]
    return {"id": "a", "messages": ([{"role": "system", "content": system}] if system else []) + messages, **more}


def ids(text):
    pieces = re.split(r"(<\|\w+\|>)", text)
    return [token for p in pieces for token in ([SPECIALS[p]] if p in SPECIALS else p.encode())]


def expect(marked):
    """(ids, mask) of a text with its supervised stretches in brackets."""
    tokens, mask = [], []
    for number, piece in enumerate(re.split("[⟦⟧]", marked)):
        tokens += ids(piece)
        mask += [number % 2] * len(ids(piece))
    return tokens, mask


def encode(row, template, stops=(END,), **changes):
    return [(r.ids, r.loss_mask) for r in encode_row(row, tokenizer(template), set(stops), config(**changes))]


def test_end_of_turn_is_supervised_and_nothing_behind_it():
    assert encode(chat("hi", "yes"), NEWLINE) == [expect("<|bos|><|user|>hi<|end|>\n<|assistant|>⟦yes<|end|>⟧")]


def test_the_targets_own_template():
    assert encode(chat("hi", "yes", system="be"), None) == [expect("<|bos|>be<|user|>hi<|assistant|>⟦yes<|end|>⟧")]


def test_system_prompt_and_special_spellings_are_not_supervised():
    template = NEWLINE.replace("'<|' + m['role'] + '|>'", "('' if m['role'] == 'system' else '<|' + m['role'] + '|>')")
    expected = expect("<|bos|>be ⚙<|end|>\n<|user|>é<|end|>\n<|assistant|>⟦oui é<|end|>⟧")
    assert encode(chat("é", "oui é", system="be ⚙"), template) == [expected]


def test_turns_that_continue_each_other_share_a_row():
    row = chat("one", "1", "two", "22", "three", "333")
    expected = (
        "<|bos|><|user|>one<|end|>\n<|assistant|>⟦1<|end|>⟧\n<|user|>two<|end|>\n<|assistant|>⟦22<|end|>⟧\n"
        "<|user|>three<|end|>\n<|assistant|>⟦333<|end|>⟧"
    )
    assert encode(row, NEWLINE) == [expect(expected)]


def test_a_rewritten_history_gives_one_row_a_turn():
    row = chat("one", "<think>hm</think>1", "two", "<think>so</think>2")
    rows = encode_row(row, tokenizer(HISTORY), {END}, config())
    first = expect("<|bos|><|user|>one<|end|>\n<|assistant|>⟦<think>hm</think>1<|end|>⟧")
    second = expect(
        "<|bos|><|user|>one<|end|>\n<|assistant|>1<|end|>\n<|user|>two<|end|>\n<|assistant|>⟦<think>so</think>2<|end|>⟧"
    )
    assert [(r.ids, r.loss_mask) for r in rows] == [first, second]
    assert [r.id for r in rows] == ["a", "a/1"]


def test_an_empty_think_block_of_the_generation_prompt_is_not_supervised():
    expected = expect("<|bos|><|user|>hi<|end|>\n<|assistant|><think></think>⟦yes<|end|>⟧")
    assert encode(chat("hi", "yes"), HISTORY, thinking=False) == [expected]
    assert encode(chat("hi", "yes", answer_ids=[*b"yes", END]), HISTORY, thinking=False) == [expected]


def test_a_prompt_that_is_no_prefix_is_refused_by_name():
    with pytest.raises(ValueError, match=r"row a: the template's prompt .*answers=target") as error:
        encode(chat("hi", "yes"), NOT_A_PREFIX)
    assert "\n" not in str(error.value)
    expected = expect("<|bos|><|user|>hi<|end|>\n<|assistant|>Answer: ⟦yes<|end|>⟧")
    assert encode(chat("hi", "yes", answer_ids=[*b"yes", END]), NOT_A_PREFIX) == [expected]  # the target's own answer


def test_an_answer_ends_at_the_first_token_that_stops_a_server():
    user = SPECIALS["<|user|>"]
    found = encode(chat("hi", "yes"), CLOSED, stops=(END, user))
    assert found == [expect("<|bos|><|user|>hi<|end|>\n<|assistant|>⟦yes<|end|>⟧")]


def test_no_end_of_turn_is_refused_by_name():
    with pytest.raises(ValueError, match="row a: no end-of-turn token"):
        encode(chat("hi", "yes"), NEWLINE.replace("<|end|>", ""))


def test_exactly_one_bos_with_a_tokenizer_that_adds_one_itself():
    adding = AutoTokenizer.from_pretrained(TINY)
    adding.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", SPECIALS["<|bos|>"])]
    )
    adding.chat_template = NEWLINE
    assert adding("x").input_ids == [SPECIALS["<|bos|>"], ord("x")]
    (row,) = encode_row(chat("hi", "yes"), adding, {END}, config())
    assert row.ids.count(SPECIALS["<|bos|>"]) == 1
    assert (row.ids, row.loss_mask) == expect("<|bos|><|user|>hi<|end|>\n<|assistant|>⟦yes<|end|>⟧")


def test_answer_ids_are_taken_verbatim():
    wrote = [7, 300, 301, 8, END]  # tokens that no text becomes
    ((found, mask),) = encode(chat("hi", "zz", answer_ids=wrote), NEWLINE)
    prompt = ids("<|bos|><|user|>hi<|end|>\n<|assistant|>")
    assert found == prompt + wrote and mask == [0] * len(prompt) + [1] * 5


def test_a_cut_answer_has_no_end_token():
    expected = expect("<|bos|><|user|>hi<|end|>\n<|assistant|>⟦yes⟧")
    assert encode(chat("hi", "yes", finish="length"), NEWLINE) == [expected]
    assert encode(chat("hi", "yes", finish="length", answer_ids=list(b"yes")), NEWLINE) == [expected]


def test_a_question_that_equals_the_answer_is_not_supervised():
    found = encode(chat("same words", "same words", "same words", "same words"), NEWLINE)
    turn = "<|user|>same words<|end|>\n<|assistant|>⟦same words<|end|>⟧"
    assert found == [expect(f"<|bos|>{turn}\n{turn}")]


def test_cut_rows_are_counted_and_printed(capsys):
    rows = [{**chat("hi", "yes" * n), "id": f"r{n}"} for n in (1, 10, 20)]
    prompt = len(ids("<|bos|><|user|>hi<|end|>\n<|assistant|>"))
    report = Counter()
    encoded = list(encode_rows(rows, tokenizer(NEWLINE), {END}, config(max_length=prompt + 12), report))
    assert [len(row.ids) for row in encoded] == [prompt + 4, prompt + 12, prompt + 12]
    assert [sum(row.loss_mask) for row in encoded] == [4, 12, 12] and END not in encoded[1].ids[prompt:]
    assert report["rows cut at data.max_length"] == 2 and report["rows kept"] == report["rows"] == 3
    assert report["tokens"] == 3 * prompt + 28 and report["supervised tokens"] == 28
    (line,) = capsys.readouterr().out.splitlines()
    assert "data.max_length" in line and "r20" in line and f"{prompt + 61} tokens" in line and "2 rows" in line


def test_rows_cut_before_their_answer_are_dropped_and_counted():
    rows = [{**chat("hi", "yes"), "id": "short"}, {**chat("h" * 90, "yes"), "id": "long"}]
    report = Counter()
    encoded = list(encode_rows(rows, tokenizer(NEWLINE), {END}, config(max_length=40), report))
    assert [row.id for row in encoded] == ["short"]
    assert [value for name, value in report.items() if "dropped" in name] == [1]


@pytest.mark.parametrize("rows", [[chat("hi")], [chat("h" * 600, "yes")]])
def test_nothing_supervised_is_an_error(rows):
    with pytest.raises(ValueError, match=r"^data\.path: 0 of \d+ tokens are supervised"):
        list(encode_rows(rows, tokenizer(NEWLINE), {END}, config(), Counter()))


def test_the_mask_token_is_no_text():
    """What the expected values above rest on: bytes are ids, and specials are single tokens."""
    assert tokenizer()("a<|mask|>é", add_special_tokens=False).input_ids == [97, MASK, *"é".encode()]
