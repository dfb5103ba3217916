"""Rotated models: the same function, folders like any other, and only where they are better."""

from __future__ import annotations

import json
import logging
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny
from byte_tokenizer import VOCABULARY
from quasar.checkpoints import open_checkpoint
from quasar.checkpoints.writer import CheckpointWriter
from quasar.errors import UsageError
from quasar.kernels.base import RaggedBatch
from quasar.kernels.reference import ReferenceBackend
from quasar.models.families import parse_config
from quasar.models.layer import logits
from quasar.models.tensors import check_model
from quasar.quantization import recipe, saving
from quasar.quantization.estimate import estimate
from quasar.quantization.hadamard import block_of, rotate_with_matrix
from quasar.quantization.orthogonal import Rotation, paley
from quasar.quantization.pipeline import QuantizeOptions, quantize
from quasar.quantization.rotation import RotatedCheckpoint
from quasar.quantization.smooth import Smoothing, smoothquant
from quasar.verification.verifier import load_verifier

ROTATABLE = sorted(set(tiny.CONFIGS) - {"gemma3_text"})
ROTATE = QuantizeOptions(rotate=True)


@pytest.fixture(autouse=True)
def short_texts(monkeypatch):
    monkeypatch.setattr("quasar.quantization.calibrate.CALIBRATION_TOKENS", 800)
    monkeypatch.setattr("quasar.quantization.calibrate.MOMENT_TOKENS", 1600)
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


