"""A running vLLM or SGLang server: which model it serves, what its engine counts, and prompts asked at a given load."""

import re
import time
import uuid
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import httpx

from data_prep.regenerate import complete, completion_body, served
from train.config import EvaluateConfig
from train.evaluate import prompt_seed

COUNTERS = {
    "vllm:spec_decode_num_drafts": "drafts",
    "vllm:spec_decode_num_draft_tokens": "draft_tokens",
    "vllm:spec_decode_num_accepted_tokens": "accepted",
    "vllm:spec_decode_num_accepted_tokens_per_pos": "position",
    "vllm:generation_tokens": "generated",
    "sglang:spec_verify_calls": "verify_calls",
    "sglang:generation_tokens": "generated",
    "sglang:spec_accept_length": "average",  # no counter: the mean of the engine's last moments
}
# vLLM takes what a request leaves out from the target's generation config; our loop knows none of these.
NEUTRAL = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "min_p": 0.0}


def read_counters(client, url: str) -> Counter:
    """What an engine counted since it started, by the words of COUNTERS, summed over its processes; drafts accepted at
    position 0, 1 ... by the number. Empty for an engine that shows no counters."""
    reply, counts = client.get(f"{url.removesuffix('/v1')}/metrics"), Counter()
    text = "" if reply.status_code == 404 else reply.raise_for_status().text
    for name, labels, value in re.findall(r"^(\w+:\w+?)(?:_total)?(?:\{(.*)\})? (\S+)", text, re.MULTILINE):
        if (word := COUNTERS.get(name)) == "position":
            word = int(re.search(r'position="(\d+)"', labels)[1])
        if word is not None:
            counts[word] += float(value)
        counts["averages"] += word == "average" and float(value) > 0  # one of each process that drafts
    return counts


class Pass(NamedTuple):
    """All turns of a set, asked once. counts: by how much the engine's counters rose."""

    requests: int  # that were answered
    tokens: int
    seconds: float
    failed: Counter  # by reason
    counts: Counter

    def speed(self) -> dict:
        rate = self.tokens / self.seconds
        return {"tokens": self.tokens, "seconds": self.seconds, "tokens_per_second": rate, "failed": dict(self.failed)}


class Server:
    """The server at evaluate.servers.`name`, asked with the settings of the evaluation while it is entered.

    Raises OSError where none answers, ValueError where none of its models is one of `targets`: of paths, the last part
    counts.
    """

    def __init__(self, name: str, config: EvaluateConfig, tokenizer, stops: set[int], targets: list[str]):
        self.name, self.config, self.tokenizer, self.stops = f"evaluate.servers.{name}", config, tokenizer, stops
        self.url = f"{config.servers[name].rstrip('/').removesuffix('/v1')}/v1"
        self.client = httpx.Client(timeout=600, limits=httpx.Limits(max_connections=max(config.concurrency)))
        try:
            told = self.client.get(f"{self.url}/models").raise_for_status().json()["data"]
            models = {m["id"]: {Path(m["id"]).name.lower(), Path(m.get("root") or m["id"]).name.lower()} for m in told}
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError) as error:
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise OSError(f"{self.name}: {self.url} does not tell its models ({reason}); is it up?") from None
        wanted = {Path(target).name.lower() for target in targets}
        self.model = next((model for model, names in models.items() if names & wanted), None)
        if self.model is None:
            raise ValueError(
                f"{self.name}: found a server of {sorted(models)}, expected the export's target {targets[0]};"
                " if it is that, start it with --served-model-name"
            )
        self.engine = next(m.get("owned_by") for m in told if m["id"] == self.model)  # vllm or sglang, in its own word

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.client.close()

    def counters(self) -> Counter:
        try:
            return read_counters(self.client, self.url)
        except httpx.HTTPError as error:
            raise OSError(f"{self.name}: its counters cannot be read: {str(error).splitlines()[0]}") from None

    def answer(self, prompt, salt: str) -> dict | str:
        """{answer_ids, tokens}, or why there is none. No request is repeated: it would be drafted twice."""
        config = self.config
        body = completion_body(self.model, prompt.ids, config, self.stops, prompt_seed(config, prompt))
        body |= NEUTRAL | {"cache_salt": salt} | ({"top_k": config.top_k or -1} if config.temperature else {})

        def read(reply: dict) -> dict:
            ids = served(reply["choices"][0], self.tokenizer, self.stops)["answer_ids"]
            return {"answer_ids": ids, "tokens": reply["usage"]["completion_tokens"]}

        found = complete(self.client, [self.url], body, read, tries=1)
        return found.replace(self.url, "the server") if isinstance(found, str) else found

    def ask(self, conversations: list[list], concurrency: int, follow=None) -> Pass:
        """Ask every turn, `concurrency` conversations at a time. follow(prompt, answer) -> the next turn, which is put
        into its conversation, or None."""
        salt = uuid.uuid4().hex  # a cache of prefixes that passes shared would spare the later ones the prefill

        def converse(turns: list) -> list:
            results = []
            for prompt in turns:
                results.append(self.answer(prompt, salt))
                if follow is not None and not isinstance(results[-1], str):
                    turns += filter(None, [follow(prompt, results[-1]["answer_ids"])])
            return results

        before, started = self.counters(), time.perf_counter()
        with ThreadPoolExecutor(concurrency) as pool:
            results = list(chain.from_iterable(pool.map(converse, conversations)))
        seconds, after = time.perf_counter() - started, self.counters()
        rose = {word: n - (0 if word in ("average", "averages") else before[word]) for word, n in after.items()}
        tokens = [result["tokens"] for result in results if not isinstance(result, str)]
        failed = Counter(result for result in results if isinstance(result, str))
        return Pass(len(tokens), sum(tokens), seconds, failed, Counter(rose))
