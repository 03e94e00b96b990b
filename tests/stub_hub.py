"""A stand-in for the Hugging Face Hub as far as an upload needs it: a repository's files are what its commits say."""

import base64
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler

from stub_server import Http, Serving

STEPS = ("create", "validate", "preupload", "batch", "put", "verify", "commit", "info")


class StubHub(Serving):
    """Serves one repository while it is entered.

    files: name -> bytes, as committed. private: None before it was created. commits: how many. asked: the step of every
    request, in the order of their arrival. fail: the step that fails with `status` (0: the connection is cut) the next
    `times` times; its answer says the token, again and again.
    """

    def __init__(self, token: str, *, fail=None, status=403, times=1):
        self.token, self.fail, self.status, self.times = token, fail, status, times
        self.files, self.objects, self.asked, self.private, self.commits = {}, {}, [], None, 0
        self.lock, stub = threading.Lock(), self

        class Handler(BaseHTTPRequestHandler):
            def do_any(self):
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                with stub.lock:
                    status, answer = stub.answer(self.path, self.headers.get("Authorization"), body)
                self.close_connection = True
                if status:
                    content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                    self.send_response(status)
                    self.send_header("Content-Type", "application/json")
                    self.send_header("Content-Length", str(len(content)))
                    self.end_headers()
                    self.wfile.write(content)

            do_GET = do_POST = do_PUT = do_any

            def log_message(self, *_):
                pass

        self.http = Http(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"

    def answer(self, path: str, authorization: str | None, body: bytes) -> tuple[int, dict | bytes]:
        step = next((step for step in STEPS if f"/{step}" in path), "info")
        self.asked.append(step)
        if step == self.fail and self.times > 0:
            self.times -= 1
            return self.status, {"error": "broken\nfor " + 30 * f"{authorization or self.token} "}
        if step != "put" and authorization != f"Bearer {self.token}":
            return 401, {"error": "Invalid username or password."}
        return getattr(self, step)(path, body)

    def create(self, path, body):
        asked = json.loads(body)
        place = {"url": f"{self.url}/{asked['organization']}/{asked['name']}"}
        if self.private is not None:
            return 409, {**place, "error": "You already created this model repo"}
        self.private = asked.get("visibility") == "private" or asked.get("private") is True  # by the client's version
        return 200, place

    def info(self, path, body):
        if self.private is None:
            return 404, {"error": "Repository not found"}
        return 200, {"id": "me/drafter", "private": self.private, "sha": f"{self.commits:040x}", "siblings": []}

    def validate(self, path, body):
        text = json.loads(body)["content"]
        return (200, {}) if text.startswith("---\n") else (400, {"errors": [{"message": "no metadata"}]})

    def preupload(self, path, body):
        return 200, {
            "files": [
                {
                    "path": (name := file["path"]),
                    "uploadMode": (mode := "lfs" if name.endswith((".safetensors", ".png")) else "regular"),
                    "shouldIgnore": False,
                    "oid": self.oid(self.files[name], mode) if name in self.files else None,
                }
                for file in json.loads(body)["files"]
            ]
        }

    @staticmethod
    def oid(content: bytes, mode: str) -> str:
        if mode == "lfs":
            return hashlib.sha256(content).hexdigest()
        return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()

    def batch(self, path, body):
        objects = [
            {
                **{key: object[key] for key in ("oid", "size")},
                **({} if object["oid"] in self.objects else self.actions(object)),
            }
            for object in json.loads(body)["objects"]
        ]
        return 200, {"transfer": "basic", "objects": objects}

    def actions(self, object):
        return {
            "actions": {"upload": {"href": f"{self.url}/put/{object['oid']}"}, "verify": {"href": f"{self.url}/verify"}}
        }

    def put(self, path, body):
        oid = path.rpartition("/")[2]
        if hashlib.sha256(body).hexdigest() != oid:
            return 400, {"error": "other bytes than announced"}
        self.objects[oid] = body
        return 200, {}

    def verify(self, path, body):
        return (200 if json.loads(body)["oid"] in self.objects else 404), {}

    def commit(self, path, body):
        files = {}
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.objects[value["oid"]]
            else:
                assert line["key"] == "header", line
        self.files |= files
        self.commits += 1
        return 200, {
            "commitUrl": f"{self.url}/me/drafter/commit/1",
            "commitOid": f"{self.commits:040x}",
            "success": True,
        }
