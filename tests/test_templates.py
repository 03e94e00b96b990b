"""Token ids and loss masks under chat templates that public models ship: what a server would generate is supervised.

The templates in assets/templates imitate those of their families. Expected rows are written out by hand from the
published formats, as text with its supervised stretches in brackets `⟦...⟧`; a byte is a token, and so is each special
token of the family. A refusal is expected as the pattern of its message.
"""

import json
import re
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
from run_helpers import END, tokenizer
from transformers.utils import chat_template_utils

from data_prep.config import DataConfig
from data_prep.encode import encode_row
from data_prep.prompts import read_rows

TEMPLATES = Path(__file__).parent / "assets/templates"
# Of each family: its special tokens, and how many of them, from the left, its generation config names as ends.
TOKENS = {
    "qwen3": (2, "<|im_end|> <|endoftext|> <|im_start|> <think> </think> <tool_call> </tool_call>"),
    "qwen2_5": (2, "<|im_end|> <|endoftext|> <|im_start|> <tool_call> </tool_call>"),
    "llama3_1": (3, "<|end_of_text|> <|eom_id|> <|eot_id|> <|begin_of_text|> <|start_header_id|> <|end_header_id|>"),
    "gemma": (2, "<eos> <end_of_turn> <start_of_turn> <bos>"),
    "gpt_oss": (3, "<|return|> <|endoftext|> <|call|> <|start|> <|channel|> <|message|> <|constrain|>"),
    "smollm2": (1, "<|im_end|> <|im_start|> <|endoftext|>"),
}
BOS = {"llama3_1": "<|begin_of_text|>", "gemma": "<bos>"}

SCHEMA = (
    '{"type": "function", "function": {"name": "weather", "description": "The weather.", "parameters": {"type":'
    ' "object", "properties": {"city": {"type": "string", "description": "Where."}, "days": {"type": "integer"}},'
    ' "required": ["city"]}}}'
)


def chat(*messages, **more):
    return {"id": "a", "messages": list(messages), **more}


def user(text):
    return {"role": "user", "content": text}


def answer(text, **more):
    return {"role": "assistant", "content": text, **more}


def call(text, **more):
    function = {"name": "weather", "arguments": {"city": "Köln"}}
    return answer(text, tool_calls=[{"type": "function", "function": function}], **more)


BRIEF = {"role": "system", "content": "Be brief."}
DRY = {"role": "tool", "content": "dry, 18°"}
THOUGHT = {"reasoning_content": "Hm."}, {"reasoning_content": "Well."}
TOLD = "<think>\nHm.\n</think>\n\n", "<think>\nWell.\n</think>\n\n"

ONE = chat(user("Hi"), answer("Yes."))
TWO = chat(BRIEF, user("Hi"), answer("Yes."), user("So?"), answer("No."))
EMPTY = chat(user("Hi"), answer(""))
THINK = chat(user("Hi"), answer(TOLD[0] + "Yes."), user("So?"), answer(TOLD[1] + "No."))
THINK_KEY = chat(user("Hi"), answer("Yes.", **THOUGHT[0]), user("So?"), answer("No.", **THOUGHT[1]))
HARMONY = chat(user("Hi"), answer("Yes.", thinking="Hm."), user("So?"), answer("No.", thinking="Well."))


def tools(first, second, *third, system=()):
    """A question, the call, what the tool says, the answer; with a third answer also another question."""
    more = [user("Sure?"), *third] if third else []
    return chat(*system, user("Rain?"), first, DRY, second, *more, tools=[json.loads(SCHEMA)])


