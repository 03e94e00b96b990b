"""Useful work of a step, by a stated formula, and the peak that it is compared with."""

import torch

# Dense bf16 peaks in FLOP/s, from the vendors' data sheets, by a part of the device's name.
PEAKS = {
    "H100": 989e12,
    "H200": 989e12,
    "H800": 989e12,
    "A100": 312e12,
    "B200": 2250e12,
    "L40S": 362e12,
    "4090": 165e12,
}


def step_flops(config, num_features: int, tokens: int, slots: int, weighted: int, pairs: int) -> float:
    """FLOPs of a step's forward and backward pass, without padding and recomputation. A multiplication and an addition
    are two.

    config: the drafter's. num_features: inputs of `fc`. tokens: context tokens. slots: of all blocks. weighted: slots
    that reach the head. pairs: (slot, key) pairs that the mask lets through.

    Every matrix costs twice in the backward pass (inputs and weights), but the frozen head has no weight gradient and
    the features need no gradient.
    """
    width, layers = config.hidden_size, config.num_hidden_layers
    queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    per_slot = layers * (2 * width * queries + 2 * width * keys + 3 * width * config.intermediate_size)
    context = 2 * tokens * (2 * num_features * width + 3 * layers * 2 * width * keys)
    blocks = 2 * slots * 3 * per_slot + 2 * pairs * 3 * layers * 2 * queries
    head = 2 * weighted * 2 * width * config.vocab_size
    return float(context + blocks + head)


def peak_flops() -> float | None:
    """The current GPU's, where it is known; None on a CPU."""
    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name()
    return next((peak for part, peak in PEAKS.items() if part in name), None)
