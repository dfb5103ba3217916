"""Folders whose verifier rotates the inputs of down_proj: same weights, closer to the target."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from quasar.cache import KVCache
from quasar.checkpoints import open_checkpoint
from quasar.errors import CheckpointError, UsageError
from quasar.kernels.base import RaggedBatch
from quasar.kernels.reference import ReferenceBackend
from quasar.models.families import parse_config
from quasar.models.layer import logits
from quasar.quantization import recipe
from quasar.quantization.pipeline import QuantizeOptions, quantize
from quasar.quantization.smooth import Smoothing, smoothquant
from quasar.verification.verifier import load_verifier

MARK = {"rotated_inputs": {"mlp.down_proj": 64}}
SIZES = {"intermediate_size": 64}


@pytest.fixture(autouse=True)
def short_texts(monkeypatch):
    monkeypatch.setattr("quasar.quantization.calibrate.CALIBRATION_TOKENS", 800)
    monkeypatch.setattr("quasar.quantization.calibrate.MOMENT_TOKENS", 1600)
    monkeypatch.setattr("quasar.quantization.calibrate.HELD_OUT_TOKENS", 200)


@pytest.fixture
def write_outliers(write_model):
    """A model with an outlier in the input of down, which its output does not need."""

    def write(**sizes):
        return with_outlier(write_model("llama", **sizes))

    return write


def with_outlier(source):
    tensors = load_file(source / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("layernorm.weight"):
            tensor[3:5] /= 40  # only those of `down`
        if name.endswith("up_proj.weight"):
            tensor[5] *= 30
        if name.endswith("down_proj.weight"):
            tensor[:, 5] /= 30
    save_file(tensors, source / "model.safetensors")
    return source


@pytest.fixture
def folders(write_outliers, tmp_path):
    """One such model, quantised for either."""
    source, made = write_outliers(**SIZES), {}
    for hadamard in (True, False):
        made[hadamard] = tmp_path / f"out-{hadamard}"
        options = QuantizeOptions(smooth="none", hadamard=hadamard)
        quantize(open_checkpoint(source), made[hadamard], options)
    return source, made


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


def verified(folder, precision="w8a8") -> torch.Tensor:
    """Logits [40, vocabulary] of some tokens."""
    verifier = load_verifier(open_checkpoint(folder), precision, "bf16", ReferenceBackend())
    tokens = [3 * i % 200 for i in range(40)]
    cache: KVCache = verifier.new_cache(64)
    batch = RaggedBatch.chunk(tokens, 0, cache.open(64))
    return verifier.verify(batch, cache).logits.tensor[:40].clone()


def test_the_stored_weights_are_the_same(folders):
    _, made = folders
    on, off = (load_file(made[flag] / "model.safetensors") for flag in (True, False))
    assert on.keys() == off.keys()
    assert all(torch.equal(on[name], off[name]) for name in on)
    assert config_of(made[True])["quasar"] == MARK and "quasar" not in config_of(made[False])
    report = json.loads((made[True] / "quantization_report.json").read_text())
    blocks = {entry["name"].split(".", 3)[3]: entry["rotation"] for entry in report["linears"]}
    assert blocks.pop("mlp.down_proj") == 64 and set(blocks.values()) == {0}


def test_a_verifier_that_rotates_is_closer_to_the_target(folders):
    source, made = folders
    checkpoint = open_checkpoint(source)
    tokens = torch.tensor([3 * i % 200 for i in range(40)])
    expected = logits(checkpoint, parse_config(checkpoint.config), tokens)
    on, off = ((verified(made[flag]) - expected).norm() for flag in (True, False))
    assert on < 0.7 * off


def test_the_report_measures_what_the_verifier_computes(folders):
    """The error of `down` on the card falls as the rotation spreads its outlier."""
    _, made = folders
    found = {}
    for flag, folder in made.items():
        report = json.loads((folder / "quantization_report.json").read_text())
        entries = [e for e in report["linears"] if e["name"].endswith("down_proj")]
        found[flag] = max(entry["relative_error"] for entry in entries)
        assert all(entry["relative_error_rtn"] > 0 for entry in entries)
    assert found[True] < 0.8 * found[False]


def test_search_rotates_by_default(write_model, tmp_path):
    for scheme, smooth, expected in (
        ("w8a8", "search", True),
        ("w8a8", "smoothquant", False),
        ("w8a8", "none", False),
        ("w4a8", "search", True),
    ):
        source = write_model("llama", intermediate_size=64, hidden_size=64, head_dim=16)
        config = QuantizeOptions(scheme, smooth).recipe(_config(source))
        assert bool(config.rotation) == expected, (scheme, smooth)


def _config(folder):
    return parse_config(open_checkpoint(folder).config)


def test_what_cannot_be_rotated_is_refused(write_model):
    odd = _config(write_model("llama", intermediate_size=40))
    with pytest.raises(UsageError, match=r"--hadamard on: no power of two.* the 40 inputs"):
        QuantizeOptions(hadamard=True).recipe(odd)
    assert QuantizeOptions().recipe(odd).rotation == 0


@pytest.mark.parametrize(
    ("extension", "named"),
    [
        (None, "quasar None: only 'rotated_inputs'"),
        ([], r"quasar \[\]: only 'rotated_inputs'"),
        ({"other": 1}, "only 'rotated_inputs' is known"),
        (MARK | {"other": 1}, "only 'rotated_inputs' is known"),
        ({"rotated_inputs": 64}, "rotated_inputs 64: only 'mlp.down_proj'"),
        ({"rotated_inputs": {"mlp.up_proj": 64}}, "only 'mlp.down_proj' can be rotated"),
        ({"rotated_inputs": {"mlp.down_proj": 48}}, "down_proj 48 is no power of two"),
        ({"rotated_inputs": {"mlp.down_proj": "64"}}, "down_proj '64' is no power of two"),
        ({"rotated_inputs": {"mlp.down_proj": 64.0}}, "down_proj 64.0 is no power of two"),
        ({"rotated_inputs": {"mlp.down_proj": True}}, "down_proj True is no power of two"),
        ({"rotated_inputs": {"mlp.down_proj": 8192}}, "down_proj 8192 is no power of two"),
        ({"rotated_inputs": {"mlp.down_proj": 128}}, "blocks of 128 inputs .* the 64 inputs"),
    ],
)
def test_a_malformed_mark_is_refused(folders, extension, named):
    folder = folders[1][True]
    config = config_of(folder) | {"quasar": extension}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=named) as error:
        verified(folder)
    assert str(folder / "config.json") in str(error.value)


def test_w4a8_weights_are_stored_rotated(write_outliers, tmp_path):
    """A verifier rotates the inputs alone: both folders compute nearly the target."""
    source = write_outliers(intermediate_size=64, hidden_size=64, head_dim=16)
    tokens = torch.tensor([3 * i % 200 for i in range(40)])
    expected, stored = logits(open_checkpoint(source), _config(source), tokens), {}
    for flag in (True, False):
        out = tmp_path / f"out-{flag}"
        options = QuantizeOptions("w4a8", hadamard=flag)
        quantize(open_checkpoint(source), out, options)
        assert ("quasar" in config_of(out)) == flag
        stored[flag] = load_file(out / "model.safetensors")
        found = verified(out, precision="w4a8")
        assert (found - expected).norm() < 0.5 * expected.norm()
    name = "model.layers.0.mlp.down_proj.weight_packed"
    assert not torch.equal(stored[True][name], stored[False][name])


@pytest.mark.parametrize("scheme", ["w8a8", "w4a8"])
def test_the_mark_of_a_source_is_not_handed_on(write_model, tmp_path, scheme):
    """Such as of one of our folders that another tool dequantised."""
    source = write_model("llama", **SIZES, hidden_size=64, head_dim=16)
    (source / "config.json").write_text(json.dumps(config_of(source) | {"quasar": MARK}))
    quantize(open_checkpoint(source), tmp_path / "out", QuantizeOptions(scheme, smooth="none"))
    assert "quasar" not in config_of(tmp_path / "out")
    assert open_checkpoint(tmp_path / "out").down_rotation == 0


def harmful(tensors, absmax, config):
    """Makes outliers of what were none."""
    scales = smoothquant(tensors, absmax, config).scales
    return Smoothing({g: 1 / s.square() for g, s in scales.items()}, dict.fromkeys(scales, "bad"))


def test_a_recipe_that_is_not_kept_leaves_no_mark(write_model, tmp_path, monkeypatch):
    monkeypatch.setattr(recipe, "smoothquant", harmful)
    monkeypatch.setattr(recipe, "LARGEST_ERROR", {8: 1e9})
    source = open_checkpoint(write_model("llama", **SIZES))
    options = QuantizeOptions(smooth="smoothquant", hadamard=True)
    report = quantize(source, tmp_path / "out", options)
    assert not report.kept and {entry["rotation"] for entry in report.linears()} == {0}
    quantize(source, tmp_path / "plain", QuantizeOptions(smooth="none"))
    for name in ("model.safetensors", "config.json"):
        plain = (tmp_path / "plain" / name).read_bytes()
        assert (tmp_path / "out" / name).read_bytes() == plain


def test_a_layer_whose_down_stays_in_bf16(folders, tmp_path, monkeypatch):
    """The mark is for those that are INT8; the other layer is rotated all the same."""
    bad = iter((1.0, 0.0))

    def errors(tensors, layer, scales, inputs, config, workers):
        return dict.fromkeys(layer.linears, 0.0) | {"mlp.down_proj": next(bad)}

    monkeypatch.setattr(recipe, "relative_errors", errors)
    source, out = folders[0], tmp_path / "out"
    report = quantize(open_checkpoint(source), out, QuantizeOptions(smooth="none", hadamard=True))
    assert config_of(out)["quasar"] == MARK
    assert report.ignored() == ["model.layers.0.mlp.down_proj"]
    rotations = [e["rotation"] for e in report.linears() if e["name"].endswith("down_proj")]
    assert rotations == [0, 64]
    checkpoint = open_checkpoint(source)
    tokens = torch.tensor([3 * i % 200 for i in range(40)])
    expected = logits(checkpoint, parse_config(checkpoint.config), tokens)
    mixed = (verified(out) - expected).norm()
    config = {key: value for key, value in config_of(out).items() if key != "quasar"}
    (out / "config.json").write_text(json.dumps(config))
    assert 0 < mixed != (verified(out) - expected).norm()
    assert mixed < 0.2 * expected.norm()


def test_16_bit_inputs_are_not_rotated(write_model, tmp_path):
    source = write_model("llama", intermediate_size=64, hidden_size=64, head_dim=16)
    quantize(open_checkpoint(source), tmp_path / "out", QuantizeOptions(scheme="w4a8"))
    config = config_of(tmp_path / "out") | {"quasar": MARK}
    config["quantization_config"]["config_groups"]["group_0"]["input_activations"] = None
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="W4A16 has no integer inputs"):
        open_checkpoint(tmp_path / "out")


def test_an_int8_down_in_a_w4a8_folder_is_rotated_when_it_is_loaded(write_outliers, tmp_path):
    """It is stored plain, as in W8A8 folders."""
    source = write_outliers(hidden_size=64, intermediate_size=64, head_dim=16)
    errors, distances = {}, {}
    checkpoint = open_checkpoint(source)
    tokens = torch.tensor([3 * i % 200 for i in range(40)])
    expected = logits(checkpoint, parse_config(checkpoint.config), tokens)
    for flag in (True, False):
        out = tmp_path / str(flag)
        options = QuantizeOptions("w4a8", "none", "rtn", hadamard=flag, int8=("down", "qkv"))
        entries = quantize(open_checkpoint(source), out, options).linears()
        errors[flag] = max(e["relative_error"] for e in entries if "down_proj" in e["name"])
        distances[flag] = (verified(out, "w4a8") - expected).norm()
    stored = [
        open_checkpoint(tmp_path / str(flag)).tensor("model.layers.0.mlp.down_proj.weight")
        for flag in (True, False)
    ]
    assert torch.equal(*stored)
    assert errors[True] < 0.8 * errors[False]
    assert distances[True] < distances[False]