QWEN_TOOLS = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with function"
    f" signatures within <tools></tools> XML tags:\n<tools>\n{SCHEMA}\n</tools>\n\nFor each function call, return a"
    " json object with function name and arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n'
)
QWEN_CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call><|im_end|>'
QWEN_DRY = "<|im_start|>user\n<tool_response>\ndry, 18°\n</tool_response><|im_end|>\n"
QWEN_RAIN = f"<|im_start|>system\n{QWEN_TOOLS}<|im_start|>user\nRain?<|im_end|>\n"
NO_THOUGHT = "<think>\n\n</think>\n\n"
QWEN2_5 = "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant."
SMOLLM2 = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
CHATML_TWO = (
    "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n⟦Yes.<|im_end|>⟧\n"
    "<|im_start|>user\nSo?<|im_end|>\n<|im_start|>assistant\n⟦No.<|im_end|>⟧"
)
CHATML_THINK = (
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n⟦<think>\nHm.\n</think>\n\nYes.<|im_end|>⟧\n"
    "<|im_start|>user\nSo?<|im_end|>\n<|im_start|>assistant\n⟦<think>\nWell.\n</think>\n\nNo.<|im_end|>⟧"
)
QWEN3_HI = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
QWEN3_THINK = [
    f"{QWEN3_HI}⟦<think>\nHm.\n</think>\n\nYes.<|im_end|>⟧",
    f"{QWEN3_HI}Yes.<|im_end|>\n<|im_start|>user\nSo?<|im_end|>\n<|im_start|>assistant\n⟦<think>\nWell.\n</think>\n\nNo.<|im_end|>⟧",
]
LLAMA_SYSTEM = "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n"
LLAMA_DATES = "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n"
LLAMA = LLAMA_SYSTEM + LLAMA_DATES
LLAMA_USER = "<|start_header_id|>user<|end_header_id|>\n\n"
LLAMA_MODEL = "<|start_header_id|>assistant<|end_header_id|>\n\n"
LLAMA_RAIN = f"""{LLAMA_SYSTEM}Environment: ipython
{LLAMA_DATES}<|eot_id|>{LLAMA_USER}Given the following functions, please respond with a JSON for a function call with \
its proper arguments that best answers the given prompt.

Respond in the format {{"name": function name, "parameters": dictionary of argument name and its value}}.Do not use \
variables.

{{
    "type": "function",
    "function": {{
        "name": "weather",
        "description": "The weather.",
        "parameters": {{
            "type": "object",
            "properties": {{
                "city": {{
                    "type": "string",
                    "description": "Where."
                }},
                "days": {{
                    "type": "integer"
                }}
            }},
            "required": [
                "city"
            ]
        }}
    }}
}}

Rain?<|eot_id|>"""
LLAMA_CALL = (
    LLAMA_MODEL + '⟦{"name": "weather", "parameters": {"city": "Köln"}}<|eot_id|>⟧'
    '<|start_header_id|>ipython<|end_header_id|>\n\n"dry, 18°"<|eot_id|>' + LLAMA_MODEL
)
GPT_SYSTEM = (
    "<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\nKnowledge cutoff: 2024-06\n"
    "Current date: 2026-01-02\n\nReasoning: medium\n\n# Valid channels: analysis, commentary, final. Channel must be"
    " included for every message."
)
GPT_HI = f"{GPT_SYSTEM}<|end|><|start|>user<|message|>Hi<|end|><|start|>assistant"
GPT_DEVELOPER = "<|end|><|start|>developer<|message|># Instructions\n\nBe brief.\n\n"
GPT_CALLS = "\nCalls to these tools must go to the commentary channel: 'functions'."
GPT_TOOLS = (
    "# Tools\n\n## functions\n\nnamespace functions {\n\n// The weather.\ntype weather = (_: {\n// Where.\n"
    "city: string,\ndays?: number,\n}) => any;\n\n} // namespace functions<|end|>"
)
GPT_RAIN = (
    f"{GPT_SYSTEM}{GPT_CALLS}<|end|><|start|>developer<|message|>{GPT_TOOLS}<|start|>user<|message|>Rain?<|end|>"
    "<|start|>assistant"
)
GPT_CALL = ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Köln"}<|call|>'
GPT_DRY = '<|start|>functions.weather to=assistant<|channel|>commentary<|message|>"dry, 18°"<|end|><|start|>assistant'
GPT_FINAL = "<|channel|>final<|message|>"
GPT_HM, GPT_WELL = (f"<|channel|>analysis<|message|>{text}<|end|><|start|>assistant" for text in ("Hm.", "Well."))

