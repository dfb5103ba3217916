"""Which precisions a checkpoint and a head can have."""

from __future__ import annotations

import pytest
import torch

import tiny
from quasar.checkpoints import open_checkpoint
from quasar.errors import UsageError
from quasar.kernels.base import RaggedBatch
from quasar.kernels.reference import ReferenceBackend
from quasar.models.families import parse_config
from quasar.models.tensors import LINEARS, read_linears
from quasar.verification.verifier import PRECISIONS, load_verifier


def logits(verifier, count: int = 20):
    cache = verifier.new_cache(count)
    batch = RaggedBatch.chunk(list(range(count)), 0, cache.open(count))
    return verifier.verify(batch, cache).logits.tensor[:count].clone()


def test_a_checkpoint_says_what_it_holds(tmp_path):
    writers = (tiny.write_folder, tiny.write_quantized, tiny.write_four_bit)
    for held, write in zip(PRECISIONS, writers, strict=True):
        checkpoint = open_checkpoint(write(tmp_path / held, "llama"))
        assert checkpoint.precision == held
        for other in set(PRECISIONS) - {held}:
            message = f"holds {held} weights: --verifier {other} needs others"
            with pytest.raises(UsageError, match=message):
                load_verifier(checkpoint, other, "bf16", ReferenceBackend())


@pytest.mark.parametrize("family", sorted(tiny.CONFIGS))
def test_a_w4a8_model_is_near_its_target(tmp_path, backend, family):
    """Every linear, fused ones of the file included, is read in groups and multiplied."""
    checkpoint = open_checkpoint(tiny.write_four_bit(tmp_path / "four", family))
    target = open_checkpoint(tiny.write_folder(tmp_path / "target", family, **tiny.GROUPED))
    linears = read_linears(checkpoint, parse_config(checkpoint.config), 0)
    assert {weight.group_size for weight in linears.values()} == {32} and len(linears) == len(
        LINEARS
    )
    verifier = load_verifier(checkpoint, "w4a8", "w4a8", backend)
    packed = [linear for layer in verifier.decoder.layers for linear in layer.linears]
    assert {linear.precision for linear in (*packed, verifier.decoder.head)} == {"w4a8"}
    found = logits(verifier)
    expected = logits(load_verifier(target, "bf16", "bf16", backend))
    assert torch.corrcoef(torch.stack((found.flatten(), expected.flatten())))[0, 1] > 0.9


@pytest.mark.parametrize("head", PRECISIONS)
def test_any_precision_takes_any_head(tmp_path, backend, head):
    checkpoint = open_checkpoint(tiny.write_four_bit(tmp_path / "model", "qwen2"))
    verifier = load_verifier(checkpoint, "w4a8", head, backend)
    assert verifier.decoder.head.precision == head
    wide = load_verifier(checkpoint, "w4a8", "bf16", backend)
    error = (logits(verifier) - logits(wide)).std() / logits(wide).std()
    assert error < {"bf16": 1e-9, "w8a8": 0.02, "w4a8": 0.15}[head]


def test_a_w4a8_head_needs_whole_groups(tmp_path):
    checkpoint = open_checkpoint(tiny.write_folder(tmp_path / "model", "llama"))
    with pytest.raises(UsageError, match=r"--head w4a8 .* hidden size of 48"):
        load_verifier(checkpoint, "bf16", "w4a8", ReferenceBackend())
