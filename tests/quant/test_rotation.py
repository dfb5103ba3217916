"""Rotated models: the same function, folders like any other, and only where they are better."""

from __future__ import annotations

import json
import logging
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny
from quasar.checkpoints import open_checkpoint
from quasar.errors import UsageError
from quasar.models.families import parse_config
from quasar.models.layer import logits
from quasar.models.tensors import check_model
from quasar.quantization import saving
from quasar.quantization.orthogonal import Rotation, paley
from quasar.quantization.pipeline import QuantizeOptions, quantize
from quasar.quantization.rotation import RotatedCheckpoint

ROTATABLE = sorted(set(tiny.CONFIGS) - {"gemma3_text"})
ROTATE = QuantizeOptions(rotate=True)


@pytest.fixture(autouse=True)
def short_texts(monkeypatch):
    monkeypatch.setattr("quasar.quantization.calibrate.CALIBRATION_TOKENS", 800)
    monkeypatch.setattr("quasar.quantization.calibrate.HELD_OUT_TOKENS", 200)


@pytest.mark.parametrize("size", [1, 2, 7, 12, 45, 48, 64, 80, 576, 896, 1536])
def test_rotations_are_orthogonal(size):
    rotation = Rotation.of(size, 0)
    matrix = rotation(torch.eye(size)).double()
    assert (matrix @ matrix.t() - torch.eye(size).double()).abs().max() < 5e-6
    x = torch.randn(size, 5)
    torch.testing.assert_close(rotation.rows(x), matrix.t().float() @ x, atol=1e-5, rtol=0)
    assert size < 7 or not torch.equal(rotation.signs, Rotation.of(size, 1).signs)


@pytest.mark.parametrize("size", [12, 64, 80, 576, 896, 1536, 4096])
def test_a_channel_is_spread_evenly_where_hadamard_matrices_exist(size):
    one = torch.zeros(1, size)
    one[0, size // 3] = 1.0
    torch.testing.assert_close(Rotation.of(size, 0)(one).abs(), torch.full((1, size), size**-0.5))


@pytest.mark.parametrize("order", range(1, 61))
def test_paleys_matrices(order):
    """All orders of the two constructions over primes."""
    known = {4, 8, 12, 20, 24, 28, 32, 36, 44, 48, 60}
    matrix = paley(order)
    assert (matrix is not None) == (order in known)
    if matrix is not None:
        assert (matrix.abs() == 1).all()
        assert torch.equal(matrix @ matrix.t(), order * torch.eye(order).double())


def outliers(folder):
    """The folder, with gains and biases that matter and a stream that needs rotating."""
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name == "model.embed_tokens.weight":
            tensor[:, 5] *= 30
        if name == "model.norm.weight":
            tensor[::3] *= 3
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ROTATABLE)
@pytest.mark.parametrize("hidden", [48, 45])
def test_the_function_is_the_same(write_model, family, tied, hidden):
    source = open_checkpoint(
        outliers(write_model(family, tie_word_embeddings=tied, hidden_size=hidden))
    )
    config, tokens = parse_config(source.config), torch.arange(3, 60)
    rotated = RotatedCheckpoint(source, config, stored=torch.float32)
    changed = parse_config(rotated.config)
    assert changed == replace(config, tied_embeddings=False)
    check_model(rotated, changed)
    expected, found = logits(source, config, tokens), logits(rotated, changed, tokens)
    assert (found - expected).norm() < 1e-4 * expected.norm()
    module = "model.layers.0.mlp.down_proj"
    before, after = source.linear(module).weight.float(), rotated.linear(module).weight
    assert (after - before).norm() > 0.5 * before.norm()


@pytest.mark.parametrize("family", ["qwen2", "phi3", "PanguEmbedded"])
def test_what_is_read_is_what_a_file_holds(write_model, family):
    source = open_checkpoint(write_model(family))
    config = parse_config(source.config)
    rotated = RotatedCheckpoint(source, config)
    for name in rotated.names():
        tensor = rotated.tensor(name)
        assert tensor.dtype == torch.bfloat16 and tuple(tensor.shape) == rotated.shape(name)
        module, _, part = name.rpartition(".")
        if part == "bias":
            assert torch.equal(rotated.bias(module), tensor.float())
        elif "_proj" in name:
            linear = rotated.linear(module)
            assert linear.weight.dtype == torch.float32
            assert torch.equal(linear.weight.bfloat16(), tensor)
        elif name.endswith("norm.weight"):
            assert (tensor == 1).all()
    exact = RotatedCheckpoint(source, config, stored=torch.float32)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert torch.equal(exact.tensor(name).bfloat16(), rotated.tensor(name))


def test_norms_of_outputs_are_refused_before_any_work(write_model, tmp_path):
    source = open_checkpoint(write_model("gemma3_text"))
    with pytest.raises(UsageError, match="--rotate: gemma3 norms what its sublayers give"):
        quantize(source, tmp_path / "out", ROTATE, lambda *step: pytest.fail("work has begun"))
    assert [path.name for path in tmp_path.iterdir()] == ["gemma3_text-model"]


def report_of(folder):
    return json.loads((folder / "quantization_report.json").read_text())


def contents(folder):
    found = {path.name: path.read_bytes() for path in folder.iterdir()}
    report = json.loads(found.pop("quantization_report.json"))
    del report["summary"]["seconds"], report["summary"]["peak_rss_bytes"]
    return found, report
