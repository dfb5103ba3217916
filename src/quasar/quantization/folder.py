"""What a quantised folder says of itself: its config.json (docs/format.md)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from quasar.checkpoints.base import Checkpoint
from quasar.checkpoints.scheme import DOWN, EXTENSION, MIXED, ROTATED_INPUTS
from quasar.models.config import ModelConfig
from quasar.models.families import parse_config
from quasar.models.tensors import GROUPS, stored_modules
from quasar.quantization.recipe import Recipe


def folder_config(
    checkpoint: Checkpoint, recipe: Recipe, dense: Sequence[str] = ()
) -> dict[str, Any]:
    """config.json of the quantised folder; `dense` names the linears left in BF16.

    For W8A8 only fields that every release of compressed-tensors accepts: its classes forbid
    unknown ones. What other engines need not know is under a key of its own.
    """
    # A model that another tool dequantised may still say that its inputs are to be rotated, and
    # `dtype`, the newer name of `torch_dtype`, goes before it.
    dropped = ("auto_map", "dtype", EXTENSION)
    config = {key: value for key, value in checkpoint.config.items() if key not in dropped}
    # GGUF does not name the class; transformers calls it so for every family supported here.
    config.setdefault("architectures", [f"{config['model_type'].capitalize()}ForCausalLM"])
    if recipe.rotation:
        config[EXTENSION] = {ROTATED_INPUTS: {DOWN: recipe.rotation}}
    return config | {
        "torch_dtype": "bfloat16",
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "quantization_status": "compressed",
            "ignore": ["lm_head", *dense],
            **stored_scheme(recipe, parse_config(checkpoint.config)),
        },
    }


def stored_scheme(recipe: Recipe, config: ModelConfig) -> dict[str, Any]:
    """`format` and `config_groups`.

    The library would take 4-bit weights with quantised inputs to be int-quantized, so they say what
    they are.
    """
    int8 = {"num_bits": 8, "type": "int", "symmetric": True}
    w8a8: dict[str, Any] = {
        "targets": ["Linear"],
        "weights": {**int8, "strategy": "channel", "dynamic": False},
        "input_activations": {**int8, "strategy": "token", "dynamic": True},
        "output_activations": None,
    }
    if recipe.format.bits == 8:
        return {"format": "int-quantized", "config_groups": {"group_0": w8a8}}
    w4a8 = w8a8 | {"format": "pack-quantized"}
    w4a8["weights"] = w8a8["weights"] | {
        "num_bits": 4,
        "symmetric": False,
        "strategy": "group",
        "group_size": recipe.format.group_size,
    }
    if not recipe.int8:
        return {"format": "pack-quantized", "config_groups": {"group_0": w4a8}}
    modules = stored_modules([n for group in recipe.int8 for n in GROUPS[group]], config)
    targets = [f"re:.*{re.escape(module)}$" for module in modules]
    named = w8a8 | {"format": "int-quantized", "targets": targets}
    return {"format": MIXED, "config_groups": {"group_0": w4a8, "group_1": named}}
