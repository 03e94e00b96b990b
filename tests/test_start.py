"""What a fresh drafter starts from: near-uniform predictions, or copies of its target's last layers whose keys and
values of the context are the target's own."""

import math

import pytest
import torch
from helpers import tiny_drafter, tiny_target
from safetensors.torch import load_file, save_file

from dflash.model import TargetEnds
from dflash.target import features, start_from_target
from train.trainer import start_at_uniform


@pytest.mark.parametrize("spread", [0.02, 0.5])
def test_start_at_uniform(spread):
    """The loss of a random start is ln V and half the variance of the logits, 1, whatever the head's size."""
    target = tiny_target("Llama", vocab_size=2000, hidden_size=64, initializer_range=spread)
    drafter = tiny_drafter(target)
    start_at_uniform(drafter, TargetEnds.of(target, drafter.config))
    hidden = drafter.norm(torch.randn(1000, 64, generator=torch.Generator().manual_seed(0)))
    logits = hidden @ target.lm_head.weight.T
    labels = torch.randint(0, 2000, (1000,), generator=torch.Generator().manual_seed(1))
    loss = float(torch.nn.functional.cross_entropy(logits.detach(), labels))
    assert loss == pytest.approx(math.log(2000) + 0.5, abs=0.2)


@pytest.mark.parametrize("kind", ["Llama", "Qwen3"])
def test_context_keys_and_values_are_the_targets(kind, tmp_path):
    """With the highest tap just below the copied layers, its first layer sees the context as the target's layer did."""
    target = tiny_target(kind, seed=3)
    target.save_pretrained(tmp_path)
    drafter = tiny_drafter(target, taps=(0, 1, 3), num_layers=2)  # 6 layers: 4 and 5 are copied, tap 3 feeds layer 4
    ids = torch.randint(2, 80, (12,), generator=torch.Generator().manual_seed(0)).tolist()
    ((states_TF,),) = features(target, [ids], drafter.taps)
    with torch.no_grad():
        drafter.fc.weight.zero_()  # without the random part, the context is the highest tap
    start_from_target(drafter, str(tmp_path), states_TF)
    seen = {}
    for name in ("k_proj", "v_proj"):
        module = getattr(target.model.layers[4].self_attn, name)
        module.register_forward_hook(lambda m, i, out, name=name: seen.__setitem__(name, out[0]))
    with torch.no_grad():
        target(torch.tensor([ids]))
        context = drafter.hidden_norm(drafter.fc(states_TF))
        for name in ("k_proj", "v_proj"):
            assert torch.allclose(getattr(drafter.layers[0].self_attn, name)(context), seen[name], atol=1e-4), name
    if kind == "Qwen3":
        assert torch.equal(drafter.layers[1].self_attn.q_norm.weight, target.model.layers[5].self_attn.q_norm.weight)
    assert torch.equal(drafter.norm.weight, target.model.norm.weight)
    assert torch.equal(drafter.layers[1].mlp.up_proj.weight, target.model.layers[5].mlp.up_proj.weight)


def test_a_target_of_another_shape_is_refused(tmp_path):
    target = tiny_target("Llama")
    target.save_pretrained(tmp_path)
    drafter = tiny_drafter(target)
    weights = load_file(tmp_path / "model.safetensors")
    name = "model.layers.5.mlp.up_proj.weight"
    save_file({**weights, name: weights[name][:8].clone()}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"model.init: target found, but its mlp.up_proj.weight has shape \(8, 48\)"):
        start_from_target(drafter, str(tmp_path), torch.randn(10, 3 * 48))
