"""Plain decoding by our loop against Transformers' `generate`: same target, prompts and tokens, alternately.

python tests/bench/decode.py [target folder] [new tokens]
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from data_prep.demo.target import demo_target
from dflash.generate import generate
from dflash.target import load_target


def main(folder: str | None = None, new_tokens: str = "64", rounds: int = 5) -> None:
    folder = folder or str(demo_target(Path(".cache/targets")))
    target = load_target(folder, dtype=torch.bfloat16)
    input_ids = torch.randint(20, 400, (1, 48), generator=torch.Generator().manual_seed(0))
    seconds = {"ours": 0.0, "transformers": 0.0}

    def ours():
        return generate(target, input_ids, int(new_tokens)).tokens

    def transformers():
        out = target.generate(
            input_ids, attention_mask=torch.ones_like(input_ids), max_new_tokens=int(new_tokens),
            min_new_tokens=int(new_tokens), do_sample=False, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        return out[0, input_ids.shape[1] :].tolist()

    both = {"ours": ours, "transformers": transformers}
    assert ours() == transformers(), "both decode the same tokens"
    for round_ in range(rounds):
        for name in list(both) if round_ % 2 else reversed(list(both)):
            start = time.perf_counter()
            both[name]()
            seconds[name] += time.perf_counter() - start
    rate = {name: rounds * int(new_tokens) / value for name, value in seconds.items()}
    print(f"plain decoding, tokens/s over {rounds} answers of {new_tokens}: {rate}")
    print(f"ratio {rate['ours'] / rate['transformers']:.3f} (at least 0.95 is wanted)")


if __name__ == "__main__":
    main(*sys.argv[1:])
