"""Reading models: every format gives the same names, shapes and BF16 values."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tiny_files
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from safetensors.torch import save_file

from quasar.checkpoints import check_tensors, open_checkpoint
from quasar.errors import CheckpointError
from quasar.kernels.base import DenseWeight, Int8Weight
from quasar.models.families import parse_config


@pytest.fixture(params=["safetensors", "sharded", "gguf"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The same tiny model in each floating-point format."""
    if request.param == "gguf":
        return tiny_files.write_gguf(tmp_path / "tiny.gguf")
    write = tiny_files.write_sharded if request.param == "sharded" else tiny_files.write_folder
    return write(tmp_path / "tiny")


def test_every_format_gives_the_same_tensors(model: Path) -> None:
    checkpoint = open_checkpoint(model)
    check_tensors(checkpoint, tiny_files.shapes())
    for name, value in tiny_files.tensors().items():
        assert torch.equal(checkpoint.tensor(name), value), name
        assert checkpoint.tensor(name).dtype == torch.bfloat16


def test_every_format_gives_the_same_config(model: Path) -> None:
    assert parse_config(open_checkpoint(model).config) == parse_config(tiny_files.CONFIG)


def test_pages_come_back_after_release(model: Path) -> None:
    checkpoint = open_checkpoint(model)
    tensor = checkpoint.tensor("model.norm.weight")
    checkpoint.release()
    assert torch.equal(tensor, tiny_files.tensors()["model.norm.weight"])


def test_writing_to_a_tensor_leaves_the_file_alone(model: Path) -> None:
    before = open_checkpoint(model).fingerprint()
    open_checkpoint(model).tensor("model.norm.weight").fill_(7)
    assert open_checkpoint(model).fingerprint() == before


def test_fingerprint_follows_every_byte(tmp_path: Path) -> None:
    values = tiny_files.tensors()
    first = open_checkpoint(tiny_files.write_folder(tmp_path / "a", values)).fingerprint()
    values["lm_head.weight"][-1, -1] += 1
    assert open_checkpoint(tiny_files.write_folder(tmp_path / "b", values)).fingerprint() != first


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_other_floats_are_rounded_once(tmp_path: Path, dtype: torch.dtype) -> None:
    value = torch.randn(32, generator=torch.Generator().manual_seed(1)).to(dtype)
    values = tiny_files.tensors() | {"model.norm.weight": value}
    checkpoint = open_checkpoint(tiny_files.write_folder(tmp_path, values))
    assert torch.equal(checkpoint.tensor("model.norm.weight"), value.float().bfloat16())