@pytest.mark.parametrize("size", [64, 576, 896, 4096])
def test_a_hadamard_matrix_behind_it_does_not_undo_it(size):
    """As an INT8 head has it: what stood in one channel stays spread over all."""
    rows = torch.zeros(8, size)
    rows[torch.arange(8), torch.arange(8) * (size // 8)] = 1
    spread = Rotation.of(size, 0)(rows)
    rotate_with_matrix(spread, block_of(size))
    assert spread.abs().max() < 5 * size**-0.5


@pytest.mark.parametrize("order", range(1, 61))
def test_paleys_matrices(order):
    """All orders of the two constructions over primes."""
    known = {4, 8, 12, 20, 24, 28, 32, 36, 44, 48, 60}
    matrix = paley(order)
    assert (matrix is not None) == (order in known)
    if matrix is not None:
        assert (matrix.abs() == 1).all()
        assert torch.equal(matrix @ matrix.t(), order * torch.eye(order).double())


def outliers(folder, gain=1.0, flat=False):
    """The folder, with gains and biases that matter and a stream that needs rotating.

    gain: of the final norm, and so of the logits; flat: without outliers in the layers' norms.
    """
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name == "model.embed_tokens.weight":
            tensor[:, 5] *= 30
        if name == "model.norm.weight":
            tensor[::3] *= 3
            tensor *= gain
        if flat and name.endswith("layernorm.weight"):
            tensor[3:5] /= 40
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


PLAIN = QuantizeOptions(smooth="none", rotate=True)
"""A rotation is all that the recipe has against outliers."""


def on_the_grid(folder):
    """Linears that INT8 represents exactly, and nothing to be spread: rotating only loses."""
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    for name, tensor in tensors.items():
        if "_proj.weight" in name:
            codes = torch.randint(-127, 128, tensor.shape, generator=generator).float()
            codes[:, 0] = 127.0
            tensor.copy_(codes / 64 * tensor.shape[1] ** -0.5)
        elif name.endswith("norm.weight"):
            tensor.fill_(1.0)
    save_file(tensors, folder / "model.safetensors")
    return folder


def contents(folder):
    """Every file's bytes; of the report what does not depend on the machine's day."""
    found = {path.name: path.read_bytes() for path in folder.iterdir()}
    report = json.loads(found.pop("quantization_report.json"))
    del report["summary"]["seconds"], report["summary"]["peak_rss_bytes"]
    return found, report


@pytest.mark.parametrize("scheme", ["w8a8", "w4a8"])
@pytest.mark.parametrize("family", ["qwen2", "phi3"])
def test_a_rotated_folder_is_an_ordinary_model(write_model, tmp_path, family, scheme):
    """Tied before, with a head of its own after; a verifier predicts what the source does."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    changes = {"tie_word_embeddings": True, **(sizes if scheme == "w4a8" else {})}
    if family == "phi3" and scheme == "w4a8":
        changes["partial_rotary_factor"] = 6 / 16
    # Logits of a few units and models that rotating helps: KL halves on any text. Where one token
    # has all the probability, KL is that token's luck.
    flat = family == "phi3" and scheme == "w4a8"
    source = open_checkpoint(outliers(write_model(family, **changes), 1 / 32, flat))
    options = replace(PLAIN, scheme=scheme, weights="rtn")
    report = quantize(source, tmp_path / "out", options)
    assert report.kept and report.rotated
    written = open_checkpoint(tmp_path / "out")
    assert written.config["tie_word_embeddings"] is False
    assert written.shape("lm_head.weight") == source.shape("model.embed_tokens.weight")
    config = parse_config(written.config)
    assert config == replace(parse_config(source.config), tied_embeddings=False)
    check_model(written, config)
    verifier = load_verifier(written, scheme, "bf16", ReferenceBackend())
    tokens = torch.arange(3, 40)
    expected = logits(source, parse_config(source.config), tokens)
    cache = verifier.new_cache(len(tokens))
    batch = RaggedBatch.chunk(tokens.tolist(), 0, cache.open(len(tokens)))
    found = verifier.verify(batch, cache).logits.tensor[: len(tokens)]
    share = (found - expected).norm() / expected.norm()
    assert share < (0.25 if scheme == "w8a8" else 0.5)


@pytest.mark.parametrize("tied", [False, True])
def test_the_better_form_is_kept(write_model, tmp_path, caplog, tied):
    """Both ways round, and its bytes are those of the form alone."""
    source = outliers(write_model(tie_word_embeddings=tied))
    with caplog.at_level(logging.WARNING, logger="quasar"):
        report = quantize(open_checkpoint(source), tmp_path / "out", PLAIN)
    assert "--rotate" not in caplog.text
    content = json.loads((tmp_path / "out" / "quantization_report.json").read_text())
    rotation, summary = content["rotation"], content["summary"]
    assert rotation["rotated"]["kl"] < 0.8 * rotation["unrotated"]["kl"]
    assert summary["rotate"] is True and content["requested"]["rotate"] is True
    assert summary["kl"] == content["requested"]["kl"] == rotation["rotated"]["kl"]
    assert summary["kl_rtn"] == rotation["unrotated"]["kl"]
    assert report.rotated
    errors = [(e["relative_error"], e["relative_error_rtn"]) for e in content["linears"]]
    assert sum(a for a, _ in errors) < sum(b for _, b in errors)

    exact = on_the_grid(write_model(tie_word_embeddings=tied))
    with caplog.at_level(logging.WARNING, logger="quasar"):
        report = quantize(open_checkpoint(exact), tmp_path / "second", PLAIN)
    assert "--rotate: KL" in caplog.text and "is no better than" in caplog.text
    quantize(open_checkpoint(exact), tmp_path / "without", replace(PLAIN, rotate=False))
    (files, content), (expected, without) = (
        contents(tmp_path / "second"),
        contents(tmp_path / "without"),
    )
    assert files == expected
    rotation = content.pop("rotation")
    assert rotation["rotated"]["kl"] > rotation["unrotated"]["kl"] == content["summary"]["kl"]
    assert without.pop("rotation") is None
    assert content["requested"].pop("rotate") and not without["requested"].pop("rotate")
    assert content == without and content["summary"]["rotate"] is False
    assert not report.rotated


def worse(tensors, absmax, config):
    """Smoothing that makes outliers of what were none."""
    scales = smoothquant(tensors, absmax, config).scales
    return Smoothing({g: 1 / s.square() for g, s in scales.items()}, dict.fromkeys(scales, "bad"))


class Interrupt(BaseException):
    pass


def stop_at(stage, done):
    def progress(name, step, total):
        if (name, step) == (stage, done):
            raise Interrupt

    return progress


STOPS = [
    ("layers", 1),
    ("measuring", VOCABULARY),
    ("rotated layers", 0),
    ("rotated layers", 1),
    ("rotated layers", 2),
    ("rotated measuring", VOCABULARY),
]


@pytest.mark.parametrize("prepare", [outliers, on_the_grid])
@pytest.mark.parametrize("stop", [*STOPS, None])
def test_an_interrupted_run_goes_on(write_model, tmp_path, monkeypatch, prepare, stop):
    """In either form, and (None) between the choice and the end; no finished form is made twice."""
    monkeypatch.setattr(saving, "SHARE", 1e9)
    options = replace(PLAIN, shard_bytes=30_000)
    source = open_checkpoint(prepare(write_model()))
    quantize(source, tmp_path / "whole", options)
    with monkeypatch.context() as patch, pytest.raises(Interrupt):
        if stop is None:
            patch.setattr(CheckpointWriter, "commit", lambda writer: stop_at("", 0)("", 0, 0))
        quantize(source, tmp_path / "out", options, stop_at(*stop) if stop else None)
    assert not (tmp_path / "out").exists()
    steps = []
    quantize(source, tmp_path / "out", options, lambda *step: steps.append(step))
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert not (tmp_path / ".out.partial").exists()
    done = {name: [step for other, step, _ in steps if other == name] for name, _ in STOPS}
    assert bool(done["layers"]) == (stop in STOPS[:2])
    assert bool(done["rotated layers"]) == (stop is not None)
    if stop is not None and "layers" in stop[0]:
        assert done[stop[0]] == list(range(stop[1], 3))


@pytest.mark.parametrize("interrupted", [False, True])
def test_two_forms_worse_than_rounding(write_model, tmp_path, monkeypatch, caplog, interrupted):
    """Then the folder has plain rounding of the model as it was."""
    monkeypatch.setattr(recipe, "smoothquant", worse)
    monkeypatch.setattr(recipe, "LARGEST_ERROR", {8: 1e9})
    source = open_checkpoint(on_the_grid(write_model(tie_word_embeddings=True)))
    options = QuantizeOptions(smooth="smoothquant", rotate=True)
    if interrupted:
        with pytest.raises(Interrupt):
            quantize(source, tmp_path / "out", options, stop_at("round-to-nearest", 1))
    report = quantize(source, tmp_path / "out", options)
    assert "worse than round-to-nearest" in caplog.text
    assert not report.kept and not report.rotated and report.rotation is not None
    assert report.summary()["kl"] == report.summary()["kl_rtn"]
    quantize(source, tmp_path / "plain", QuantizeOptions(smooth="none"))
    for name in ("model.safetensors", "config.json"):
        plain = (tmp_path / "plain" / name).read_bytes()
        assert (tmp_path / "out" / name).read_bytes() == plain


def test_a_run_with_the_option_does_not_take_over_one_without(write_model, tmp_path, caplog):
    source = open_checkpoint(outliers(write_model()))
    with pytest.raises(Interrupt):
        options = replace(PLAIN, rotate=False)
        quantize(source, tmp_path / "out", options, stop_at("layers", 1))
    report = quantize(source, tmp_path / "out", PLAIN)
    assert "another model or other options" in caplog.text and report.rotated


def test_estimates_count_both_forms(write_model, tmp_path):
    source = open_checkpoint(outliers(write_model(tie_word_embeddings=True)))
    steps = []
    found = [
        estimate(source, tmp_path / "out", options, lambda *step: steps.append(step))
        for options in (replace(PLAIN, rotate=False), PLAIN)
    ]
    assert [step[1:] for step in steps] == [(i, 3) for i in range(4)] + [(i, 5) for i in range(6)]
    assert found[1].space_bytes > 2 * sum(found[1].shard_bytes)
    quantize(source, tmp_path / "out", PLAIN)
    written = [file.stat().st_size for file in (tmp_path / "out").glob("*.safetensors")]
    assert written == found[1].shard_bytes > found[0].shard_bytes
