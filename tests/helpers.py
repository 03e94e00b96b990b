"""Tiny models in memory, and slow reference implementations that share no line with the code under test.

`reference_drafter` is the drafter written a second time from z-lab's formulas: one block, one context, explicit
attention per head, rotary embedding as complex numbers, in float64, differentiable with respect to the parameters.
"""

import math
from types import SimpleNamespace

import torch
import transformers

from dflash.baselines import make_drafter
from dflash.blocks import make_blocks
from dflash.config import Kind, ModelConfig, drafter_config
from dflash.generate import Proposal, Round
from dflash.objective import BlockBatch, block_loss

MASK = 1  # the mask token of the tiny drafters
SHAPE = {
    "vocab_size": 80, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.2, "rms_norm_eps": 1e-5,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "tie_word_embeddings": False,
    "attn_implementation": "sdpa",
}  # fmt: skip


def perturb(module, seed=0):
    """Give norms (all parameters of one dimension) values other than one, so that a dropped norm shows."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() == 1:
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return module


def tiny_target(kind="Llama", seed=0, **changes):
    """A random target in fp32, e.g. kind="Qwen3"."""
    torch.manual_seed(seed)
    extra = {"Qwen3": {"head_dim": 16}, "Gemma2": {"attn_implementation": "eager"}}  # Gemma 2 knows no other
    shape = {**SHAPE, **extra.get(kind, {}), **changes}
    config = getattr(transformers, kind + ("TextConfig" if kind == "Gemma3" else "Config"))(**shape)
    return perturb(getattr(transformers, kind + "ForCausalLM")(config), seed).eval().requires_grad_(False)


def tiny_drafter(target, seed=0, block_size=8, num_layers=2, taps=(0, 2, 4), mask_token_id=MASK, kind="dflash"):
    torch.manual_seed(seed + 100)
    model = ModelConfig(
        "tiny", block_size=block_size, num_layers=num_layers, taps=list(taps), mask_token_id=mask_token_id
    )
    return perturb(make_drafter(drafter_config(target.config, model), Kind(kind)), seed).eval()


def greedy(target, ids, max_new_tokens, stop=None):
    """The target's own greedy answer, by Transformers."""
    prompt = torch.tensor([ids])
    out = target.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=max_new_tokens,
        eos_token_id=stop, pad_token_id=0,
    )  # fmt: skip
    return out[0, len(ids) :].tolist()


def random_rows(lengths, size, vocab=80, seed=0, supervised=0.8):
    """Documents (ids, loss mask, features) with random gaps in the mask."""
    g = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randint(2, vocab, (n,), generator=g),
            torch.rand(n, generator=g) < supervised,
            torch.randn(n, size, generator=g),
        )
        for n in lengths
    ]


def eligible(mask):
    return [i for i in range(len(mask) - 1) if mask[i] and mask[i + 1]]


def pack(rows, anchors, block_size, gamma, mask_token_id=MASK):
    """One bin of these rows; anchors: for each row, document-local indices."""
    starts = [sum(len(row[0]) for row in rows[:i]) for i in range(len(rows) + 1)]
    chosen = [start + a for start, local in zip(starts, anchors) for a in local]
    ids_T, mask_T, features_TF = (torch.cat(part) for part in zip(*rows))
    blocks = make_blocks(
        ids_T, mask_T, torch.tensor(starts), torch.tensor(chosen, dtype=torch.long), block_size, mask_token_id, gamma
    )
    position_T = torch.cat([torch.arange(len(row[0])) for row in rows])
    return BlockBatch(features_TF, ids_T, position_T, blocks, blocks.weight_AS.flatten().nonzero()[:, 0])


def packed_hidden(drafter, batch, ends):
    """The drafter's output [A, S, D] inside `block_loss`: the training forward itself."""
    seen = []
    handle = drafter.register_forward_hook(lambda module, args, output: seen.append(output))
    block_loss(drafter, batch, ends, chunk=64)
    handle.remove()
    return seen[0][0].unflatten(0, batch.blocks.input_AS.shape)