def test_linear_converts_its_bias_to_fp32(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.q_proj"
    bias = torch.randn(32)
    values = tiny_files.tensors() | {f"{name}.bias": bias}
    checkpoint = open_checkpoint(tiny_files.write_folder(tmp_path, values))
    linear = checkpoint.linear(name)
    assert isinstance(linear, DenseWeight)
    assert linear.bias is not None and linear.bias.dtype == torch.float32
    assert torch.equal(linear.bias, bias.bfloat16().float())
    assert checkpoint.linear("lm_head").bias is None


def test_unaligned_tensors_are_read(tmp_path: Path) -> None:
    """The format does not align: an odd header length shifts every tensor."""
    folder = tiny_files.write_folder(tmp_path)
    path = folder / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    path.write_bytes(
        (length + 1).to_bytes(8, "little") + data[8 : 8 + length] + b" " + data[8 + length :]
    )
    checkpoint = open_checkpoint(folder)
    for name, value in tiny_files.tensors().items():
        assert torch.equal(checkpoint.tensor(name), value)


def test_rotary_frequencies_are_ignored(tmp_path: Path) -> None:
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    folder = tiny_files.write_folder(tmp_path, tiny_files.tensors() | extra)
    check_tensors(open_checkpoint(folder), tiny_files.shapes())


def test_tied_model_may_repeat_its_embedding(tmp_path: Path) -> None:
    values = tiny_files.tensors()
    values["lm_head.weight"] = values["model.embed_tokens.weight"].clone()
    config = tiny_files.CONFIG | {"tie_word_embeddings": True}
    checkpoint = open_checkpoint(tiny_files.write_folder(tmp_path / "same", values, config))
    assert "lm_head.weight" not in checkpoint.names()
    folder = tiny_files.write_folder(tmp_path / "other", tiny_files.tensors(), config)
    with pytest.raises(CheckpointError, match=r"tie_word_embeddings.*lm_head\.weight"):
        open_checkpoint(folder)


def test_gguf_head_equal_to_the_embedding_is_tied(tmp_path: Path) -> None:
    values = tiny_files.tensors()
    values["lm_head.weight"] = values["model.embed_tokens.weight"]
    checkpoint = open_checkpoint(tiny_files.write_gguf(tmp_path / "same.gguf", values))
    assert checkpoint.config["tie_word_embeddings"] is True
    assert "lm_head.weight" not in checkpoint.names()
    del values["lm_head.weight"]
    checkpoint = open_checkpoint(tiny_files.write_gguf(tmp_path / "absent.gguf", values))
    assert checkpoint.config["tie_word_embeddings"] is True


def _readable() -> list[GGMLQuantizationType]:
    """All types that the gguf package dequantises."""
    types = []
    for kind, (_, size) in GGML_QUANT_SIZES.items():
        try:
            gguf.dequantize(np.zeros((1, size), np.uint8), kind)
        except NotImplementedError:
            continue
        types.append(kind)
    return types


@pytest.mark.parametrize("kind", _readable(), ids=lambda kind: kind.name)
def test_gguf_types_equal_the_gguf_package(tmp_path: Path, kind: GGMLQuantizationType) -> None:
    """Random blocks; bytes below 0x3C make every half-precision scale in them finite."""
    block, size = GGML_QUANT_SIZES[kind]
    rows, columns = 6, max(block, 256)
    random = np.random.default_rng(0)
    data = random.integers(0, 0x3C, (rows, columns // block * size), dtype=np.uint8)
    writer = tiny_files.start_gguf(tmp_path / "types.gguf")
    writer.add_tensor("blk.0.ffn_up.weight", data, raw_dtype=kind)
    tiny_files.finish_gguf(writer)
    tensor = open_checkpoint(tmp_path / "types.gguf").tensor("model.layers.0.mlp.up_proj.weight")
    expected = torch.from_numpy(np.array(gguf.dequantize(data, kind))).bfloat16()
    assert tensor.shape == (rows, columns)
    assert torch.equal(tensor, expected)


def test_gguf_reads_bf16_and_many_chunks(tmp_path: Path) -> None:
    value = torch.randn(600, 1024, generator=torch.Generator().manual_seed(3))
    writer = tiny_files.start_gguf(tmp_path / "x.gguf")
    data = gguf.quantize(value.numpy(), GGMLQuantizationType.Q8_0)
    writer.add_tensor("blk.0.ffn_up.weight", data, raw_dtype=GGMLQuantizationType.Q8_0)
    half = gguf.quantize(value.numpy(), GGMLQuantizationType.BF16)
    writer.add_tensor("blk.0.ffn_gate.weight", half, raw_dtype=GGMLQuantizationType.BF16)
    tiny_files.finish_gguf(writer)
    checkpoint = open_checkpoint(tmp_path / "x.gguf")
    expected = torch.from_numpy(gguf.dequantize(data, GGMLQuantizationType.Q8_0)).bfloat16()
    assert torch.equal(checkpoint.tensor("model.layers.0.mlp.up_proj.weight"), expected)
    assert torch.equal(checkpoint.tensor("model.layers.0.mlp.gate_proj.weight"), value.bfloat16())


def test_only_llama_is_uninterleaved(tmp_path: Path) -> None:
    bias = torch.arange(32.0)
    writer = tiny_files.start_gguf(tmp_path / "qwen2.gguf", "qwen2")
    writer.add_tensor("blk.0.attn_q.bias", bias.numpy())
    tiny_files.finish_gguf(writer)
    checkpoint = open_checkpoint(tmp_path / "qwen2.gguf")
    assert torch.equal(checkpoint.tensor("model.layers.0.self_attn.q_proj.bias").float(), bias)
    writer = tiny_files.start_gguf(tmp_path / "llama.gguf")
    writer.add_tensor("blk.0.attn_q.bias", tiny_files.interleaved(bias, 4).numpy())
    tiny_files.finish_gguf(writer)
    checkpoint = open_checkpoint(tmp_path / "llama.gguf")
    assert torch.equal(checkpoint.tensor("model.layers.0.self_attn.q_proj.bias").float(), bias)
    assert checkpoint.config["attention_bias"] is True


def _frequencies(count: int, kind: type = np.float32) -> Callable[[gguf.GGUFWriter], None]:
    return lambda writer: writer.add_tensor("rope_freqs.weight", np.ones(count, kind))


def _yarn_too(writer: gguf.GGUFWriter) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_tensor("rope_freqs.weight", np.ones(4, np.float32))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.YARN), "yarn"),
        (lambda w: w.add_rope_scaling_factor(0.5), "rope_scaling.factor=0.5"),
        (lambda w: w.add_rope_scaling_attn_factors(2.0), "attn_factor"),
        (lambda w: w.add_rope_scaling_yarn_log_mul(0.1), "yarn_log_multiplier"),
        (_frequencies(3), "short_factor is not a list of 4"),
        (_frequencies(600), "rope_freqs.weight' has 600"),
        (_frequencies(4, np.float16), "rope_freqs.weight' is not a vector of F32"),
        (_yarn_too, "rope factors.*yarn"),
        (
            lambda w: w.add_tensor("rope_factors_long.weight", np.ones(4, np.float32)),
            "rope factors",
        ),
        (lambda w: w.add_sliding_window_pattern(6), "sliding_window_pattern"),
        (lambda w: w.add_expert_count(8), "mixture of experts"),
        (lambda w: w.add_logit_scale(0.5), "logit_scale"),
        (lambda w: w.add_key_length(16), "partial_rotary_factor"),
        (lambda w: w.add_value_length(16), "value_length"),
        (lambda w: w.add_tensor("blk.0.ffn_up.bias", np.ones(64, np.float32)), "mlp_bias"),
    ],
)
def test_gguf_metadata_that_change_the_mathematics_are_refused(
    tmp_path: Path, change: Callable[[gguf.GGUFWriter], Any], named: str
) -> None:
    writer = tiny_files.start_gguf(tmp_path / "x.gguf")
    tiny_files.add_tensors(writer, tiny_files.tensors())
    change(writer)
    tiny_files.finish_gguf(writer)
    with pytest.raises(CheckpointError, match=named):
        parse_config(open_checkpoint(tmp_path / "x.gguf").config)


