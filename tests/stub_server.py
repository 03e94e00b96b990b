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
                known = self.path == "/version"
                stub.reply(self, 200 if known else 404, json.dumps({"version": "stub 1.0"}) if known else "not here")

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                stub.serve(self, body)

            def log_message(self, *_):
                pass

        self.http = Http(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"

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
        ids, finish = answer(body["prompt"], body["max_tokens"], bytes_only=not self.gives_ids)
        choice = {"index": 0, "text": bytes(i for i in ids if i < 256).decode(), "finish_reason": finish}
        if self.gives_ids:
            choice["token_ids"] = ids
        text = json.dumps({"choices": [] if fault == "no choices" else [choice]})
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


if __name__ == "__main__":
    with StubServer(int(sys.argv[1]), seed=int(sys.argv[2])) as server:
        print(server.url, flush=True)
        parent = os.getppid()
        while os.getppid() == parent:
            time.sleep(1)
