"""`quantization_config` of a compressed-tensors folder: how its linears are stored.

One scheme holds for all linears but the ignored, or W4A8 for most and W8A8 for those named.

Every key is understood, known to say nothing about the weights, or refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from quasar.errors import CheckpointError
from quasar.kernels.base import GROUP_SIZES, ROTATIONS

MIXED = "mixed-precision"
_TOP: dict[str, tuple[Any, ...]] = {
    "quant_method": ("compressed-tensors",),
    "format": ("int-quantized", "pack-quantized", MIXED),
    "quantization_status": (None, "compressed", "frozen"),
    "kv_cache_scheme": (None,),
    "transform_config": (None, {}),
    "sparsity_config": (None, {}),
    "moe_sparsity_config": (None, {}),
}
_TOP_SILENT = {"config_groups", "ignore", "version", "global_compression_ratio", "run_compressed"}
_INT8 = {"num_bits": (8,), "type": ("int",), "symmetric": (True,)}
_NO_GROUPS = {"group_size": (None, -1), "block_structure": (None,)}
_ORDER = {"actorder": (None, False, "weight", "static")}
"""Of GPTQ: these orders leave no trace in the file, others need an index of each input."""
_INT8_WEIGHTS = _INT8 | _NO_GROUPS | _ORDER | {"strategy": ("channel",), "dynamic": (False,)}
_INT4_WEIGHTS = _ORDER | {
    "num_bits": (4,),
    "type": ("int",),
    "symmetric": (True, False),
    "strategy": ("group", "channel"),
    "block_structure": (None,),
    "dynamic": (False,),
}
_ACTIVATIONS = _INT8 | _NO_GROUPS | _ORDER | {"strategy": ("token",), "dynamic": (True,)}
_SILENT = {"observer", "observer_kwargs", "scale_dtype", "zp_dtype"}
"""How scales were found, and in which type; theirs is that of the tensors."""
_OPTIONAL = {"actorder", "block_structure", "group_size"}
_MAX_GROUP_SIZE = 1 << 22
_MAX_PATTERNS = 64
_SAFE_PATTERN = re.compile(r"re:\^?(?:\.\*)?(?:[\w-]|\\?\.)*(?:\.\*)?\$?")
"""Names with `.*` at either end. A free regular expression could take for ever to match."""


EXTENSION, ROTATED_INPUTS, DOWN = "quasar", "rotated_inputs", "mlp.down_proj"
"""Keys of config.json that other engines do not know: {quasar: {rotated_inputs: {module: block}}}.
"""


@dataclass(frozen=True, slots=True)
class Scheme:
    """How the linears of a folder are stored."""

    name: str
    """w8a8, w4a8 or w4a16."""
    symmetric: bool
    group_size: int | None
    """Inputs that share a scale; None: all inputs of a row."""
    ignore: tuple[str, ...]
    """Modules that are stored in floating point: names, or patterns after `re:`."""
    int8: tuple[str, ...] = ()
    """Modules of a W4A8 folder that are stored in W8A8, likewise."""

    def of(self, module: str) -> str:
        """The scheme of a linear that is not ignored."""
        return "w8a8" if _matches(self.int8, module) else self.name

    def packs(self, module: str) -> bool:
        """Whether its weights are 4-bit integers, eight to a word."""
        return self.of(module) != "w8a8"

    @property
    def precision(self) -> str:
        """The verifier that these weights are for: 16-bit activations make it the target itself."""
        return "bf16" if self.name == "w4a16" else self.name

    def ignores(self, module: str) -> bool:
        return _matches(self.ignore, module)


def _matches(patterns: Sequence[str], module: str) -> bool:
    return module in patterns or any(
        re.match(pattern.removeprefix("re:"), module)
        for pattern in patterns
        if pattern.startswith("re:")
    )


def parse_rotation(config: Mapping[str, Any], scheme: Scheme, where: str) -> int:
    """Size of the blocks in which a verifier is to rotate the inputs of `down`; 0: none are.

    W8A8 weights are stored as they are without it, those of W4A8 as they are rotated.
    CheckpointError, naming the key, for what is malformed.
    """
    if EXTENSION not in config:
        return 0
    extension = config[EXTENSION]
    where = f"{where}: {EXTENSION}"
    if not isinstance(extension, dict) or list(extension) != [ROTATED_INPUTS]:
        raise CheckpointError(f"{where} {extension!r}: only {ROTATED_INPUTS!r} is known in it")
    modules = extension[ROTATED_INPUTS]
    if not isinstance(modules, dict) or list(modules) != [DOWN]:
        raise CheckpointError(f"{where}.{ROTATED_INPUTS} {modules!r}: only {DOWN!r} can be rotated")
    block = modules[DOWN]
    if type(block) is not int or block not in ROTATIONS:
        raise CheckpointError(
            f"{where}.{ROTATED_INPUTS}.{DOWN} {block!r} is no power of two from {ROTATIONS[0]} to "
            f"{ROTATIONS[-1]}"
        )
    if scheme.name == "w4a16":
        raise CheckpointError(f"{where}.{ROTATED_INPUTS}: W4A16 has no integer inputs to rotate")
    return block


def parse_scheme(quantization: Any, where: str) -> Scheme:
    """CheckpointError, naming the key, for whatever is none of the schemes."""
    if not isinstance(quantization, dict):
        raise CheckpointError(f"{where} is not an object")
    _check(quantization, _TOP, _TOP_SILENT, where, {*_TOP} - {"quant_method", "format"})
    ignore = _names(quantization.get("ignore") or [], f"{where}: ignore")
    groups = quantization.get("config_groups")
    if not isinstance(groups, dict):
        raise CheckpointError(f"{where}: config_groups is not an object")
    named = {f"{where}: config_groups.{name}": group for name, group in groups.items()}
    if quantization["format"] == MIXED:
        return _mixed(named, ignore, where)
    if len(named) != 1:
        raise CheckpointError(f"{where}: config_groups has {len(named)} entries, not one")
    ((where_group, group),) = named.items()
    return _single(group, quantization["format"], ignore, where_group)


def _mixed(named: Mapping[str, Any], ignore: tuple[str, ...], where: str) -> Scheme:
    """A W4A8 group for every linear, and a W8A8 one for some by name, which comes before it."""
    formats = ("pack-quantized", "int-quantized")
    found = {
        format: (name, group)
        for name, group in named.items()
        for format in formats
        if isinstance(group, dict) and group.get("format") == format
    }
    if len(named) != 2 or len(found) != 2:
        raise CheckpointError(
            f"{where}: {MIXED} is supported with two config_groups, whose `format` are "
            f"{' and '.join(formats)}"
        )
    (where_int4, int4), (where_int8, int8) = (found[format] for format in formats)
    scheme = _single(int4, formats[0], ignore, where_int4)
    if scheme.name != "w4a8":
        raise CheckpointError(f"{where}: {MIXED} of {scheme.name} and w8a8 is not supported")
    modules = _names(int8.get("targets"), f"{where_int8}: targets")
    if not modules or "Linear" in modules:
        wrong = "a class" if modules else "no module"
        raise CheckpointError(f"{where_int8}: targets names {wrong}")
    _single({**int8, "targets": ["Linear"]}, formats[1], ignore, where_int8)
    return replace(scheme, int8=modules)


def _single(group: Any, format: str, ignore: tuple[str, ...], where: str) -> Scheme:
    """The scheme of one group, for every linear."""
    weights, activations = _parts(group, format, where)
    if format == "int-quantized":
        _check_part(weights, _INT8_WEIGHTS, f"{where}.weights")
        _check_part(activations, _ACTIVATIONS, f"{where}.input_activations")
        return Scheme("w8a8", True, None, ignore)
    _check_part(weights, _INT4_WEIGHTS | {"group_size": None}, f"{where}.weights")
    if activations is not None:
        _check_part(activations, _ACTIVATIONS, f"{where}.input_activations")
    scheme = "w4a16" if activations is None else "w4a8"
    size = _group_size(weights, scheme, f"{where}.weights")
    return Scheme(scheme, weights["symmetric"], size, ignore)


def _parts(group: Any, format: str, where: str) -> tuple[Any, Any]:
    """Weights and input activations of a group."""
    if not isinstance(group, dict) or group.get("targets") != ["Linear"]:
        raise CheckpointError(f"{where}: targets must be ['Linear']")
    allowed: dict[str, Sequence[Any]] = {"output_activations": (None,), "format": (None, format)}
    silent = {"targets", "weights", "input_activations"}
    _check(group, allowed, silent, where, {*allowed})
    return group.get("weights"), group.get("input_activations")


def _check_part(part: Any, allowed: Mapping[str, Sequence[Any] | None], where: str) -> None:
    if not isinstance(part, dict):
        raise CheckpointError(f"{where} is missing")
    _check(part, allowed, _SILENT, where, _OPTIONAL)


def _check(
    part: Mapping[str, Any],
    allowed: Mapping[str, Sequence[Any] | None],
    silent: Collection[str],
    where: str,
    optional: Collection[str],
) -> None:
    """Values by key, None for one that is looked at elsewhere; `optional` ones may be absent."""
    for key, values in allowed.items():
        if values is None or (key in optional and key not in part):
            continue
        value = part.get(key)
        if not any(type(value) is type(one) and value == one for one in values):
            only = f", only {values[0]!r}" if len(values) == 1 and values[0] is not None else ""
            raise CheckpointError(f"{where}: {key} {value!r} is not supported{only}")
    for key in part:
        if key not in allowed and key not in silent:
            raise CheckpointError(f"{where}: {key} {part[key]!r} is not known")


def _group_size(weights: Mapping[str, Any], scheme: str, where: str) -> int | None:
    size = weights.get("group_size")
    if scheme == "w4a8" and size not in GROUP_SIZES:
        raise CheckpointError(
            f"{where}: group_size {size!r} is not supported, only one of {GROUP_SIZES}"
        )
    if weights["strategy"] == "channel":
        if size not in (None, -1):
            raise CheckpointError(f"{where}: group_size {size!r} contradicts strategy 'channel'")
        return None
    if type(size) is not int or not 1 <= size <= _MAX_GROUP_SIZE:
        raise CheckpointError(f"{where}: group_size {size!r} is not supported")
    return size


def _names(names: Any, where: str) -> tuple[str, ...]:
    """Names of modules, or safe patterns of them."""
    if not isinstance(names, list) or not all(isinstance(item, str) for item in names):
        raise CheckpointError(f"{where} is not a list of names")
    if sum(item.startswith("re:") for item in names) > _MAX_PATTERNS:
        raise CheckpointError(f"{where} has more than {_MAX_PATTERNS} patterns")
    for item in names:
        if item.startswith("re:") and not _SAFE_PATTERN.fullmatch(item):
            raise CheckpointError(f"{where}: pattern {item!r} is not supported")
    return tuple(names)