def test_qwen2_gguf_with_a_window_is_refused(tmp_path: Path) -> None:
    writer = tiny_files.start_gguf(tmp_path / "x.gguf", "qwen2")
    writer.add_sliding_window(64)
    tiny_files.add_tensors(writer, tiny_files.tensors())
    tiny_files.finish_gguf(writer)
    with pytest.raises(CheckpointError, match="sliding_window"):
        parse_config(open_checkpoint(tmp_path / "x.gguf").config)


def test_unknown_gguf_architecture_is_named(tmp_path: Path) -> None:
    writer = tiny_files.start_gguf(tmp_path / "x.gguf", "mamba")
    writer.add_tensor("blk.0.ssm_a", np.ones(4, np.float32))
    tiny_files.finish_gguf(writer)
    with pytest.raises(CheckpointError, match=r"'mamba'.*supported: .*qwen2"):
        parse_config(open_checkpoint(tmp_path / "x.gguf").config)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compressed_linears(tmp_path: Path, dtype: torch.dtype) -> None:
    values = tiny_files.quantised(tiny_files.tensors(), dtype)
    values["model.layers.0.self_attn.q_proj.bias"] = torch.randn(32)
    checkpoint = open_checkpoint(tiny_files.write_compressed(tmp_path, values))
    assert checkpoint.format == "compressed-tensors"
    assert not any(name.endswith("_scale") for name in checkpoint.names())
    linear = checkpoint.linear("model.layers.0.self_attn.q_proj")
    assert isinstance(linear, Int8Weight)
    assert torch.equal(linear.codes, values["model.layers.0.self_attn.q_proj.weight"])
    scale = values["model.layers.0.self_attn.q_proj.weight_scale"].float().flatten()
    assert linear.scale.dtype == torch.float32 and torch.equal(linear.scale, scale)
    assert linear.bias is not None
    head = checkpoint.linear("lm_head")
    assert isinstance(head, DenseWeight)
    assert torch.equal(head.weight, values["lm_head.weight"])
    assert parse_config(checkpoint.config) == parse_config(tiny_files.CONFIG)


