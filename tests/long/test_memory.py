"""Anonymous memory of a whole preparation (read, encode, capture) does not grow with the data.

Reference: the same on a tenth of the rows. Peak of RssAnon, which a thread of the process samples: mapped files, which
the kernel may drop at any time, do not count.
"""

import json
import random
import re

import pytest
import run_helpers as helpers

WATCHED = """
import re, runpy, threading, time
peak = 0
def watch():
    global peak
    while True:
        peak = max(peak, int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1]))
        time.sleep(0.01)
threading.Thread(target=watch, daemon=True).start()
runpy.run_path("data_prep/run.py", run_name="__main__")
print("peak", peak)
"""


@pytest.mark.parametrize("codec", ["bf16", "lowrank"])
def test_memory_does_not_grow_with_the_data(tmp_path, codec):
    rng, peaks = random.Random(0), []
    for count in (2_000, 20_000):
        path = tmp_path / f"{count}.jsonl"
        with path.open("w") as out:
            for number in range(count):
                answer = {"role": "assistant", "content": "x" * rng.randint(20, 90)}
                row = {"messages": [{"role": "user", "content": f"prompt {number}"}, answer]}
                out.write(json.dumps(row) + "\n")
        done = helpers.run(
            "-c", WATCHED, "+model=tiny", "stage=capture", f"data.path={path}", "data.answers=data",
            f"cache.dir={tmp_path}/cache", f"cache.codec={codec}", "cache.threads=1", "cache.fit_tokens=4096",
            timeout=400,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-2000:]
        peaks.append(int(re.search(r"peak (\d+)", done.stdout)[1]))
    print(f"{codec}: peak of {peaks[0] / 1024:.0f} MiB for 2,000 rows, {peaks[1] / 1024:.0f} MiB for 20,000")
    assert peaks[1] < 1.1 * peaks[0], peaks
