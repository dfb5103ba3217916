"""Our folders in transformers and compressed-tensors, theirs in ours: the same weights."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

import tiny
from quasar.checkpoints import open_checkpoint
from quasar.errors import CheckpointError
from quasar.kernels.base import DenseWeight, Int8Weight
from quasar.kernels.reference import rms_norm
from quasar.models.families import parse_config
from quasar.models.layer import FloatLinear, Layer, embedded
from quasar.models.tensors import (
    EMBEDDING,
    GROUPS,
    LINEARS,
    final_norm,
    head_rows,
    read_linears,
    read_norms,
)
from quasar.quantization.pipeline import QuantizeOptions, quantize
from quasar.quantization.simulation import Int8Linear
from quasar.quantization.weights import dequantize

transformers = pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")

from compressed_tensors.compressors import ModelCompressor  # noqa: E402
from compressed_tensors.compressors.base import BaseCompressor  # noqa: E402
from compressed_tensors.quantization import (  # noqa: E402
    QuantizationConfig,
    apply_quantization_config,
    preset_name_to_scheme,
)
from compressed_tensors.quantization.utils import calculate_qparams  # noqa: E402

GROUPABLE = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
"""Sizes of whole groups of 32."""
MODULES = [f"model.layers.{i}.{name}" for i in range(2) for name in LINEARS]

TOKENS = torch.randint(0, 256, (60,), generator=torch.Generator().manual_seed(6))


def folder_logits(folder, linear):
    """The logits of a quantised folder; `linear` makes a product of an Int8Weight."""
    checkpoint = open_checkpoint(folder)
    config = parse_config(checkpoint.config)
    hidden = embedded(checkpoint.tensor(EMBEDDING), TOKENS, config)
    for index in range(config.layers):
        norms = read_norms(checkpoint, config, index)
        linears = read_linears(checkpoint, config, index)
        products = {name: linear(weight) for name, weight in linears.items()}
        hidden = Layer(config, index, norms, products)(hidden)
    normed = rms_norm(hidden, final_norm(checkpoint, config), config.rms_norm_eps)
    return normed @ head_rows(checkpoint, config).float().t()


@pytest.fixture(params=[(family, tied) for family in tiny.IN_TRANSFORMERS for tied in (0, 1)])
def folder(request, write_model, tmp_path):
    family, tied = request.param
    source = open_checkpoint(write_model(family, tie_word_embeddings=bool(tied)))
    quantize(source, tmp_path / "out")
    return tmp_path / "out"


def load(folder, **options):
    model, notes = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True, **options
    )
    assert not notes["missing_keys"] and not notes["unexpected_keys"]
    return model


def test_transformers_runs_the_folder(folder):
    """Weights INT8, inputs fake-quantised by its own rule: two independent roundings apart."""
    with torch.inference_mode():
        found = load(folder)(TOKENS[None]).logits[0]
    expected = folder_logits(folder, lambda weight: Int8Linear(weight))
    assert (found - expected).std() < 0.2 * expected.std()
    assert (found.argmax(-1) == expected.argmax(-1)).float().mean() > 0.85


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
def test_transformers_reads_the_same_weights(folder):
    """Without quantised inputs both compute the same function in fp32."""
    dense = transformers.CompressedTensorsConfig(dequantize=True)
    with torch.inference_mode():
        found = load(folder, quantization_config=dense)(TOKENS[None]).logits[0]
    expected = folder_logits(folder, lambda w: FloatLinear(dequantize(w), w.bias))
    assert (found - expected).abs().max() <= 1e-3 * expected.abs().max()


def decompressed(folder, module, dtype, group="group_0"):
    """A weight as the library makes it from the folder's files, in the type of its scales."""
    content = json.loads((folder / "config.json").read_text())["quantization_config"]
    scheme = QuantizationConfig.model_validate(
        {k: v for k, v in content.items() if not k.startswith(("version", "sparsity", "transform"))}
    ).config_groups[group]
    parts = {
        name.removeprefix(f"{module}."): tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
        if name.startswith(f"{module}.")
    }
    parts["weight_scale"] = parts["weight_scale"].to(dtype)
    compressor = BaseCompressor.get_value_from_registry(scheme.format or content["format"])
    return compressor.decompress(parts, scheme)["weight"]


@pytest.mark.parametrize("group_size", [32, 64])
def test_the_library_decompresses_w4a8_to_our_weights(write_model, tmp_path, group_size):
    """Exactly with scales in fp32; in BF16 it rounds each weight once, as we would."""
    sizes = GROUPABLE | {"intermediate_size": 128}
    source = open_checkpoint(write_model("llama", **sizes))
    out = tmp_path / "out"
    quantize(source, out, QuantizeOptions(scheme="w4a8", group_size=group_size, hadamard=False))
    checkpoint = open_checkpoint(out)
    assert checkpoint.precision == "w4a8"
    for module in MODULES:
        weight = checkpoint.linear(module)
        assert weight.group_size == group_size and len(weight.zero.unique()) > 1
        expected = dequantize(weight)
        assert torch.equal(decompressed(out, module, torch.float32), expected)
        assert torch.equal(decompressed(out, module, torch.bfloat16), expected.bfloat16())


