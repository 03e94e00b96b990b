"""A second engine: Transformers' own DFlash generation. A drafter trained here for a few seconds on the tiny target's
greedy answers is loaded strictly into `MuseGlimmerAssistantModel`, whose mathematics is z-lab's. Both engines must give
the target's greedy tokens, and the same number of verify steps, prompt by prompt."""

import json
from pathlib import Path

import pytest
import torch
from helpers import eligible, greedy, pack
from transformers import AutoTokenizer, MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel

from dflash.config import ModelConfig, drafter_config
from dflash.generate import generate
from dflash.model import DFlashDraftModel, TargetEnds
from dflash.objective import block_loss
from dflash.target import features, load_target

ASSETS = Path(__file__).parent / "assets"
S, GAMMA, NEW = 8, 4.0, 48


@pytest.fixture(scope="module")
def target():
    target = load_target(str(ASSETS / "tiny"), dtype=torch.float32)
    target.generation_config.eos_token_id = None
    return target


@pytest.fixture(scope="module")
def prompts():
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / "tiny")
    lines = (ASSETS / "prompts.jsonl").read_text().splitlines()[:6]
    chats = [json.loads(line)["messages"] for line in lines]
    return [tokenizer.apply_chat_template(chat, add_generation_prompt=True).input_ids for chat in chats]


@pytest.fixture(scope="module")
def drafter(target, prompts):
    """One layer, 150 AdamW steps on the answers to these very prompts: it need not be good in general."""
    torch.manual_seed(0)
    model = ModelConfig("tiny", block_size=S, num_layers=1, taps=[1, 2, 4], mask_token_id=260)
    drafter = DFlashDraftModel(drafter_config(target.config, model))
    rows = []
    for prompt in prompts:
        answer = greedy(target, prompt, NEW)
        mask = torch.tensor([False] * len(prompt) + [True] * len(answer))
        rows.append((torch.tensor(prompt + answer), mask, features(target, [prompt + answer], drafter.taps)[0][0]))
    batch = pack(rows, [eligible(mask)[::3] for _, mask, _ in rows], S, GAMMA, mask_token_id=260)
    ends, total = TargetEnds.of(target, drafter.config), batch.blocks.weight_AS.sum()
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=2e-3)
    for _ in range(150):
        (block_loss(drafter, batch, ends, chunk=1024).loss / total).backward()
        optimizer.step()
        optimizer.zero_grad()
    return drafter.eval()


@pytest.fixture(scope="module")
def assistant(drafter):
    """Our tensors under the names that Transformers gives them; nothing missing, nothing left over."""
    c = drafter.config
    fields = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    fields += ("head_dim", "rms_norm_eps", "rope_parameters", "max_position_embeddings", "layer_types", "hidden_act")
    config = MuseGlimmerAssistantConfig(
        **{name: getattr(c, name) for name in fields}, sliding_window=2048, block_size=c.block_size,
        mask_token_id=c.dflash_config["mask_token_id"], target_layer_ids=c.dflash_config["target_layer_ids"],
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    model = MuseGlimmerAssistantModel(config)
    names = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    model.load_state_dict({names.get(k, k): v for k, v in drafter.state_dict().items()}, strict=True)
    return model.eval().float()


def test_same_tokens_and_verify_steps(target, prompts, drafter, assistant):
    forwards = []
    handle = target.register_forward_hook(lambda *_: forwards.append(1))
    taus = []
    for prompt in prompts[:3]:
        expected = greedy(target, prompt, NEW)
        forwards.clear()
        ids = torch.tensor([prompt])
        theirs = target.generate(
            ids, attention_mask=torch.ones_like(ids), assistant_model=assistant, speculation_type="dflash",
            max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        their_steps = len(forwards) - 1
        ours = generate(target, ids, NEW, drafter)
        assert theirs[0, len(prompt) :].tolist() == ours.tokens == expected
        assert len(ours.accepted) == their_steps
        taus.append(ours.tau)
    handle.remove()
    assert min(taus) > 1.5, "the drafter accepts next to nothing: a weak test"
