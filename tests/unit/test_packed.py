"""4-bit folders: what is packed comes back, and every field that is not as it should is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_files
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quasar.checkpoints import open_checkpoint
from quasar.checkpoints.packing import pack, stored_linear, unpack
from quasar.checkpoints.scheme import parse_scheme
from quasar.errors import CheckpointError
from quasar.kernels.base import DenseWeight, Int4Weight, Int8Weight

UP = "model.layers.1.mlp.up_proj"
SHAPE = (64, 32)
"""Of that linear."""


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 20), columns=st.integers(1, 40), seed=st.integers(0, 99))
def test_packing_is_as_the_format_says(rows: int, columns: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (rows, columns), generator=generator, dtype=torch.uint8)
    packed = pack(codes)
    assert packed.dtype == torch.int32 and packed.shape == (rows, -(-columns // 8))
    for k in range(columns):
        word = packed[:, k // 8].to(torch.int64) >> 4 * (k % 8)
        assert torch.equal((word & 15).to(torch.uint8), codes[:, k])
    assert torch.equal(unpack(packed, columns), codes)
    assert torch.equal(unpack(pack(codes.t()), rows).t(), codes)


def random_weight(out: int, columns: int, group_size: int = 32, bias: bool = False) -> Int4Weight:
    generator = torch.Generator().manual_seed(out * columns)
    groups = columns // group_size

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    scale = integers(16, 32, out, groups).float() * 2.0 ** integers(-12, -5, out, groups).float()
    return Int4Weight(
        integers(0, 16, out, columns).to(torch.uint8),
        scale,
        integers(0, 16, out, groups).to(torch.uint8),
        integers(-9, 9, out).float() if bias else None,
    )


def quantization(weights: dict[str, Any] | None = None, **top: Any) -> dict[str, Any]:
    """The config of a W4A8 folder, keys of its weights or its own changed."""
    found: dict[str, Any] = json.loads(json.dumps(tiny_files.QUANTIZATION))
    found |= {"format": "pack-quantized", **top}
    group = found["config_groups"]["group_0"]
    del group["weights"]
    group["format"] = "pack-quantized"
    group["weights"] = {
        "num_bits": 4,
        "type": "int",
        "symmetric": False,
        "strategy": "group",
        "group_size": 32,
        "dynamic": False,
    } | (weights or {})
    return found


def packed_tensors(bias: bool = False) -> dict[str, Tensor]:
    """The tiny model with random 4-bit linears."""
    values = tiny_files.tensors()
    for name in [name for name in values if name.endswith("_proj.weight")]:
        module = name.removesuffix(".weight")
        weight = random_weight(*values.pop(name).shape, bias=bias)
        values |= {f"{module}.{part}": tensor for part, tensor in stored_linear(weight)}
    return values


def write(folder: Path, values: dict[str, Tensor], config: dict[str, Any] | None = None) -> Path:
    return tiny_files.write_compressed(folder, values, config or quantization())


@pytest.mark.parametrize("bias", [False, True])
def test_what_is_written_is_read(tmp_path: Path, bias: bool) -> None:
    checkpoint = open_checkpoint(write(tmp_path, packed_tensors(bias)))
    assert checkpoint.precision == "w4a8"
    assert not any("weight_" in name for name in checkpoint.names())
    for name in [name for name in checkpoint.names() if name.endswith("_proj.weight")]:
        module = name.removesuffix(".weight")
        found, expected = (
            checkpoint.linear(module),
            random_weight(*checkpoint.shape(name), bias=bias),
        )
        assert isinstance(found, Int4Weight)
        assert torch.equal(checkpoint.tensor(name), expected.codes)
        for part in ("codes", "scale", "zero"):
            assert torch.equal(getattr(found, part), getattr(expected, part))
        assert (found.bias is None) == (not bias)
        if found.bias is not None and expected.bias is not None:
            assert torch.equal(found.bias, expected.bias)


def test_symmetric_weights_have_the_zero_point_eight(tmp_path: Path) -> None:
    values = {k: v for k, v in packed_tensors().items() if not k.endswith("zero_point")}
    checkpoint = open_checkpoint(write(tmp_path, values, quantization({"symmetric": True})))
    weight = checkpoint.linear(UP)
    assert isinstance(weight, Int4Weight) and (weight.zero == 8).all()


def test_linears_in_ignore_stay_dense(tmp_path: Path) -> None:
    values = {k: v for k, v in packed_tensors().items() if not k.startswith(UP)}
    values[f"{UP}.weight"] = tiny_files.tensors()[f"{UP}.weight"]
    checkpoint = open_checkpoint(write(tmp_path, values, quantization(ignore=["lm_head", UP])))
    assert isinstance(checkpoint.linear(UP), DenseWeight)
    assert isinstance(checkpoint.linear("model.layers.0.mlp.up_proj"), Int4Weight)
    with pytest.raises(CheckpointError, match=rf"{UP}\.weight.*`ignore` does not list it"):
        open_checkpoint(write(tmp_path, values))


def test_weights_for_16_bit_activations_are_a_target(tmp_path: Path) -> None:
    """Any scale will do; (code - zero) * scale in fp32, rounded once."""
    values, config = packed_tensors(), quantization()
    config["config_groups"]["group_0"]["input_activations"] = None
    scale = values[f"{UP}.weight_scale"].float() * 1.234567
    values[f"{UP}.weight_scale"] = scale
    checkpoint = open_checkpoint(write(tmp_path, values, config))
    assert checkpoint.precision == "bf16"
    weight, found = random_weight(*SHAPE), checkpoint.linear(UP)
    assert isinstance(found, DenseWeight)
    expected = (weight.codes.float() - weight.zero.float()) * scale  # one group a row
    assert torch.equal(found.weight, expected.bfloat16())
    values[f"{UP}.weight_scale"] = torch.full_like(scale, 3e38)
    checkpoint = open_checkpoint(write(tmp_path, values, config))
    with pytest.raises(CheckpointError, match=rf"{UP}\.weight_packed.*infinite"):
        checkpoint.linear(UP)


def fails(folder: Path, named: str) -> None:
    with pytest.raises(CheckpointError, match=named) as error:
        checkpoint = open_checkpoint(folder)
        for name in checkpoint.names():
            if name.endswith("_proj.weight"):
                checkpoint.linear(name.removesuffix(".weight"))
    assert str(folder) in str(error.value)


I32, BF16 = torch.int32, torch.bfloat16


@pytest.mark.parametrize(
    ("part", "value", "named"),
    [
        ("weight_packed", None, r"up_proj\.weight_(scale|zero_point|shape)' belongs to no"),
        ("weight_packed", torch.zeros(64, 3, dtype=I32), r"\[64, 3\].* \[64, 4\]"),
        ("weight_packed", torch.zeros(63, 4, dtype=I32), r"\[63, 4\].* \[64, 4\]"),
        ("weight_packed", torch.zeros(256, dtype=I32), r"\[256\].* \[64, 4\]"),
        ("weight_packed", torch.zeros(64, 4), r"weight_packed.*float32"),
        ("weight_scale", None, r"lacks tensor .*up_proj\.weight_scale"),
        ("weight_scale", torch.ones(64, 2, dtype=BF16), r"weight_scale.*\[64, 2\].* \[64, 1\]"),
        ("weight_scale", torch.ones(64, dtype=BF16), r"weight_scale.*\[64\].* \[64, 1\]"),
        ("weight_scale", torch.ones(64, 1, dtype=I32), r"weight_scale.*int32"),
        ("weight_scale", torch.full((64, 1), torch.nan), r"weight_scale.*not positive"),
        ("weight_scale", torch.full((64, 1), torch.inf), r"weight_scale.*not positive"),
        ("weight_scale", torch.full((64, 1), 2.0**127), r"weight_scale.*infinite weights"),
        ("weight_scale", torch.zeros(64, 1), r"weight_scale.*not positive"),
        ("weight_scale", -torch.ones(64, 1), r"weight_scale.*not positive"),
        ("weight_scale", torch.full((64, 1), 33 / 32), r"weight_scale.*5 significant bits"),
        ("weight_scale", torch.full((64, 1), 1e-39), r"weight_scale.*normal"),
        ("weight_zero_point", None, r"lacks tensor .*up_proj\.weight_zero_point"),
        ("weight_zero_point", torch.zeros(64, 1, dtype=I32), r"zero_point.*\[64, 1\].* \[8, 1\]"),
        ("weight_zero_point", torch.zeros(8, 1, dtype=torch.int8), r"zero_point.*int8"),
        ("weight_shape", None, r"lacks tensor .*up_proj\.weight_shape"),
        ("weight_shape", torch.tensor([64, 32, 1]), r"weight_shape.*\[3\].* \[2\]"),
        ("weight_shape", torch.tensor([64.0, 32.0]), r"weight_shape.*float32"),
        ("weight_shape", torch.tensor([-64, 32]), r"weight_shape.*\[-64, 32\]"),
        ("weight_shape", torch.tensor([2**62, 32]), r"weight_shape.*4611686018427387904"),
        ("weight_shape", torch.tensor([32, 32]), r"weight_packed.*\[64, 4\].* \[32, 4\]"),
        ("weight_shape", torch.tensor([64, 31]), r"weight_shape.*31 inputs are no multiple"),
        ("weight_g_idx", torch.zeros(32, dtype=I32), r"weight_g_idx.*actorder"),
        ("weight", torch.zeros(64, 32, dtype=BF16), r"up_proj\.weight.*(ignore|twice)"),
    ],
)
def test_malformed_tensors(tmp_path: Path, part: str, value: Tensor | None, named: str) -> None:
    values = packed_tensors()
    values.pop(f"{UP}.{part}", None)
    if value is not None:
        values[f"{UP}.{part}"] = value
    fails(write(tmp_path, values), named)


@pytest.mark.parametrize("module", ["lm_head", "model.embed_tokens"])
def test_only_projections_are_quantised(tmp_path: Path, module: str) -> None:
    """Head and embedding are read as BF16 rows; 16-bit activations make them such."""
    values = packed_tensors()
    weight = random_weight(*values.pop(f"{module}.weight").shape)
    values |= {f"{module}.{part}": tensor for part, tensor in stored_linear(weight)}
    config = quantization(ignore=[])
    fails(write(tmp_path, values, config), rf"{module}\.weight_packed.*only projections")
    _group(input_activations=None)(config)
    if module == "model.embed_tokens":
        config["ignore"] = ["lm_head"]
    checkpoint = open_checkpoint(write(tmp_path, values, config))
    assert checkpoint.tensor(f"{module}.weight").dtype == torch.bfloat16


def test_an_int8_head_is_refused(tmp_path: Path) -> None:
    values = tiny_files.quantised(tiny_files.tensors(), torch.float32)
    head = values["lm_head.weight"]
    values["lm_head.weight"] = torch.ones_like(head, dtype=torch.int8)
    values["lm_head.weight_scale"] = torch.ones(head.shape[0], 1)
    config = tiny_files.QUANTIZATION | {"ignore": []}
    fails(write(tmp_path, values, config), r"lm_head\.weight.*only projections")


def test_a_zero_point_without_use(tmp_path: Path) -> None:
    config = quantization({"symmetric": True})
    fails(write(tmp_path, packed_tensors(), config), "weight_zero_point' is there.*symmetric")


def test_an_ignored_module_that_is_packed(tmp_path: Path) -> None:
    config = quantization(ignore=["lm_head", UP])
    fails(write(tmp_path, packed_tensors(), config), rf"{UP}\.weight_packed.*`ignore` lists")


def _group(**change: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda config: config["config_groups"]["group_0"].update(change)


def _part(part: str, **change: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda config: config["config_groups"]["group_0"][part].update(change)


def _top(**change: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda config: config.update(change)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (_top(quant_method="awq"), "quant_method 'awq' is not supported"),
        (_top(format="float-quantized"), "format 'float-quantized'"),
        (_top(format="nvfp4-pack-quantized"), "format 'nvfp4-pack-quantized'"),
        (_top(format="int-quantized"), "format 'pack-quantized' is not supported"),
        (_top(format=None), "format None"),
        (_top(quantization_status="calibration"), "quantization_status 'calibration'"),
        (_top(kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme"),
        (_top(transform_config={"config_groups": {}}), "transform_config"),
        (_top(sparsity_config={"format": "dense"}), "sparsity_config"),
        (_top(moe_sparsity_config={"a": 1}), "moe_sparsity_config"),
        (_top(desc_act=True), "desc_act True is not known"),
        (_top(ignore="lm_head"), "ignore is not a list"),
        (_top(ignore=[3]), "ignore is not a list"),
        (_top(config_groups={}), "config_groups has 0 entries, not one"),
        (_top(config_groups=[]), "config_groups is not an object"),
        (_top(config_groups={"a": None}), "config_groups.a: targets"),
        (_group(targets=["re:.*up_proj"]), "targets must be"),
        (_group(output_activations={"num_bits": 8}), "output_activations"),
        (_group(format="float-quantized"), "group_0: format 'float-quantized'"),
        (_group(surprise=1), "surprise 1 is not known"),
        (_group(weights=None), "weights is missing"),
        (_group(weights=[4]), "weights is missing"),
        (_group(input_activations=[8]), "input_activations is missing"),
        (_part("weights", num_bits=3), "weights: num_bits 3 is not supported, only 4"),
        (_part("weights", num_bits=4.0), "num_bits 4.0"),
        (_part("weights", type="float"), "type 'float'"),
        (_part("weights", symmetric=None), "symmetric None"),
        (_part("weights", symmetric=1), "symmetric 1"),
        (_part("weights", strategy="block"), "strategy 'block'"),
        (_part("weights", strategy="channel"), "group_size 32 contradicts"),
        (_part("weights", dynamic=True), "dynamic True"),
        (_part("weights", group_size=16), "group_size 16"),
        (_part("weights", group_size=None), "group_size None"),
        (_part("weights", group_size="32"), "group_size '32'"),
        (_part("weights", block_structure=[8, 8]), "block_structure"),
        (_part("weights", actorder="group"), "actorder 'group'"),
        (_part("weights", actorder="dynamic"), "actorder 'dynamic'"),
        (_part("weights", is_mx=True), "is_mx True is not known"),
        (_part("input_activations", num_bits=16), "input_activations: num_bits 16"),
        (_part("input_activations", type="float"), "type 'float'"),
        (_part("input_activations", symmetric=False), "symmetric False"),
        (_part("input_activations", strategy="tensor"), "strategy 'tensor'"),
        (_part("input_activations", dynamic="local"), "dynamic 'local'"),
        (_part("input_activations", group_size=32), "group_size 32"),
    ],
)
def test_malformed_configs(change: Callable[[dict[str, Any]], Any], named: str) -> None:
    config = quantization()
    assert parse_scheme(config, "here").name == "w4a8"
    change(config)
    if "contradicts" in named:  # W4A8 has groups whatever the strategy says
        _group(input_activations=None)(config)
    with pytest.raises(CheckpointError, match=f"^here.*{named}"):
        parse_scheme(config, "here")


def test_keys_that_say_nothing_of_the_weights() -> None:
    config = quantization()
    _top(version="0.11.0", global_compression_ratio=1.5, run_compressed=True)(config)
    _part("weights", observer="minmax", observer_kwargs={}, actorder="static")(config)
    _part("input_activations", observer=None, scale_dtype=None, group_size=-1)(config)
    assert parse_scheme(config, "here").name == "w4a8"


WIDER = ("mlp.up_proj", "mlp.gate_proj")
"""Linears that the mixed folder of these tests stores in W8A8."""


def mixed() -> dict[str, Any]:
    """The config of a W4A8 folder, some of whose linears are in W8A8."""
    config = quantization(format="mixed-precision")
    int8 = json.loads(json.dumps(tiny_files.QUANTIZATION))["config_groups"]["group_0"]
    targets = [rf"re:.*mlp\.{part}_proj$" for part in ("up", "gate")]
    config["config_groups"]["group_1"] = int8 | {"targets": targets, "format": "int-quantized"}
    return config


def mixed_tensors() -> dict[str, Tensor]:
    values = packed_tensors()
    int8 = tiny_files.quantised(tiny_files.tensors(), torch.float32)
    for name in [name for name in values if any(part in name for part in WIDER)]:
        del values[name]
    return values | {name: x for name, x in int8.items() if any(part in name for part in WIDER)}


def test_some_linears_in_int8(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write(tmp_path, mixed_tensors(), mixed()))
    assert checkpoint.precision == "w4a8"
    int8 = tiny_files.quantised(tiny_files.tensors(), torch.float32)
    linears = [name for name in checkpoint.names() if name.endswith("_proj.weight")]
    assert len(linears) == 14
    for name in linears:
        found = checkpoint.linear(name.removesuffix(".weight"))
        if not any(part in name for part in WIDER):
            assert isinstance(found, Int4Weight)
            continue
        assert isinstance(found, Int8Weight)
        assert torch.equal(found.codes, int8[name])
        assert torch.equal(found.scale[:, None], int8[f"{name}_scale"])
        assert torch.equal(checkpoint.tensor(name), found.codes)


def _second(**change: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda config: config["config_groups"]["group_1"].update(change)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (_top(format="pack-quantized"), "config_groups has 2 entries, not one"),
        (lambda config: config["config_groups"].popitem(), "two config_groups"),
        (lambda config: config["config_groups"].update(more={}), "two config_groups"),
        (_top(config_groups={"a": [], "b": 3}), "two config_groups"),
        (_second(format="pack-quantized"), "two config_groups"),
        (_second(format=None), "two config_groups"),
        (_second(format=["int-quantized"]), "two config_groups"),
        (_second(targets="Linear"), "group_1: targets is not a list"),
        (_second(targets=None), "group_1: targets is not a list"),
        (_second(targets=[]), "group_1: targets names no module"),
        (_second(targets=["Linear"]), "group_1: targets names a class"),
        (_second(targets=["re:(a+)+$"]), r"group_1: targets: pattern 're:\(a\+\)\+\$'"),
        (_second(weights=None), "group_1.weights is missing"),
        (_second(surprise=1), "group_1: surprise 1 is not known"),
        (_second(output_activations={"num_bits": 8}), "group_1: output_activations"),
        (_group(targets=["re:.*down_proj$"]), "group_0: targets must be"),
        (_group(input_activations=None), "mixed-precision of w4a16 and w8a8"),
    ],
)
def test_malformed_mixed_configs(change: Callable[[dict[str, Any]], Any], named: str) -> None:
    config = mixed()
    assert parse_scheme(config, "here").of("model.layers.0.mlp.up_proj") == "w8a8"
    assert parse_scheme(config, "here").of("model.layers.0.mlp.down_proj") == "w4a8"
    change(config)
    with pytest.raises(CheckpointError, match=f"^here.*{named}"):
        parse_scheme(config, "here")


def test_an_int8_linear_that_no_target_names(tmp_path: Path) -> None:
    config, values = mixed(), mixed_tensors()
    _second(targets=[r"re:.*mlp\.gate_proj$"])(config)
    fails(write(tmp_path, values, config), r"up_proj\.weight_scale.*belongs to no weight_packed")
    kept = {name: x for name, x in values.items() if not name.endswith("up_proj.weight_scale")}
    fails(write(tmp_path, kept, config), r"up_proj\.weight' is I8.*4-bit")


@pytest.mark.parametrize(
    ("name", "value", "named"),
    [
        (f"{UP}.weight_packed", torch.zeros(64, 4, dtype=I32), "weight_packed.*scheme is W8A8"),
        (f"{UP}.weight_zero_point", torch.zeros(8, 1, dtype=I32), "weight_zero_point"),
        (f"{UP}.weight_shape", torch.tensor([64, 32]), "weight_shape.*int-quantized"),
        (f"{UP}.weight", torch.zeros(64, 32, dtype=BF16), "up_proj.weight"),
        (f"{UP}.weight", None, "weight_scale.*belongs to no I8 weight"),
        (f"{UP}.weight_scale", None, "weight_scale"),
        (f"{UP}.weight_scale", torch.full((64, 1), 3e38), "weight_scale.*infinite weights"),
        (
            "model.layers.1.self_attn.q_proj.weight",
            torch.zeros(32, 32, dtype=torch.int8),
            r"q_proj\.weight.*twice",
        ),
    ],
)
def test_malformed_mixed_tensors(
    tmp_path: Path, name: str, value: Tensor | None, named: str
) -> None:
    values = mixed_tensors()
    values.pop(name, None)
    if value is not None:
        values[name] = value
    fails(write(tmp_path, values, mixed()), named)
