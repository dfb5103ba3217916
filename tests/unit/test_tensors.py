"""What a checkpoint stores and what the decoder sees are the same, there and back, bit for bit."""

from __future__ import annotations

import pytest
import torch

import tiny
from quasar.checkpoints import open_checkpoint
from quasar.kernels.base import DenseWeight, Int8Weight
from quasar.models.families import families, parse_config
from quasar.models.tensors import (
    LINEARS,
    layer_prefix,
    norm_shapes,
    read_linears,
    read_norms,
    storable_norm,
    stored_linears,
    stored_norms,
    stored_shapes,
)

FAMILIES = sorted(tiny.CONFIGS)


def test_every_family_has_a_tiny_model():
    assert set(tiny.CONFIGS) == set(families())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("write", [tiny.write_folder, tiny.write_quantized])
def test_stored_tensors_come_back(tmp_path, family, write):
    checkpoint = open_checkpoint(write(tmp_path / "model", family))
    config = parse_config(checkpoint.config)
    norms, linears = read_norms(checkpoint, config, 1), read_linears(checkpoint, config, 1)
    assert (set(norms), tuple(linears)) == (set(norm_shapes(config)), LINEARS)
    stored = dict(stored_norms(norms, config))
    for module, weight in stored_linears(linears, config).items():
        dense = isinstance(weight, DenseWeight)
        assert isinstance(weight, DenseWeight if write is tiny.write_folder else Int8Weight)
        stored[f"{module}.weight"] = weight.weight if dense else weight.codes
        if not dense:
            assert torch.equal(weight.scale, checkpoint.linear(f"{layer_prefix(1)}{module}").scale)
        if weight.bias is not None:
            stored[f"{module}.bias"] = weight.bias.bfloat16()
    assert set(stored) == set(stored_shapes(config))
    for name, tensor in stored.items():
        assert torch.equal(tensor, checkpoint.tensor(layer_prefix(1) + name)), name


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_storable_norm_is_what_a_file_gives_back(family):
    config = parse_config(tiny.CONFIGS[family])
    exponents = torch.linspace(-30, 30, 4001)
    weight = torch.cat((exponents.exp2(), -exponents.exp2(), 1 + exponents.exp2() / 2**30))
    kept = storable_norm(weight, config)
    stored = stored_norms({"input_layernorm.weight": kept}, config)["input_layernorm.weight"]
    assert torch.equal(stored.float() + config.norm_offset, kept)
    step = (weight - config.norm_offset).abs() * 2.0**-8 + 2.0**-24 * config.norm_offset
    assert ((kept - weight).abs() <= step).all()
