"""The drafter and the target's ends against independent references: the z-lab formulas written again in float64
(helpers.py), perturbation probes that must leave other blocks bit for bit as they were, the step-by-step decoder with
its cache, and Transformers' own hidden states, logits and tables for the taps, the scales and the files."""

import json

import pytest
import torch
import transformers
from helpers import (
    MASK,
    SHAPE,
    eligible,
    pack,
    packed_hidden,
    perturb,
    random_rows,
    reference_drafter,
    tiny_drafter,
    tiny_target,
    told,
)
from safetensors.torch import load_file, save_file

from dflash.config import ModelConfig, drafter_config, spread_taps, target_scales
from dflash.model import DFlashDraftModel, TargetEnds
from dflash.objective import block_loss
from dflash.target import PAD_TO, features, load_ends

S, GAMMA = 8, 4.0
LENGTHS = [15, 22, 9]


@pytest.fixture(scope="module")
def target():
    return tiny_target("Qwen3")


@pytest.fixture
def drafter(target):
    return tiny_drafter(target)


@pytest.fixture
def rows():
    return random_rows(LENGTHS, 3 * 48, supervised=0.9)


@pytest.fixture
def anchors(rows):
    return [eligible(mask)[::2] for _, mask, _ in rows]


# the drafter's mathematics


