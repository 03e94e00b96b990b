"""vLLM, in a process of its own, gives the states that Transformers gives. Reference: each row alone through
Transformers with output_hidden_states, where hidden_states[i + 1] is the output of layer i. What vLLM may get wrong is
played by a script that speaks for it.
"""

import sys
import time
from pathlib import Path

import pytest
import run_helpers as helpers
import torch
from safetensors.torch import save_file

from data_prep.capture_vllm import VllmFeatures

PYTHON = str(helpers.ROOT / ".venv/vllm/bin/python")
TAPS = [0, 2, 4]
LENGTHS = (33, 400, 1, 150, 7, 399, 2, 64, 16, 17, 257, 100)  # the longest is the limit; 16 tokens fill a block


def reference(row: list[int]) -> torch.Tensor:
    with torch.no_grad():
        states = helpers.target()(torch.tensor([row]), output_hidden_states=True).hidden_states
    return torch.cat([states[tap + 1][0] for tap in TAPS], dim=-1)


@pytest.fixture(scope="module")
def vllm():
    # 1024 tokens of a step: the rows below need several
    with VllmFeatures(PYTHON, str(helpers.TINY), TAPS, "float32", 400, {"max_num_batched_tokens": 1024}) as made:
        yield made


def rows_of(lengths, seed) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 256, (length,), generator=generator).tolist() for length in lengths]


def assert_equal(found: list[torch.Tensor], rows: list[list[int]]) -> None:
    assert len(found) == len(rows)
    for states_TF, row in zip(found, rows):
        assert states_TF.dtype == torch.float32 and states_TF.shape == (len(row), len(TAPS) * 128)
        assert (states_TF - reference(row)).abs().max() < 1e-4


def test_states_equal_those_of_transformers(vllm):
    rows = rows_of(LENGTHS, seed=0)
    assert_equal(vllm(rows), rows)


def test_a_second_call_and_rows_that_were_there_before(vllm):
    rows = rows_of(LENGTHS[:4], seed=0) + rows_of((90,), seed=1)
    rows += [rows[1], rows[1][:200] + rows[3]]  # once more, and with another end
    assert_equal(vllm(rows), rows)
    assert vllm([]) == []
    assert {path.name for path in vllm.log.parent.iterdir()} == {"stderr"}  # what was read is gone


def speaker(folder, then: str):
    """A program in the place of vLLM's Python: it says that it is ready, then what `then` says."""
    path = folder / "python"
    path.write_text(f"#!{sys.executable}\nimport sys\nprint('{{}}', flush=True)\nsys.stdin.readline()\n{then}\n")
    path.chmod(0o755)
    return str(path)


def runs(pid: str) -> bool:
    """Whether a process exists that was not killed: who reaps it is not ours to say."""
    try:
        return Path("/proc", pid, "stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


def one_line(caught) -> str:
    (line,) = str(caught.value).splitlines()
    return line


@pytest.mark.parametrize(
    "tokens, width, dtype, said",
    [
        ([1, 2, 4], 3, "float32", "other tokens"),
        ([1, 2], 3, "float32", "other tokens"),
        ([1, 2, 3], 2, "float32", "expected torch.float32 and 3 taps"),
        ([1, 2, 3], 3, "bfloat16", "torch.bfloat16 states"),
    ],
)
def test_states_of_something_else_are_refused(tmp_path, tokens, width, dtype, said):
    states = torch.zeros(len(tokens), width, 4, dtype=getattr(torch, dtype))
    save_file({"hidden_states": states, "token_ids": torch.tensor(tokens)}, tmp_path / "states")
    python = speaker(tmp_path, f'sys.stdin.readline(); print(\'{{"paths": ["{tmp_path}/states"]}}\', flush=True)')
    with VllmFeatures(python, "t", TAPS, "float32", 8, {}) as vllm, pytest.raises(ValueError, match=said) as caught:
        vllm([[1, 2, 3]])
    assert one_line(caught).startswith("capture: ")


def test_a_process_that_does_not_start_gives_one_line(tmp_path):
    with pytest.raises(OSError, match=r"^cache.python: /bin/false ended with code 1 \(it wrote nothing\)") as caught:
        VllmFeatures("/bin/false", str(helpers.TINY), TAPS, "float32", 8, {})
    one_line(caught)
    with pytest.raises(OSError, match=r"^cache.python: .*/none cannot be run \(No such file") as caught:
        VllmFeatures(str(tmp_path / "none"), str(helpers.TINY), TAPS, "float32", 8, {})
    one_line(caught)
    with pytest.raises(ValueError, match=r"^cache.engine: found dtype, expected") as caught:
        VllmFeatures(PYTHON, str(helpers.TINY), TAPS, "float32", 8, {"dtype": "half", "seed": 1})
    one_line(caught)


def test_what_vllm_refuses_gives_one_line():
    """Rows longer than the target's 2048 positions: vLLM names the error in one line and tells it in the next."""
    with pytest.raises(OSError, match=r"^cache.python: .* code 1 \(.*max_model_len \(3001\) is greater than") as caught:
        VllmFeatures(PYTHON, str(helpers.TINY), TAPS, "float32", 3000, {})
    one_line(caught)


def test_a_process_that_dies_gives_its_error_and_leaves_nothing(tmp_path):
    """It starts another one, says more than its error, and dies in its first request."""
    python = speaker(
        tmp_path,
        "import os, subprocess\n"
        f"print(subprocess.Popen(['sleep', '999'], stdin=-3, stdout=2).pid, file=open('{tmp_path}/pid', 'w'))\n"
        "sys.stdin.readline()\n"
        "print('ValueError: no room\\nRuntimeError: see root cause above\\nbye', file=sys.stderr)\n"
        "os._exit(3)",
    )
    with VllmFeatures(python, "t", TAPS, "float32", 8, {}) as vllm:
        for _ in range(2):  # asked again when it is dead
            with pytest.raises(OSError, match=r"ended with code 3 \(ValueError: no room\)") as caught:
                vllm([[1, 2, 3]])
            one_line(caught)
    pid = (tmp_path / "pid").read_text().strip()
    deadline = time.monotonic() + 5
    while runs(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not runs(pid)
    assert not vllm.log.parent.exists()
