"""Smoothing: the same function in fp32, exact where it must be, and safe for dead channels."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quasar.models.config import ModelConfig
from quasar.models.layer import Layer
from quasar.models.tensors import GROUPS, INPUT_NORM, POST_NORM, layer_shapes
from quasar.quantization.calibrate import LayerInputs
from quasar.quantization.smooth import (
    LIMIT,
    balance,
    fold,
    output_scales,
    smoothquant,
)


def make_config(qkv_bias: bool = True, kv_heads: int = 2) -> ModelConfig:
    return ModelConfig(
        family="llama",
        hidden_size=32,
        intermediate_size=56,
        layers=1,
        heads=4,
        kv_heads=kv_heads,
        head_dim=8,
        vocab_size=10,
        context_length=128,
        rms_norm_eps=1e-5,
        rope_theta=1e4,
        tied_embeddings=True,
        qkv_bias=qkv_bias,
    )


def make_tensors(config: ModelConfig) -> dict[str, torch.Tensor]:
    """One layer of BF16 values with outlier channels in the input of every group."""
    generator = torch.Generator().manual_seed(7)
    tensors = {}
    for name, shape in layer_shapes(config).items():
        values = torch.randn(*shape, generator=generator)
        tensors[name] = values / shape[1] ** 0.5 if len(shape) == 2 else values
    for norm in (INPUT_NORM, POST_NORM):
        tensors[norm][:3] *= 40
    tensors["self_attn.v_proj.weight"][1 :: config.head_dim] *= 40
    tensors["mlp.up_proj.weight"][5] *= 40
    return {name: tensor.bfloat16().float() for name, tensor in tensors.items()}


def observed(config, tensors):
    """A layer's outputs for one random sequence, and the maxima of its inputs."""
    hidden = torch.randn(30, config.hidden_size, generator=torch.Generator().manual_seed(8))
    inputs = LayerInputs(stride=1)
    return Layer(config, 0, tensors)(hidden, inputs), inputs.absmax


CONFIGS = [make_config(bias, kv) for bias in (False, True) for kv in (1, 2, 4)]


@pytest.mark.parametrize("config", CONFIGS)
def test_folding_preserves_the_function(config):
    tensors = make_tensors(config)
    expected, maxima = observed(config, tensors)
    folded, scales = fold(tensors, smoothquant(tensors, maxima, config).scales, config)
    found, _ = observed(config, folded)
    assert set(scales) == set(GROUPS)
    assert (found - expected).abs().max() <= 2e-5 * expected.abs().max()
    changed = [name for name in tensors if not torch.equal(tensors[name], folded[name])]
    assert set(changed) >= {f"{n}.weight" for names in GROUPS.values() for n in names}


@pytest.mark.parametrize("config", CONFIGS)
def test_value_scales_are_bit_neutral(config):
    """Powers of two: outputs equal bit for bit, v stays exact in BF16."""
    tensors = make_tensors(config)
    expected, maxima = observed(config, tensors)
    scales = {"o": smoothquant(tensors, maxima, config).scales["o"]}
    assert len(scales["o"].unique()) > 1
    mantissa, _ = torch.frexp(scales["o"])
    assert (mantissa == 0.5).all()
    folded, _ = fold(tensors, scales, config)
    found, _ = observed(config, folded)
    assert torch.equal(found, expected)
    for name in ("self_attn.v_proj.weight", "self_attn.o_proj.weight"):
        assert torch.equal(folded[name], folded[name].bfloat16().float())


def test_query_heads_share_the_scales_of_their_kv_head():
    config = make_config()
    tensors = make_tensors(config)
    _, maxima = observed(config, tensors)
    scales = smoothquant(tensors, maxima, config).scales
    heads = scales["o"].view(config.kv_heads, 2, config.head_dim)
    assert torch.equal(heads[:, 0], heads[:, 1])
    expected = heads[:, 0].flatten()
    assert torch.equal(output_scales(scales, config)["self_attn.v_proj"], expected)


@pytest.mark.parametrize("config", CONFIGS)
def test_inputs_become_what_the_scales_say(config):
    """Each group's input in the folded layer is the old one divided by the realised scale."""
    tensors = make_tensors(config)
    _, maxima = observed(config, tensors)
    folded, scales = fold(tensors, smoothquant(tensors, maxima, config).scales, config)
    _, smoothed = observed(config, folded)
    for group in GROUPS:
        expected = maxima[group] / scales[group]
        assert torch.allclose(smoothed[group], expected, rtol=1e-4, atol=1e-6), group
        assert smoothed[group].max() / smoothed[group].median() < (
            maxima[group].max() / maxima[group].median()
        )


def test_norms_are_exact_in_bf16():
    config = make_config()
    tensors = make_tensors(config)
    _, maxima = observed(config, tensors)
    folded, scales = fold(tensors, smoothquant(tensors, maxima, config).scales, config)
    for norm, group in ((INPUT_NORM, "qkv"), (POST_NORM, "gate_up")):
        assert torch.equal(folded[norm], folded[norm].bfloat16().float())
        assert torch.allclose(folded[norm] * scales[group], tensors[norm], rtol=1e-6)


def test_dead_channels_are_left_alone():
    config = make_config()
    tensors = make_tensors(config)
    tensors[INPUT_NORM][4] = 0.0
    tensors["mlp.down_proj.weight"][:, 9] = 0.0
    tensors["mlp.up_proj.weight"][11] = 0.0
    tensors["self_attn.v_proj.weight"][2] = 0.0
    tensors["self_attn.v_proj.bias"][2] = 0.0
    expected, maxima = observed(config, tensors)
    wanted = smoothquant(tensors, maxima, config).scales
    assert wanted["qkv"][4] == wanted["down"][9] == wanted["down"][11] == wanted["o"][2] == 1.0
    folded, _ = fold(tensors, wanted, config)
    found, _ = observed(config, folded)
    assert all(torch.isfinite(tensor).all() for tensor in folded.values())
    assert (found - expected).abs().max() <= 2e-5 * expected.abs().max()


def test_no_smoothing_changes_nothing():
    config = make_config()
    tensors = make_tensors(config)
    folded, scales = fold(tensors, {}, config)
    assert scales == {}
    assert all(torch.equal(folded[name], tensors[name]) for name in tensors)


sizes = st.lists(st.floats(0, 2.0**20, width=32), min_size=1, max_size=20)


@given(sizes, st.integers(0, 2**31))
def test_balance_is_finite_and_bounded(activation, seed):
    a = torch.tensor(activation)
    w = torch.rand(len(activation), generator=torch.Generator().manual_seed(seed))
    scale = balance(a, w)
    assert torch.isfinite(scale).all()
    assert (scale >= 1 / LIMIT).all() and (scale <= LIMIT).all()
    assert (scale[(a == 0) | (w == 0)] == 1).all()


def test_balance_is_smoothquant_up_to_a_common_factor():
    generator = torch.Generator().manual_seed(2)
    a, w = torch.rand(2, 50, generator=generator) + 0.01
    scale = balance(a, w)
    ratio = scale / (a / w).sqrt()
    assert torch.allclose(ratio, ratio[0].expand(50), rtol=1e-5)
    assert scale.log().mean().abs() < 1e-5
