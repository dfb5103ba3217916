"""Our folder in transformers with compressed-tensors: the same function as our own."""

from __future__ import annotations

import pytest
import torch

import tiny
from quasar.checkpoints import open_checkpoint
from quasar.kernels.reference import rms_norm
from quasar.models.families import parse_config
from quasar.models.layer import FloatLinear, Layer, embedded
from quasar.models.tensors import EMBEDDING, final_norm, head_rows, read_linears, read_norms
from quasar.quantization.pipeline import quantize
from quasar.quantization.simulation import Int8Linear
from quasar.quantization.weights import dequantize

transformers = pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")


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
    assert (found - expected).std() < 0.08 * expected.std()
    assert (found.argmax(-1) == expected.argmax(-1)).float().mean() > 0.9


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
def test_transformers_reads_the_same_weights(folder):
    """Without quantised inputs both compute the same function in fp32."""
    dense = transformers.CompressedTensorsConfig(dequantize=True)
    with torch.inference_mode():
        found = load(folder, quantization_config=dense)(TOKENS[None]).logits[0]
    expected = folder_logits(folder, lambda w: FloatLinear(dequantize(w), w.bias))
    assert (found - expected).abs().max() <= 1e-3 * expected.abs().max()