CASES = [  # family, case, row, expected rows or refusal, data.thinking
    ("qwen3", "one", ONE, [f"{QWEN3_HI}⟦{NO_THOUGHT}Yes.<|im_end|>⟧"]),
    ("qwen3", "one, no thinking", ONE, [f"{QWEN3_HI}{NO_THOUGHT}⟦Yes.<|im_end|>⟧"], False),
    ("qwen3", "two, no thinking", TWO, [
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        f"<|im_start|>assistant\n{NO_THOUGHT}⟦Yes.<|im_end|>⟧",
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        f"Yes.<|im_end|>\n<|im_start|>user\nSo?<|im_end|>\n<|im_start|>assistant\n{NO_THOUGHT}⟦No.<|im_end|>⟧",
    ], False),
    ("qwen3", "reasoning in the text", THINK, QWEN3_THINK),
    ("qwen3", "reasoning beside the text", THINK_KEY, QWEN3_THINK, True),
    ("qwen3", "reasoning, no thinking", THINK, r"^row a: .*answers=target", False),
    ("qwen3", "tools", tools(call(None), answer("It is dry.")), [
        f"{QWEN_RAIN}<|im_start|>assistant\n⟦{NO_THOUGHT}{QWEN_CALL}⟧",
        f"{QWEN_RAIN}<|im_start|>assistant\n{QWEN_CALL}\n{QWEN_DRY}<|im_start|>assistant\n"
        f"⟦{NO_THOUGHT}It is dry.<|im_end|>⟧",
    ]),
    ("qwen3", "tools, reasoning", tools(call("See:", **THOUGHT[0]), answer(TOLD[1] + "Dry."), answer("Yes.")), [
        f"{QWEN_RAIN}<|im_start|>assistant\n⟦<think>\nHm.\n</think>\n\nSee:\n{QWEN_CALL}⟧\n{QWEN_DRY}"
        "<|im_start|>assistant\n⟦<think>\nWell.\n</think>\n\nDry.<|im_end|>⟧",
        f"{QWEN_RAIN}<|im_start|>assistant\nSee:\n{QWEN_CALL}\n{QWEN_DRY}<|im_start|>assistant\nDry.<|im_end|>\n"
        f"<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n⟦{NO_THOUGHT}Yes.<|im_end|>⟧",
    ]),
    ("qwen3", "empty", EMPTY, [f"{QWEN3_HI}{NO_THOUGHT}⟦<|im_end|>⟧"], False),
    ("qwen2_5", "one", ONE, [
        f"{QWEN2_5}<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n⟦Yes.<|im_end|>⟧"
    ]),
    ("qwen2_5", "two", TWO, [CHATML_TWO]),
    ("qwen2_5", "reasoning is text", THINK, [f"{QWEN2_5}<|im_end|>\n{CHATML_THINK}"]),
    ("qwen2_5", "tools", tools(call(None), answer("It is dry.")), [
        f"{QWEN2_5}\n\n{QWEN_TOOLS}<|im_start|>user\nRain?<|im_end|>\n"
        f"<|im_start|>assistant\n⟦{QWEN_CALL}⟧\n{QWEN_DRY}<|im_start|>assistant\n⟦It is dry.<|im_end|>⟧"
    ]),
    ("qwen2_5", "a text before the call", tools(call("Let me see."), answer("Dry."), system=[BRIEF]), [
        f"<|im_start|>system\nBe brief.\n\n{QWEN_TOOLS}<|im_start|>user\nRain?<|im_end|>\n"
        f"<|im_start|>assistant\n⟦Let me see.\n{QWEN_CALL}⟧\n{QWEN_DRY}<|im_start|>assistant\n⟦Dry.<|im_end|>⟧"
    ]),
    ("qwen2_5", "empty", EMPTY, [
        f"{QWEN2_5}<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n⟦<|im_end|>⟧"
    ]),
    ("llama3_1", "one, trimmed", chat(user(" Hi\n"), answer("\nYes. ")), [
        f"{LLAMA}<|eot_id|>{LLAMA_USER}Hi<|eot_id|>{LLAMA_MODEL}⟦Yes.<|eot_id|>⟧"
    ]),
    ("llama3_1", "two", TWO, [
        f"{LLAMA}Be brief.<|eot_id|>{LLAMA_USER}Hi<|eot_id|>{LLAMA_MODEL}⟦Yes.<|eot_id|>⟧{LLAMA_USER}So?<|eot_id|>"
        f"{LLAMA_MODEL}⟦No.<|eot_id|>⟧"
    ]),
    ("llama3_1", "reasoning is text", THINK, [
        f"{LLAMA}<|eot_id|>{LLAMA_USER}Hi<|eot_id|>{LLAMA_MODEL}⟦<think>\nHm.\n</think>\n\nYes.<|eot_id|>⟧{LLAMA_USER}"
        f"So?<|eot_id|>{LLAMA_MODEL}⟦<think>\nWell.\n</think>\n\nNo.<|eot_id|>⟧"
    ]),
    ("llama3_1", "tools", tools(call(None), answer("It is dry.")), [f"{LLAMA_RAIN}{LLAMA_CALL}⟦It is dry.<|eot_id|>⟧"]),
    ("llama3_1", "two calls at once", tools(answer("", tool_calls=call("")["tool_calls"] * 2), answer("")), "^row a: "),
    ("llama3_1", "empty", EMPTY, [f"{LLAMA}<|eot_id|>{LLAMA_USER}Hi<|eot_id|>{LLAMA_MODEL}⟦<|eot_id|>⟧"]),
    ("gemma", "one", chat(user(" Hi\n"), answer("\nYes. ")), [
        "<bos><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n⟦Yes.<end_of_turn>⟧"
    ]),
    ("gemma", "two", TWO, [
        "<bos><start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n<start_of_turn>model\n⟦Yes.<end_of_turn>⟧\n"
        "<start_of_turn>user\nSo?<end_of_turn>\n<start_of_turn>model\n⟦No.<end_of_turn>⟧"
    ]),
    ("gemma", "reasoning is text", THINK, [
        "<bos><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n⟦<think>\nHm.\n</think>\n\nYes.<end_of_turn>⟧\n"
        "<start_of_turn>user\nSo?<end_of_turn>\n<start_of_turn>model\n⟦<think>\nWell.\n</think>\n\nNo.<end_of_turn>⟧"
    ]),
    ("gemma", "roles that do not alternate", chat(user("Hi"), user("Hi?"), answer("Yes.")), "^row a: .*alternate"),
    ("gemma", "tools", tools(answer("weather(Köln)"), answer("It is dry.")), "^row a: .*alternate"),
    ("gemma", "a call is dropped", chat(user("Rain?"), call("")), "^row a: .*tool_calls"),
    ("gemma", "empty", EMPTY, ["<bos><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n⟦<end_of_turn>⟧"]),
    ("gpt_oss", "one", ONE, [f"{GPT_HI}⟦<|channel|>final<|message|>Yes.<|return|>⟧"]),
    ("gpt_oss", "two", TWO, [
        f"{GPT_SYSTEM}{GPT_DEVELOPER}<|end|><|start|>user<|message|>Hi<|end|><|start|>assistant"
        f"⟦{GPT_FINAL}Yes.<|return|>⟧",
        f"{GPT_SYSTEM}{GPT_DEVELOPER}<|end|><|start|>user<|message|>Hi<|end|><|start|>assistant{GPT_FINAL}Yes.<|end|>"
        f"<|start|>user<|message|>So?<|end|><|start|>assistant⟦{GPT_FINAL}No.<|return|>⟧",
    ]),
    ("gpt_oss", "reasoning", HARMONY, [
        f"{GPT_HI}⟦{GPT_HM}{GPT_FINAL}Yes.<|return|>⟧",
        f"{GPT_HI}{GPT_FINAL}Yes.<|end|><|start|>user<|message|>So?<|end|><|start|>assistant"
        f"⟦{GPT_WELL}{GPT_FINAL}No.<|return|>⟧",
    ]),
    ("gpt_oss", "tools", tools(call(""), answer("It is dry."), system=[BRIEF]), [
        f"{GPT_SYSTEM}{GPT_CALLS}{GPT_DEVELOPER}{GPT_TOOLS}<|start|>user<|message|>Rain?<|end|><|start|>assistant"
        f"⟦{GPT_CALL}⟧{GPT_DRY}⟦{GPT_FINAL}It is dry.<|return|>⟧"
    ]),
    ("gpt_oss", "tools, reasoning", tools(call("", thinking="Hm."), answer("Dry.", thinking="Well."), answer("Yes.")), [
        f"{GPT_RAIN}⟦{GPT_HM}{GPT_CALL}⟧{GPT_DRY}⟦{GPT_WELL}{GPT_FINAL}Dry.<|return|>⟧",
        f"{GPT_RAIN}{GPT_CALL}{GPT_DRY}{GPT_FINAL}Dry.<|end|><|start|>user<|message|>Sure?<|end|><|start|>assistant"
        f"⟦{GPT_FINAL}Yes.<|return|>⟧",
    ]),
    ("gpt_oss", "empty", EMPTY, [f"{GPT_HI}⟦<|channel|>final<|message|><|return|>⟧"]),
    ("smollm2", "one", ONE, [f"{SMOLLM2}<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n⟦Yes.<|im_end|>⟧"]),
    ("smollm2", "two", TWO, [CHATML_TWO]),
    ("smollm2", "reasoning is text", THINK, [SMOLLM2 + CHATML_THINK]),
    ("smollm2", "tools are text", tools(answer("weather(Köln)"), answer("It is dry.")), [
        f"{SMOLLM2}<|im_start|>user\nRain?<|im_end|>\n<|im_start|>assistant\n⟦weather(Köln)<|im_end|>⟧\n"
        "<|im_start|>tool\ndry, 18°<|im_end|>\n<|im_start|>assistant\n⟦It is dry.<|im_end|>⟧"
    ]),
    ("smollm2", "a call is dropped", tools(call(""), answer("It is dry.")), "^row a: .*tool_calls"),
    ("smollm2", "empty", EMPTY, [f"{SMOLLM2}<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n⟦<|im_end|>⟧"]),
]  # fmt: skip