@pytest.mark.parametrize("kind", ["Qwen3", "Llama"])
def test_drafter_is_zlabs_formula(kind):
    """Every block of a packed bin equals the block alone behind its own context, in float64."""
    target = tiny_target(kind)
    drafter, ends = tiny_drafter(target), TargetEnds.of(target, tiny_drafter(target).config)
    rows = random_rows(LENGTHS, 3 * 48)
    anchors = [[0, 1, len(ids) // 2, len(ids) - 1] for ids, _, _ in rows]
    packed = iter(packed_hidden(drafter, pack(rows, anchors, S, GAMMA), ends))
    params = {name: p.detach().double() for name, p in drafter.named_parameters()}
    for (ids, _, context), local in zip(rows, anchors):
        for a in local:
            embeds = target.get_input_embeddings().weight[torch.tensor([ids[a]] + [MASK] * (S - 1))]
            expected = reference_drafter(params, drafter.config, embeds, context[:a])
            assert (next(packed) - expected).abs().max() < 1e-4


def test_state_dict_is_zlabs(target):
    """The names of z-lab's released checkpoints, and no other; nor any buffer."""
    inner = ["input_layernorm", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    inner += [f"self_attn.{part}" for part in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")]
    names = {"fc.weight", "hidden_norm.weight", "norm.weight"}
    names |= {f"layers.{i}.{part}.weight" for i in range(3) for part in inner}
    drafter = tiny_drafter(target, num_layers=3, taps=(1, 4))
    assert set(drafter.state_dict()) == names
    assert not list(drafter.buffers())
    assert drafter.fc.weight.shape == (48, 2 * 48)


# contract 3: what a block sees


def blocks_of(rows, anchors):
    """(row, local anchor) of every block in the bin."""
    return [(r, a) for r, local in enumerate(anchors) for a in local]


def test_context_is_causal_and_of_one_document(target, drafter, rows, anchors):
    ends = TargetEnds.of(target, drafter.config)
    before = packed_hidden(drafter, pack(rows, anchors, S, GAMMA), ends)
    for row, position in [(0, 0), (0, 7), (0, 14), (1, 0), (1, 5), (1, 21), (2, 3)]:
        changed = [(ids, mask, context.clone()) for ids, mask, context in rows]
        changed[row][2][position] += 30.0
        after = packed_hidden(drafter, pack(changed, anchors, S, GAMMA), ends)
        for i, (r, a) in enumerate(blocks_of(rows, anchors)):
            sees = r == row and position < a
            assert torch.equal(before[i], after[i]) != sees, f"block at {a} of row {r}, feature {position} of row {row}"


def test_blocks_do_not_see_each_other(target, drafter, rows, anchors):
    ends = TargetEnds.of(target, drafter.config)
    before = packed_hidden(drafter, pack(rows, anchors, S, GAMMA), ends)
    for i in range(len(before)):
        batch = pack(rows, anchors, S, GAMMA)
        batch.blocks.input_AS[i, 3] = 60
        after = packed_hidden(drafter, batch, ends)
        assert [torch.equal(b, a) for b, a in zip(before, after)] == [j != i for j in range(len(before))]


def test_block_is_bidirectional(target, drafter, rows, anchors):
    """Every slot changes with every slot's input, earlier or later."""
    ends = TargetEnds.of(target, drafter.config)
    before = packed_hidden(drafter, pack(rows, anchors, S, GAMMA), ends)[0]
    for slot in range(S):
        batch = pack(rows, anchors, S, GAMMA)
        batch.blocks.input_AS[0, slot] = 60
        after = packed_hidden(drafter, batch, ends)[0]
        assert ((before - after).abs().amax(-1) > 1e-4).all()


# contract 11: train = serve


def trained(drafter, batch, ends, steps):
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=3e-3)
    for _ in range(steps):
        block_loss(drafter, batch, ends, chunk=32).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("steps", [0, 6])
@pytest.mark.parametrize("kind", ["Qwen3", "Llama"])
def test_training_forward_is_the_decoder_with_its_cache(kind, steps):
    target = tiny_target(kind)
    drafter = tiny_drafter(target)
    ends = TargetEnds.of(target, drafter.config)
    rows = random_rows(LENGTHS, 3 * 48, supervised=2.0)
    anchors = [[1, 2, 6, 7, 13], [3, 4, 12, 20], [8]]  # the context comes in uneven pieces
    batch = pack(rows, anchors, S, GAMMA)
    trained(drafter, batch, ends, steps)
    with torch.no_grad():
        packed = iter(ends.logits(packed_hidden(drafter, batch, ends)))
        for (ids, _, context), local in zip(rows, anchors):
            state, done = drafter.begin(target, len(ids) + S + 1), 0
            for a in local:
                seen = []
                drafter.propose(state, told(ids[a], context[done:a], done, S), S - 1, seen.append)
                assert (seen[0][0] - next(packed)[1:]).abs().max() < 1e-4
                done = a


def test_propose_fewer_drafts_than_trained(target, drafter, rows):
    """A shorter block is the same forward with fewer masks: equal to the reference with S' = 4."""
    ids, _, context = rows[1]
    seen = []
    with torch.no_grad():
        drafter.propose(drafter.begin(target, 40), told(ids[9], context[:9], 0, 4), 3, seen.append)
    params = {name: p.detach().double() for name, p in drafter.named_parameters()}
    embeds = target.get_input_embeddings().weight[torch.tensor([ids[9], MASK, MASK, MASK])]
    expected = reference_drafter(params, drafter.config, embeds, context[:9])[1:] @ target.lm_head.weight.double().T
    assert (seen[0][0] - expected).abs().max() < 1e-4


# contract 1: taps


@pytest.mark.parametrize("kind", ["Llama", "Qwen3"])
def test_features_are_hf_hidden_states(kind):
    """Tap i is hidden_states[i + 1], for every i below the last layer; rows padded on the right equal rows alone."""
    target = tiny_target(kind)
    rows = [row[0].tolist() for row in random_rows([12, 5, 9], 1)]
    taps = list(range(5))
    padded = features(target, rows, taps)
    for row, (together,) in zip(rows, padded):
        ids = torch.tensor([row + [0] * (-len(row) % PAD_TO)])  # the shape decides about last bits
        states = target(ids, output_hidden_states=True).hidden_states
        expected = torch.cat([states[i + 1][0, : len(row)] for i in taps], dim=-1)
        (alone,) = features(target, [row], taps)[0]
        assert alone.shape == together.shape == (len(row), 5 * 48)
        assert torch.equal(alone, expected)
        assert (together - expected).abs().max() < 1e-4
        (_, last), states = (
            features(target, [row], taps, last=True)[0],
            states[-1][0, : len(row)],
        )  # behind the final norm
        assert (last - states).abs().max() < 1e-5
    (some,) = features(target, rows[:1], [1, 4])[0]
    (whole,) = padded[0]
    assert (some - torch.cat((whole[:, 48:96], whole[:, 192:]), dim=-1)).abs().max() < 1e-4


# contract 9: the target's ends


@pytest.mark.parametrize("kind", ["Llama", "Qwen3", "Gemma2", "Cohere"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shard", ["1GB", "20KB"])
def test_load_ends_reads_the_models_tables(kind, tied, shard, tmp_path):
    """From files, sharded or not, for tied and untied targets, among them types that are tied unless told otherwise."""
    target = tiny_target(kind, tie_word_embeddings=tied)
    target.save_pretrained(tmp_path, max_shard_size=shard)
    saved = transformers.AutoConfig.from_pretrained(tmp_path)
    config = drafter_config(saved, ModelConfig("t", taps=[1, 3], mask_token_id=1))
    ends = load_ends(str(tmp_path), config, dtype=torch.float32)
    assert torch.equal(ends.embed_VD, target.get_input_embeddings().weight)
    assert torch.equal(ends.head_VD, target.get_output_embeddings().weight)
    assert (ends.embed_VD is ends.head_VD) == tied
    assert ends == TargetEnds(ends.embed_VD, ends.head_VD, *scales_by_hand(kind))
    assert load_ends(str(tmp_path), config, dtype=torch.bfloat16).head_VD.dtype == torch.bfloat16


def test_load_ends_knows_types_that_are_tied_by_default(tmp_path):
    """The Hub's Gemma and Cohere configs do not spell out `tie_word_embeddings`; the type's default is True."""
    target = tiny_target("Gemma2", tie_word_embeddings=True)
    target.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != "tie_word_embeddings"}))
    assert transformers.AutoConfig.from_pretrained(tmp_path).tie_word_embeddings
    config = drafter_config(target.config, ModelConfig("t", taps=[1, 3], mask_token_id=1))
    assert torch.equal(load_ends(str(tmp_path), config, dtype=torch.float32).head_VD, target.lm_head.weight)


def scales_by_hand(kind):
    return {"Gemma2": (48**0.5, 1.0, 30.0), "Cohere": (1.0, 0.0625, None)}.get(kind, (1.0, 1.0, None))


def test_load_ends_refuses(target, tmp_path):
    target.save_pretrained(tmp_path)
    model = ModelConfig("t", taps=[1, 3], mask_token_id=1)
    config = drafter_config(target.config, model)
    config.vocab_size = 81
    with pytest.raises(ValueError, match=r"\(80, 48\).*\(81, 48\)"):
        load_ends(str(tmp_path), config, dtype=torch.float32)
    config.vocab_size = 80
    tensors = load_file(tmp_path / "model.safetensors")
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        save_file({k: v for k, v in tensors.items() if k != name}, tmp_path / "model.safetensors", {"format": "pt"})
        with pytest.raises(ValueError, match=name):
            load_ends(str(tmp_path), config, dtype=torch.float32)


def test_a_head_with_a_bias_is_refused(target):
    biased = tiny_target()
    biased.lm_head = torch.nn.Linear(48, 80, bias=True)
    with pytest.raises(ValueError, match="bias"):
        TargetEnds.of(biased, tiny_drafter(target).config)


SCALED = {
    "Gemma": {"head_dim": 16},
    "Gemma2": {"head_dim": 16, "final_logit_softcapping": 2.0, "query_pre_attn_scalar": 16},
    "Gemma3": {"head_dim": 16, "final_logit_softcapping": 2.5, "query_pre_attn_scalar": 16},
    "Granite": {"embedding_multiplier": 12.0, "logits_scaling": 8.0, "residual_multiplier": 0.2},
    "Cohere": {"logit_scale": 0.25},
    "Llama": {},
}


@pytest.mark.parametrize("kind", SCALED)
def test_scales_are_those_of_the_real_model(kind):
    """Embeddings equal what layer 0 receives, and logits what the model returns for the same normed states."""
    target = tiny_target(kind, **SCALED[kind])
    ends = TargetEnds.of(target, drafter_config(target.config, ModelConfig("t", taps=[1, 3], mask_token_id=1)))
    ids = torch.randint(0, 80, (1, 9), generator=torch.Generator().manual_seed(3))
    seen = []
    target.model.layers[0].register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    target.model.norm.register_forward_hook(lambda module, args, output: seen.append(output))
    logits = target(ids).logits
    assert (ends.embed(ids) - seen[0]).abs().max() < 1e-5
    assert (ends.logits(seen[1]) - logits).abs().max() < 1e-5
    if kind != "Llama":
        assert ends != TargetEnds(ends.embed_VD, ends.head_VD), "no scale was picked up"


# the drafter's config


ZLAB_KEYS = {"block_size", "num_target_layers", "dflash_config", "is_causal"}
FOREIGN = {
    "MistralConfig": {"sliding_window": 16},
    "Qwen3MoeConfig": {"num_experts": 4, "decoder_sparse_step": 1, "sliding_window": 16, "use_sliding_window": True},
    "Phi3Config": {"partial_rotary_factor": 0.5, "pad_token_id": 0},
    "Qwen2Config": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
    "LlamaConfig": {
        "attention_bias": True, "mlp_bias": True, "hidden_act": "gelu", "attention_dropout": 0.1, "extra": {"b": 4},
        "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
                            "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", FOREIGN)
def test_foreign_fields_do_not_leak(kind):
    """Apart from the inherited fields, a drafter's config is a default Qwen3Config and z-lab's keys."""
    target = getattr(transformers, kind)(**{**SHAPE, **FOREIGN[kind]})
    made = drafter_config(target, ModelConfig("t", num_layers=2, taps=[0, 3], mask_token_id=1)).to_dict()
    plain = transformers.Qwen3Config(num_hidden_layers=2).to_dict()
    assert set(made) - set(plain) <= ZLAB_KEYS
    inherited = {
        "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "rms_norm_eps", "vocab_size",
        "max_position_embeddings", "initializer_range", "bos_token_id", "eos_token_id", "head_dim",
    }  # fmt: skip
    own = {"architectures", "max_window_layers", "rope_parameters", "layer_types", "tie_word_embeddings"}
    for name in set(plain) - inherited - own:
        assert made[name] == plain[name], name
    for name in inherited - {"head_dim"}:
        assert made[name] == getattr(target, name, plain[name]), name
    assert made["head_dim"] == getattr(target, "head_dim", None) or 12
    assert made["layer_types"] == ["full_attention"] * 2 and not made["tie_word_embeddings"]
    theta = (getattr(target, "rope_parameters", None) or {}).get("rope_theta", 10000.0)
    assert made["rope_parameters"] == {"rope_theta": theta, "rope_type": "default"}
    assert made["dflash_config"] == {"block_size": 16, "mask_token_id": 1, "target_layer_ids": [0, 3]}
    assert (made["block_size"], made["num_target_layers"], made["architectures"]) == (16, 6, ["DFlashDraftModel"])


@pytest.mark.parametrize(
    "config",
    [
        transformers.LlamaConfig(**SHAPE, logit_scale=0.5),
        transformers.LlamaConfig(**SHAPE, embedding_multiplier=12.0),
        transformers.LlamaConfig(**SHAPE, final_logit_softcapping=30.0),
        transformers.Qwen3Config(**SHAPE, lm_head_multiplier=0.1),
        transformers.Cohere2Config(**SHAPE, logit_scale=0.0625),
    ],
)
def test_unknown_scales_are_refused(config):
    with pytest.raises(ValueError, match=r"(logit_scale|_multiplier|final_logit_softcapping)=\d"):
        drafter_config(config, ModelConfig("t", taps=[1], mask_token_id=1))


@pytest.mark.parametrize("kind, extra", [("Gemma4TextConfig", {}), ("AfmoeConfig", {"mup_enabled": True})])
def test_embedding_scales_that_the_config_does_not_name(kind, extra):
    """These multiply their embedding by sqrt(hidden size) and no scale-like number says so: honoured or refused."""
    config = getattr(transformers, kind)(hidden_size=48, **extra)
    try:
        found = target_scales(config)
    except ValueError:
        return
    assert found.get("input_embedding_scale") == pytest.approx(48**0.5)


def test_neutral_scales_are_not_refused():
    config = transformers.LlamaConfig(**SHAPE, logit_scale=1.0, final_logit_softcapping=None)
    made = drafter_config(config, ModelConfig("t", taps=[1], mask_token_id=1))
    assert set(made.dflash_config) == {"block_size", "mask_token_id", "target_layer_ids"}


def test_drafter_survives_save_and_load(target, drafter, tmp_path):
    """A saved drafter loads with nothing missing, unexpected or changed; theta and taps come back from the config."""
    drafter.save_pretrained(tmp_path)
    loaded, info = DFlashDraftModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert all(torch.equal(p, q) for p, q in zip(drafter.state_dict().values(), loaded.state_dict().values()))
    assert (loaded.taps, loaded.theta, loaded.mask_token_id) == (drafter.taps, drafter.theta, MASK)
    assert json.loads((tmp_path / "config.json").read_text())["dflash_config"]["target_layer_ids"] == [0, 2, 4]


@pytest.mark.parametrize(
    "layers, count, taps",
    [
        (36, 5, [1, 9, 17, 25, 33]),
        (28, 5, [1, 7, 13, 19, 25]),
        (48, 5, [1, 12, 23, 34, 45]),
        (64, 5, [1, 16, 31, 46, 61]),
        (28, 1, [14]),
        (7, 1, [3]),
    ],
)
def test_spread_taps_golden(layers, count, taps):
    """z-lab's released drafters; a single tap sits in the middle."""
    assert spread_taps(layers, count) == taps
    if count > 1:
        assert ModelConfig("t", num_taps=count, mask_token_id=0).resolve_taps(layers) == taps


@pytest.mark.parametrize("taps", [[5], [0, 6], [-1, 2]])
def test_last_layer_and_foreign_taps_are_refused(taps):
    with pytest.raises(ValueError, match=r"model\.taps"):
        ModelConfig("t", taps=taps, mask_token_id=0).resolve_taps(6)


def test_rope_theta_reaches_the_drafter():
    """A target with another base: the drafter turns by it. Compared with the reference, which reads the config."""
    target = tiny_target("Qwen3", rope_parameters={"rope_type": "default", "rope_theta": 500.0})
    drafter = perturb(tiny_drafter(target), 3)
    assert drafter.config.rope_parameters["rope_theta"] == 500.0
    ids, _, context = random_rows([20], 3 * 48)[0]
    ends = TargetEnds.of(target, drafter.config)
    hidden = packed_hidden(drafter, pack([(ids, ids > 0, context)], [[12]], S, GAMMA), ends)[0]
    params = {name: p.detach().double() for name, p in drafter.named_parameters()}
    embeds = ends.embed(torch.tensor([ids[12]] + [MASK] * (S - 1)))
    assert (hidden - reference_drafter(params, drafter.config, embeds, context[:12])).abs().max() < 1e-4
