"""A stub of an OpenAI-compatible server: its answer is a function of the prompt's token ids, and it may misbehave.

python tests/stub_server.py PORT SEED    serves while its parent lives; one request in three fails, stalls or is cut
"""

import json
import os
import random
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

END = 257  # of the tiny target
FAULTS = ("500", "429", "stall", "half a body", "no body", "half of the JSON", "no choices")


def answer(prompt: list[int], max_tokens: int, bytes_only: bool = False) -> tuple[list[int], str]:
    """(token ids, finish): letters, and unless told otherwise ids that no text becomes; at most `max_tokens`."""
    rng = random.Random(repr(prompt))
    share = 1 if bytes_only else 0.8
    ids = [rng.choice(b"etaoin shrdlu") if rng.random() < share else rng.randrange(300, 500) for _ in range(60)]
    ids = [*ids[: rng.randint(1, 60)], END]
    return (ids, "stop") if len(ids) <= max_tokens else (ids[:max_tokens], "length")


class Http(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256  # all that a client opens at once


class Serving:
    """Something with a server `http`, which serves while it is entered."""

    def __enter__(self):
        threading.Thread(target=self.http.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.http.shutdown()
        self.http.server_close()


class StubServer(Serving):
    """Serves while it is entered. asked: the bodies of all requests, in the order of their arrival.

    plan: faults (or status codes) of the first requests, in order. refuse(body): whether to answer 400. seed: fail at
    random, one request in three. gives_ids: token_ids in the answer, as vLLM does; else the text alone, without the
    stop token. stall: seconds after which a stalled request is dropped.
    """

    def __init__(self, port=0, *, plan=(), refuse=lambda body: False, seed=None, gives_ids=True, stall=0.5):
        self.plan, self.refuse, self.gives_ids, self.stall = list(plan), refuse, gives_ids, stall
        self.rng = None if seed is None else random.Random(seed)
        self.asked, self.lock, stub = [], threading.Lock(), self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                page = stub.page(self.path)
                stub.reply(self, 404 if page is None else 200, "not here" if page is None else page)

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                stub.serve(self, body)

            def log_message(self, *_):
                pass

        self.http = Http(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"

    def page(self, path: str) -> str | None:
        """What a GET gives; None: nothing is there."""
        return json.dumps({"version": "stub 1.0"}) if path == "/version" else None

    def say(self, body: dict) -> tuple[list[int], str]:
        """(token ids, finish) of an answer that reaches the client."""
        return answer(body["prompt"], body["max_tokens"], bytes_only=not self.gives_ids)

    def fault(self) -> str | None:
        with self.lock:
            if self.plan:
                return self.plan.pop(0)
            return self.rng.choice(FAULTS) if self.rng and self.rng.random() < 1 / 3 else None

    def serve(self, handler, body: dict) -> None:
        with self.lock:
            self.asked.append({"path": handler.path, **body})
        if self.refuse(body):
            return self.reply(handler, 400, '{"message": "this prompt is too long"}')
        fault = self.fault()
        if fault and fault.isdigit():
            return self.reply(handler, int(fault), "try again")
        if fault == "stall":
            threading.Event().wait(self.stall)
            return handler.connection.close()
        ids, finish = self.say(body)
        choice = {"index": 0, "text": bytes(i for i in ids if i < 256).decode(), "finish_reason": finish}
        if self.gives_ids:
            choice["token_ids"] = ids
        usage = {"completion_tokens": len(ids)}
        text = json.dumps({"choices": [] if fault == "no choices" else [choice], "usage": usage})
        if fault == "half of the JSON":
            text = text[: len(text) // 2]
        sent = {"half a body": len(text) // 2, "no body": 0}.get(fault, len(text))
        self.reply(handler, 200, text, sent)

    def reply(self, handler, status: int, text: str, sent: int | None = None) -> None:
        """sent: how many bytes come before the connection is closed; the header promises all."""
        try:
            handler.send_response(status)
            handler.send_header("Content-Length", str(len(text.encode())))
            handler.end_headers()
            handler.wfile.write(text.encode()[:sent])
        except OSError:  # the other side is gone
            pass
        handler.close_connection = sent is not None and sent < len(text)


class StubEngine(StubServer):
    """A StubServer that counts as vLLM or SGLang (with a counter, or with a gauge) does.

    script(prompt) -> (token ids, drafts accepted at each verification); drafts: how many tokens one drafts, 0 for an
    engine without a drafter; models: (id, root) of what it serves; foreign: drafts of one token, all wrong, that others
    get between two looks at the counters; pause: seconds of an answer. most: how many requests it saw at a time.
    """

    def __init__(
        self, script, drafts=3, *, kind="vllm", models=(("org/tiny", "org/tiny"),), foreign=0, pause=0.0, **more
    ):
        super().__init__(**more)
        self.script, self.drafts, self.kind, self.models, self.foreign, self.pause = (
            script, drafts, kind, models, foreign, pause,
        )  # fmt: skip
        self.accepted, self.tokens, self.looks, self.now, self.most = [], 0, 0, 0, 0

    def say(self, body: dict) -> tuple[list[int], str]:
        ids, accepted = self.script(body["prompt"])
        with self.lock:
            self.now += 1
            self.most = max(self.most, self.now)
        time.sleep(self.pause)
        with self.lock:
            self.now -= 1
            self.accepted += accepted
            self.tokens += len(ids)
        return ids, "stop" if ids[-1] == END else "length"

    def page(self, path: str) -> str | None:
        if path == "/v1/models":
            owner = self.kind.split()[0]
            return json.dumps({"data": [{"id": id, "root": root, "owned_by": owner} for id, root in self.models]})
        if path == "/get_server_info" and self.kind != "vllm":
            return json.dumps({"version": "stub 2.0"})
        if path == "/version" and self.kind == "vllm":
            return super().page(path)
        if path != "/metrics" or self.kind == "none":
            return None
        with self.lock:
            self.looks += 1
            return "\n".join(
                ["# HELP of a metric vllm:spec_decode_num_drafts_total 9", *self.lines(), "other:x_total 5"]
            )

    def lines(self) -> list[str]:
        """vLLM's are of two processes and start from 7: counters outlive readers; SGLang's appear once they rise."""
        label, num, told = 'model_name="a {b} c"', len(self.accepted), {}
        if self.kind == "vllm" and self.drafts:
            extra = self.foreign * self.looks
            told = {"num_drafts": num + extra, "num_draft_tokens": self.drafts * num + extra}
            told["num_accepted_tokens"] = sum(self.accepted)
            places = {f'position="{k}"': sum(n > k for n in self.accepted) for k in range(self.drafts)}
            family = "vllm:spec_decode_"
            other = [f"{family}num_drafts_created{{{label}}} 1.7e+09", f'{family}num_drafts_total{{engine="1"}} 5']
            counts = [f'{family}{name}_total{{engine="0",{label}}} {n + 7}' for name, n in told.items()]
            total = f"{family}num_accepted_tokens_per_pos_total"
            return other + counts + [f"{total}{{{label},{place}}} {n + 7.0}" for place, n in places.items()]
        if self.kind == "sglang" and self.drafts:
            told["spec_verify_calls_total"] = num
        if self.kind == "sglang gauge":
            told["spec_accept_length"] = 2.75
        told["generation_tokens_total"] = self.tokens
        return [f"{self.kind.split()[0]}:{name}{{{label}}} {n}" for name, n in told.items() if n]


if __name__ == "__main__":
    with StubServer(int(sys.argv[1]), seed=int(sys.argv[2])) as server:
        print(server.url, flush=True)
        parent = os.getppid()
        while os.getppid() == parent:
            time.sleep(1)
