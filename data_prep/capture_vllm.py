"""The target's features, computed by vLLM in a Python of its own: vLLM pins versions that our environment does not.

Two sides in one file. `VllmFeatures` is ours: it runs this file in that Python and asks it for rows. `serve` is what
runs there, so the file imports torch, safetensors and the standard library alone, and vLLM inside of functions. They
exchange lines of JSON over stdin and stdout; states pass through files in a temporary folder.

vLLM has extraction as a kind of speculative decoding
(https://docs.vllm.ai/en/latest/features/speculative_decoding/extract_hidden_states/): its drafter stores the states of
the prompt instead of drafting. Its layer ids count what enters a layer, so that tap i, which leaves one, is i + 1.
"""

import contextlib
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import load_file, save_file

WHOLE_ROWS = {  # with a prefix from the cache vLLM may give states of the rest alone (vllm-project/vllm#44485)
    "enable_prefix_caching": False,
    "enable_chunked_prefill": False,  # as its documentation of extraction demands
}
OURS = ("model", "dtype", "max_model_len", "speculative_config", "kv_transfer_config", *WHOLE_ROWS)
ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",  # its processes meet on the loopback
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a forked worker would hold our stdout open when its parent dies
}


class VllmFeatures:
    """vLLM with one target: called with rows of token ids, it gives their features. Close it, or use it in a `with`.

    python: path of the Python that has vLLM. options: further arguments of vllm.LLM, such as tensor_parallel_size.
    max_length: tokens of the longest row. Raises OSError (one line) when vLLM does not start.
    """

    def __init__(self, python: str, target: str, taps: list[int], dtype: str, max_length: int, options: dict):
        taken = sorted(set(options) & set(OURS))
        if taken:
            raise ValueError(f"cache.engine: found {', '.join(taken)}, expected none of what capture sets; remove it")
        self.python, self.width, self.dtype, self.max_length = python, len(taps), getattr(torch, dtype), max_length
        self.folder = tempfile.TemporaryDirectory(prefix="dflash-vllm-")
        self.log = Path(self.folder.name) / "stderr"
        try:
            with self.log.open("w") as log:
                self.process = subprocess.Popen(
                    [python, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
                    env=os.environ | ENVIRONMENT, start_new_session=True,
                )  # fmt: skip
        except OSError as error:
            raise OSError(
                f"cache.python: {python} cannot be run ({error.strerror}); name the Python that has vLLM"
            ) from None
        settings = {"model": target, "dtype": dtype, "max_model_len": max_length + 1, **options}
        try:
            self._ask({"taps": taps, "folder": self.folder.name, "settings": settings})
        except BaseException:
            self.close()
            raise

    def __call__(self, rows: list[list[int]]) -> list[torch.Tensor]:
        """The features [T, F] of each row on the CPU: outputs of the decoder layers `taps`, concatenated in order.

        Raises ValueError where vLLM answers with other tokens, fewer states or another dtype than asked for.
        """
        assert all(0 < len(row) <= self.max_length for row in rows)
        paths = self._ask({"rows": rows})["paths"]
        return [self._read(Path(path), row) for path, row in zip(paths, rows, strict=True)]

    def _read(self, path: Path, row: list[int]) -> torch.Tensor:
        found = load_file(path)
        path.unlink()
        states_TND, ids = found["hidden_states"], found["token_ids"].tolist()
        if ids != row:
            raise ValueError(f"capture: vLLM gave the states of {len(ids)} other tokens, expected the {len(row)} sent")
        if states_TND.shape[:2] != (len(row), self.width) or states_TND.dtype != self.dtype:
            raise ValueError(
                f"capture: vLLM gave {states_TND.dtype} states {tuple(states_TND.shape)} for {len(row)} tokens,"
                f" expected {self.dtype} and {self.width} taps of each token; vLLM 0.32 is known to give them"
            )
        return states_TND.flatten(1)

    def _ask(self, request: dict) -> dict:
        """One line there, one line back. Raises OSError when the process ends instead."""
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if answer:
            return json.loads(answer)
        code = self.process.wait()
        raise OSError(
            f"cache.python: {self.python} ended with code {code} ({last_error(self.log.read_text(errors='replace'))});"
            " name a Python that has vLLM, or mend what it says"
        )

    def close(self) -> None:
        """End the process, which has nothing to lose, with all that it started, and remove its files."""
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(20)
        with contextlib.suppress(ProcessLookupError):
            for _ in range(20):  # the last of its group gives shared memory back
                os.killpg(self.process.pid, 0)
                time.sleep(0.1)
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.process.stdout.close()
        self.folder.cleanup()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()


def last_error(log: str) -> str:
    """The last error that a log names and that does not point at another one, in one line, or else its last line."""
    errors = re.findall(r"[\w.]*\w(?:Error|Exception): (?!.*root cause).*(?:\n[ \t]+\S.*)?", log)
    return " ".join((errors or log.splitlines() or ["it wrote nothing"])[-1].split())[:300]


def __getattr__(name: str):
    """vLLM imports this module by name and takes its connector from it; without vLLM there is nothing to derive from.

    The stock connector copies through pinned memory, which needs an accelerator, so that on a CPU it writes nothing.
    """
    if name != "CpuConnector":
        raise AttributeError(name)
    from vllm.distributed.kv_transfer.kv_connector.v1 import example_hidden_states_connector as stock

    class CpuConnector(stock.ExampleHiddenStatesConnector):
        def _submit_async_write(self, pending) -> None:
            if self._is_tp_rank_zero:
                blocks = self._kv_cache[torch.tensor(pending.block_ids)]  # [blocks, taps, tokens of a block, D]
                states_TND = blocks.transpose(1, 2).flatten(0, 1)[: len(pending.token_ids)].contiguous()
                save_file({"hidden_states": states_TND, "token_ids": pending.token_ids.clone()}, pending.filename)
                os.close(self._lock_fds.pop(pending.req_id))  # lets the reader in
                self._req_copy_events[pending.req_id] = SimpleNamespace(query=lambda: True)

    return CpuConnector


def serve(requests, answers) -> None:
    """In vLLM's Python: load what the first request says, then answer each request for rows with its files."""
    from vllm import LLM, SamplingParams
    from vllm.platforms import current_platform

    first = json.loads(next(requests))
    connector = {
        "kv_connector": "ExampleHiddenStatesConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": first["folder"]},
    }
    settings = {"enforce_eager": True, **first["settings"]}  # nothing is decoded: graphs would only cost their start
    if current_platform.is_cpu():
        connector |= {"kv_connector": "CpuConnector", "kv_connector_module_path": "data_prep.capture_vllm"}
        settings = {"kv_cache_memory_bytes": 2**30, **settings}  # it would take most of the memory
    drafter = {"hf_config": {"eagle_aux_hidden_state_layer_ids": [tap + 1 for tap in first["taps"]]}}
    model = LLM(
        kv_transfer_config=connector,
        speculative_config={
            "method": "extract_hidden_states", "num_speculative_tokens": 1, "draft_model_config": drafter,
        },
        **WHOLE_ROWS,
        **settings,
    )  # fmt: skip
    print(json.dumps({"ready": True}), file=answers, flush=True)
    sampling = SamplingParams(max_tokens=1, detokenize=False)
    for line in requests:
        prompts = [{"prompt_token_ids": row} for row in json.loads(line)["rows"]]
        paths = []
        for output in model.generate(prompts, sampling, use_tqdm=False):
            path = output.kv_transfer_params["hidden_states_path"]
            with open(f"{path}.lock") as lock:
                fcntl.flock(lock, fcntl.LOCK_SH)  # waits until the file is written
            os.unlink(f"{path}.lock")
            paths.append(path)
        print(json.dumps({"paths": paths}), file=answers, flush=True)


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints to stdout
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    serve(iter(sys.stdin.readline, ""), answers)
