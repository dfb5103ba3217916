"""The plain fp32 model against transformers on tiny random weights of every family."""

from __future__ import annotations

import pytest
import torch

import tiny
from quasar.checkpoints import open_checkpoint
from quasar.errors import CheckpointError
from quasar.models.families import parse_config
from quasar.models.layer import logits
from quasar.models.tensors import check_model

transformers = pytest.importorskip("transformers")

VARIANTS = {
    "plain": {},
    "one kv head": {"num_key_value_heads": 1},
    "no sharing": {"num_key_value_heads": 4},
    "wide heads": {"head_dim": 20},
    "long wavelengths": {"rope_theta": 1e6},
}


@pytest.mark.parametrize("variant", sorted(VARIANTS))
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", sorted(tiny.CONFIGS))
def test_logits_equal_those_of_transformers(tmp_path, family, tied, variant):
    folder = tiny.write_folder(
        tmp_path / "model", family, seed=3, tie_word_embeddings=tied, **VARIANTS[variant]
    )
    tokens = torch.randint(0, 97, (70,), generator=torch.Generator().manual_seed(4))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        expected = model(tokens[None]).logits[0]
    checkpoint = open_checkpoint(folder)
    config = parse_config(checkpoint.config)
    check_model(checkpoint, config)
    found = logits(checkpoint, config, tokens)
    assert (found - expected).abs().max() <= 1e-3 * expected.abs().max()


def test_bias_on_all_attention_linears(tmp_path):
    """`attention_bias` of llama: q, k, v and o."""
    config = tiny.LLAMA | {"attention_bias": True}
    tensors = tiny.random_tensors(config)
    generator = torch.Generator().manual_seed(5)
    for name in [n for n in tensors if ".self_attn." in n]:
        rows = tensors[name].shape[0]
        bias = torch.randn(rows, generator=generator).bfloat16()
        tensors[name.replace(".weight", ".bias")] = bias
    folder = tiny.write_folder(tmp_path / "model", "llama", attention_bias=True)
    tiny.save_file(tensors, folder / "model.safetensors")
    tokens = torch.arange(1, 40)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        expected = model(tokens[None]).logits[0]
    checkpoint = open_checkpoint(folder)
    found = logits(checkpoint, parse_config(checkpoint.config), tokens)
    assert (found - expected).abs().max() <= 1e-3 * expected.abs().max()


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