def test_ignored_modules_may_be_patterns(tmp_path: Path) -> None:
    values = tiny_files.quantised(tiny_files.tensors(), torch.float32)
    for layer in range(2):
        name = f"model.layers.{layer}.mlp.down_proj.weight"
        values[name] = tiny_files.tensors()[name]
        del values[f"{name}_scale"]
    quantization = tiny_files.QUANTIZATION | {"ignore": ["lm_head", "re:.*down_proj$"]}
    checkpoint = open_checkpoint(tiny_files.write_compressed(tmp_path, values, quantization))
    assert isinstance(checkpoint.linear("model.layers.1.mlp.down_proj"), DenseWeight)
    assert isinstance(checkpoint.linear("model.layers.1.mlp.up_proj"), Int8Weight)


def _scheme(part: str, **change: Any) -> dict[str, Any]:
    quantization = json.loads(json.dumps(tiny_files.QUANTIZATION))
    quantization["config_groups"]["group_0"][part] |= change
    return dict(quantization)


@pytest.mark.parametrize(
    ("quantization", "named"),
    [
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
        (tiny_files.QUANTIZATION | {"format": "pack-quantized"}, "num_bits 8 .* only 4"),
        (tiny_files.QUANTIZATION | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
        (tiny_files.QUANTIZATION | {"config_groups": {}}, "config_groups"),
        (_scheme("weights", num_bits=4), "num_bits 4"),
        (_scheme("weights", strategy="group"), "'group'"),
        (_scheme("weights", symmetric=False), "symmetric"),
        (_scheme("weights", type="float"), "'float'"),
        (_scheme("input_activations", dynamic=False), "dynamic"),
        (_scheme("input_activations", strategy="tensor"), "'tensor'"),
        (tiny_files.QUANTIZATION | {"ignore": []}, r"lm_head.*ignore"),
        (tiny_files.QUANTIZATION | {"ignore": ["re:.*"]}, r"I8.*ignore"),
        (tiny_files.QUANTIZATION | {"ignore": ["re:(a+)+$"]}, r"pattern 're:\(a\+\)"),
    ],
)
def test_other_schemes_are_refused_by_name(
    tmp_path: Path, quantization: dict[str, Any], named: str
) -> None:
    folder = tiny_files.write_compressed(tmp_path, quantization=quantization)
    with pytest.raises(CheckpointError, match=named):
        open_checkpoint(folder)


def test_check_tensors_names_what_is_wrong(tmp_path: Path) -> None:
    values = tiny_files.tensors()
    values["surprise"] = values.pop("model.norm.weight")
    folder = tiny_files.write_folder(tmp_path, values)
    with pytest.raises(CheckpointError, match=r"lacks tensor 'model\.norm\.weight'"):
        check_tensors(open_checkpoint(folder), tiny_files.shapes())
    values["model.norm.weight"] = torch.ones(31)
    save_file(values, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="unexpected tensor 'surprise'"):
        check_tensors(open_checkpoint(folder), tiny_files.shapes())
    del values["surprise"]
    save_file(values, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight.*\[31\].*\[32\]"):
        check_tensors(open_checkpoint(folder), tiny_files.shapes())