def expect(family, text):
    """(ids, mask). A special token has an id behind the tiny tokenizer's; <|end|> is one of its own."""
    special = {"<|end|>": END} | {name: 262 + i for i, name in enumerate(TOKENS[family][1].split())}
    tokens, mask = [], []
    for number, piece in enumerate(re.split("[⟦⟧]", text)):
        for part in re.split(f"({'|'.join(map(re.escape, special))})", piece):
            tokens += [special[part]] if part in special else part.encode()
        mask += [number % 2] * (len(tokens) - len(mask))
    return tokens, mask


def encode(family, row, thinking=None):
    made = tokenizer((TEMPLATES / f"{family}.jinja").read_text())
    made.add_tokens(TOKENS[family][1].split(), special_tokens=True)
    made.bos_token = BOS.get(family)
    stops = set(range(262, 262 + TOKENS[family][0]))
    rows = encode_row(row, made, stops, DataConfig(path="x", max_length=4096, thinking=thinking))
    return [(row.ids, row.loss_mask) for row in rows]


@pytest.mark.parametrize("family, row, expected, thinking", [
    pytest.param(family, row, expected, *thinking or [None], id=f"{family}: {name}")
    for family, name, row, expected, *thinking in CASES
])  # fmt: skip
def test_golden(family, row, expected, thinking, monkeypatch):
    monkeypatch.setattr(chat_template_utils, "datetime", SimpleNamespace(now=lambda: datetime(2026, 1, 2)))
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected) as error:
            encode(family, row, thinking)
        assert "\n" not in str(error.value)
    else:
        assert encode(family, row, thinking) == [expect(family, text) for text in expected]


@pytest.mark.parametrize("family", ["qwen3", "qwen2_5", "llama3_1"])
def test_a_file_with_calls_as_an_api_spells_them(family, tmp_path):
    """vLLM and SGLang parse the arguments first; an empty list of calls, or of tools, is none."""
    row = tools(call(None), answer("It is dry.", tool_calls=[]))
    row["messages"][1]["tool_calls"][0]["function"]["arguments"] = '{"city":"K\\u00f6ln"}'
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n" + json.dumps({**ONE, "id": "b", "tools": []}))
    first, second = read_rows(DataConfig(path=str(tmp_path / "rows.jsonl")))
    expected = {(case, name): rows for case, name, _, rows, *_ in CASES}
    assert encode(family, first) == [expect(family, text) for text in expected[family, "tools"]]
    assert encode(family, second) == encode(family, ONE)