def reference_drafter(params, config, embeds_SD, features_TF):
    """Hidden states [S, D] of one block behind T context tokens, float64. params: the drafter's, by name."""
    heads, groups, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    num_context, num_slots = len(features_TF), len(embeds_SD)
    position = torch.arange(num_context + num_slots, dtype=torch.float64)
    theta = (config.to_dict().get("rope_parameters") or {"rope_theta": 10000.0})["rope_theta"]
    frequency = torch.tensor([theta ** (-2 * i / size) for i in range(size // 2)], dtype=torch.float64)
    turn = torch.polar(torch.ones(1, dtype=torch.float64), position[:, None] * frequency)

    def norm(x, name):
        return x / (x.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps).sqrt() * params[name + ".weight"]

    def linear(x, name):
        return x @ params[name + ".weight"].T

    def rotate(x, turn):
        z = torch.complex(x[:, : size // 2], x[:, size // 2 :]) * turn
        return torch.cat((z.real, z.imag), dim=-1)

    x = embeds_SD.double()
    context = norm(linear(features_TF.double(), "fc"), "hidden_norm")
    for i in range(config.num_hidden_layers):
        at = f"layers.{i}.self_attn."
        y = norm(x, f"layers.{i}.input_layernorm")
        both = torch.cat((context, y))
        q, k, v = linear(y, at + "q_proj"), linear(both, at + "k_proj"), linear(both, at + "v_proj")
        out = []
        for h in range(heads):
            g = h // (heads // groups)
            q_h = rotate(norm(q[:, h * size : (h + 1) * size], at + "q_norm"), turn[num_context:])
            k_h = rotate(norm(k[:, g * size : (g + 1) * size], at + "k_norm"), turn)
            out.append((q_h @ k_h.T / math.sqrt(size)).softmax(-1) @ v[:, g * size : (g + 1) * size])
        x = x + linear(torch.cat(out, dim=-1), at + "o_proj")
        y = norm(x, f"layers.{i}.post_attention_layernorm")
        gate = linear(y, f"layers.{i}.mlp.gate_proj")
        x = x + linear(gate * gate.sigmoid() * linear(y, f"layers.{i}.mlp.up_proj"), f"layers.{i}.mlp.down_proj")
    return norm(x, "norm")


def scripted_drafter(sequence, block_size, right=()):
    """A drafter that knows the whole text (prompt and answer) and gets `right[step]` drafts right, then all wrong.

    Without an entry for a step it gets all right. For several sequences: lists of both. It checks that the anchor is
    the token at the place that it is told, and that the features reach up to it.
    """
    several = isinstance(sequence[0], list)
    texts, rights = (sequence, right) if several else ([sequence], [right])

    def propose(state, told, num_drafts, choose):
        out = []
        for b, (text, right) in enumerate(zip(texts, rights)):
            at = int(told.length_B[b])
            if at >= len(text):  # its sequence is done
                out.append([0] * num_drafts)
                continue
            assert int(told.anchor_B[b]) == text[at], "the anchor is not the token at its place"
            assert int(told.first_B[b]) == state["seen"][b] and told.features_BTF.shape[1] >= at - state["seen"][b]
            state["seen"][b] = at
            drafts = (text[at + 1 :] + [0] * num_drafts)[:num_drafts]
            num_right = right[state["step"]] if state["step"] < len(right) else num_drafts
            out.append([t if i < num_right else t ^ 1 for i, t in enumerate(drafts)])
        state["step"] += 1
        return Proposal(torch.tensor(out), None)

    begin = lambda target, capacity: {"seen": [0] * len(texts), "step": 0}  # noqa: E731
    return SimpleNamespace(taps=[1, 3], block_size=block_size, begin=begin, propose=propose)


def told(anchor_id, features_TF, first, block_size):
    """What the loop tells a drafter of one sequence: features from `first` on, all before the anchor."""
    length = first + len(features_TF)
    at = [torch.tensor([place]) for place in (length, first)]
    return Round(anchor_id.view(1), at[0], features_TF[None], at[1], None, length + block_size, True)