def test_the_library_sees_which_linears_have_8_bits(write_model, tmp_path):
    """It applies the scheme of the named group to them, and decompresses both kinds to ours."""
    source, out = open_checkpoint(write_model("llama", **GROUPABLE)), tmp_path / "out"
    quantize(source, out, QuantizeOptions(scheme="w4a8", int8=("qkv", "down"), hadamard=False))
    content = json.loads((out / "config.json").read_text())
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig.from_dict(
            {k: v for k, v in content.items() if k != "quantization_config"}
        )
    )
    apply_quantization_config(
        model, QuantizationConfig.model_validate(content["quantization_config"])
    )
    checkpoint = open_checkpoint(out)
    for module in MODULES:
        weight = checkpoint.linear(module)
        wider = module.endswith(("q_proj", "k_proj", "v_proj", "down_proj"))
        assert isinstance(weight, Int8Weight) == wider
        assert model.get_submodule(module).quantization_scheme.weights.num_bits == 4 + 4 * wider
        found = decompressed(out, module, torch.float32, f"group_{int(wider)}")
        assert torch.equal(found, dequantize(weight))


@pytest.mark.parametrize("int8", [(), ("qkv", "gate_up")])
@pytest.mark.parametrize("family", sorted(tiny.CONFIGS))
def test_a_w4a8_folder_predicts_like_its_report(write_model, tmp_path, family, int8):
    """What is read back is what was measured: fused linears, biases, norms and all."""
    sizes = GROUPABLE
    if family == "phi3":  # its heads are hidden_size / heads wide, for which it has divisors
        sizes = {"hidden_size": 96, "intermediate_size": 96, "num_attention_heads": 8}
    source = open_checkpoint(write_model(family, **sizes))
    options = QuantizeOptions(scheme="w4a8", int8=int8, hadamard=False)
    quantize(source, tmp_path / "out", options)
    checkpoint = open_checkpoint(tmp_path / "out")
    assert parse_config(checkpoint.config) == parse_config(source.config)
    for name, weight in read_linears(checkpoint, parse_config(checkpoint.config), 1).items():
        assert isinstance(weight, Int8Weight) == any(name in GROUPS[group] for group in int8)
    found = folder_logits(tmp_path / "out", lambda w: FloatLinear(dequantize(w), w.bias))
    expected = folder_logits(source.path, lambda w: FloatLinear(w.weight.float(), w.bias))
    assert (found - expected).std() < 0.75 * expected.std()


def library_folder(write_model, folder, preset, group_size=None, strategy=None):
    """As llm-compressor makes them: the library's presets, scales of the covering range."""
    source = write_model("llama", **GROUPABLE)
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    scheme = preset_name_to_scheme(preset, ["Linear"])
    if group_size:
        scheme.weights.group_size = group_size
    if strategy:
        scheme.weights.strategy, scheme.weights.group_size = strategy, None
    config = QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"])
    apply_quantization_config(model, config)
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            grouped = module.weight.detach().view(*module.weight_scale.shape, -1)
            scale, zero = calculate_qparams(grouped.amin(-1), grouped.amax(-1), scheme.weights)
            module.weight_scale.data.copy_(scale)
            if not scheme.weights.symmetric:
                module.weight_zero_point.data.copy_(zero)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((source / name).read_bytes())
    return folder


def test_w8a8_of_the_library(write_model, tmp_path):
    folder = library_folder(write_model, tmp_path / "theirs", "W8A8")
    checkpoint = open_checkpoint(folder)
    assert checkpoint.precision == "w8a8"
    for module in MODULES:
        found = dequantize(checkpoint.linear(module))
        assert torch.equal(found, decompressed(folder, module, torch.float32))


@pytest.mark.parametrize(
    ("preset", "options"),
    [
        ("W4A16", {"group_size": 32}),
        ("W4A16_ASYM", {"group_size": 32}),
        ("W4A16", {"strategy": "channel"}),
    ],
)
def test_w4a16_of_the_library_is_a_bf16_target(write_model, tmp_path, preset, options):
    """Dequantised in fp32, rounded once; it can be quantised like any other model."""
    folder = library_folder(write_model, tmp_path / "theirs", preset, **options)
    checkpoint = open_checkpoint(folder)
    assert (checkpoint.precision, checkpoint.scheme.name) == ("bf16", "w4a16")
    for module in MODULES:
        weight = checkpoint.linear(module)
        assert isinstance(weight, DenseWeight)
        expected = decompressed(folder, module, torch.float32).bfloat16()
        assert torch.equal(weight.weight, expected)
    quantize(checkpoint, tmp_path / "out")
    assert open_checkpoint(tmp_path / "out").precision == "w8a8"


def test_w4a8_of_the_library_is_refused_by_name(write_model, tmp_path):
    """Codes a byte each; packed, its scales would have more bits than our form holds."""
    folder = library_folder(write_model, tmp_path / "theirs", "W4A8", group_size=32)
    with pytest.raises(CheckpointError, match="num_bits 4 is not supported, only 8"):
        open_checkpoint(folder)
