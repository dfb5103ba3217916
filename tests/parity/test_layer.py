"""The plain fp32 model against transformers (or published equations) on tiny random weights."""

from __future__ import annotations

import pytest
import torch

import tiny
from quasar.checkpoints import open_checkpoint
from quasar.errors import CheckpointError
from quasar.models.families import parse_config
from quasar.models.layer import logits
from quasar.models.tensors import check_model

pytest.importorskip("transformers")

import published

TOKENS = torch.randint(0, 97, (70,), generator=torch.Generator().manual_seed(4))
WINDOW = {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}
NESTED = {
    "rope_theta": None,
    "rope_scaling": None,
    "rope_local_base_freq": None,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
    },
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 48,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
COMMON = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "untied": {"tie_word_embeddings": False},
    "one kv head": {"num_key_value_heads": 1},
    "no sharing": {"num_key_value_heads": 4},
    "long wavelengths": {"rope_theta": 1e6},
}
WIDE = {"wide heads": {"head_dim": 20}}
VARIANTS = {
    "llama": {
        **WIDE,
        "linear": {"rope_scaling": {"type": "linear", "factor": 2.5}},
        "llama3": {"rope_scaling": LLAMA3},
        "llama3, new spelling": {"rope_parameters": LLAMA3 | {"rope_theta": 10000.0}},
    },
    "qwen2": {
        "window": WINDOW,
        "layer types": WINDOW | {"layer_types": ["sliding_attention", "full_attention"]},
        "yarn": {"rope_scaling": YARN},
        "yarn, not rounded": {"rope_parameters": YARN | {"truncate": False, "beta_fast": 4}},
        "yarn, mscale": {"rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 0.7}},
    },
    "qwen3": {**WIDE, "window": WINDOW, "yarn": {"rope_scaling": YARN}},
    "mistral": {**WIDE, "no window": {"sliding_window": None}, "narrow": {"sliding_window": 1}},
    "phi3": {
        "no scaling": {"rope_scaling": None},
        "whole heads": {"rope_scaling": None, "partial_rotary_factor": 1.0},
        "window": {"sliding_window": 24},
        "attention factor": {"rope_scaling": tiny.PHI3["rope_scaling"] | {"attention_factor": 1.5}},
        "short text": {"original_max_position_embeddings": len(TOKENS)},
        "longer text": {"original_max_position_embeddings": len(TOKENS) - 1},
        "short context": {
            "max_position_embeddings": 128,
            "original_max_position_embeddings": 128,
        },
    },
    "gemma3_text": {**WIDE, "nested rope": NESTED},
}
CASES = [
    (family, name)
    for family in sorted(tiny.CONFIGS)
    for name in (*COMMON, *VARIANTS.get(family, {}))
]


def our_logits(folder):
    checkpoint = open_checkpoint(folder)
    config = parse_config(checkpoint.config)
    check_model(checkpoint, config)
    return logits(checkpoint, config, TOKENS)


@pytest.mark.parametrize(("family", "variant"), CASES)
def test_logits_equal_the_published_ones(tmp_path, family, variant):
    change = COMMON.get(variant) or VARIANTS.get(family, {}).get(variant, {})
    folder = tiny.write_folder(tmp_path / "model", family, seed=3, **change)
    expected = published.logits(folder, TOKENS)
    error = (our_logits(folder) - expected).abs().max() / expected.abs().max()
    print(f"{family}, {variant}: {error:.1e}")
    assert error <= 1e-3


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text"])
def test_bias_on_all_attention_linears(tmp_path, family):
    """`attention_bias`: q, k, v and o."""
    folder = tiny.write_folder(tmp_path / "model", family, attention_bias=True)
    expected = published.logits(folder, TOKENS)
    assert (our_logits(folder) - expected).abs().max() <= 1e-3 * expected.abs().max()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), "lacks.*layers.1.mlp.up_proj"),
        (lambda t: t.update({"model.extra": torch.ones(2)}), "unexpected.*model.extra"),
        (lambda t: t.update({"model.norm.weight": torch.ones(47)}), "model.norm.*shape"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(tmp_path, change, message):
    folder = tiny.write_folder(tmp_path / "model", "qwen2")
    tensors = tiny.random_tensors(tiny.QWEN2)
    change(tensors)
    tiny.save_file(tensors, folder / "model.safetensors")
    checkpoint = open_checkpoint(folder)
    with pytest.raises(CheckpointError, match=message):
        check_model(checkpoint, parse_config(checkpoint.config))
