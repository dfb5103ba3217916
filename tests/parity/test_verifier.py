"""The BF16 verifier against transformers on tiny random weights of every family.

transformers runs in fp32 on the same BF16 weights; ours rounds the inputs of linears to BF16
(relative error 2^-9 each), so logits agree to about a percent of their spread.
"""

from __future__ import annotations

import pytest
import torch

import tiny
from quasar.checkpoints import open_checkpoint
from quasar.kernels.base import RaggedBatch
from quasar.verification.verifier import load_verifier

pytest.importorskip("transformers")

import published


def our_logits(verifier, tokens, grows_to=None, pool=0):
    """Of a text that may grow to so many tokens, in a cache for `pool` more."""
    length = grows_to or len(tokens)
    cache = verifier.new_cache(length + pool)
    sequence = cache.open(length)
    batch = RaggedBatch.chunk(tokens, 0, sequence)
    return verifier.verify(batch, cache).logits.tensor[: len(tokens)]


@pytest.mark.parametrize("family", sorted(tiny.CONFIGS))
def test_logits_agree_with_transformers(tmp_path, backend, family):
    folder = tiny.write_folder(tmp_path / "model", family, seed=1)
    tokens = torch.randint(0, 97, (70,), generator=torch.Generator().manual_seed(2)).tolist()
    expected = published.logits(folder, torch.tensor(tokens))
    verifier = load_verifier(open_checkpoint(folder), "bf16", "bf16", backend)
    found = our_logits(verifier, tokens)
    error = (found - expected).std() / expected.std()
    assert error < 0.01
    assert (found.argmax(-1) == expected.argmax(-1)).float().mean() > 0.9


def test_longrope_takes_the_factors_of_what_a_text_may_grow_to(tmp_path, backend):
    """Not of its length so far, nor of the pool that it shares with others."""
    tokens = torch.randint(0, 97, (20,), generator=torch.Generator().manual_seed(2)).tolist()
    original = tiny.PHI3["original_max_position_embeddings"]
    folder = tiny.write_folder(tmp_path / "model", "phi3", seed=1)
    expected = published.logits(folder, torch.tensor(tokens))
    verifier = load_verifier(open_checkpoint(folder), "bf16", "bf16", backend)
    short = our_logits(verifier, tokens).clone()
    assert (short - expected).std() < 0.01 * expected.std()
    assert torch.equal(our_logits(verifier, tokens, original, pool=200), short)
    long = our_logits(verifier, tokens, original + 1).clone()
    assert (long - short).std() > 0.1 * short.std()
    assert torch.equal(our_logits(verifier, tokens, original + 1, pool=200), long)
    grown = tokens * 4
    expected = published.logits(folder, torch.tensor(grown))
    found = our_logits(verifier, grown)
    assert (found - expected).std() < 0.01 * expected.std()
    assert torch.equal(found[: len(tokens)], long)


def test_hidden_states_and_layer_subsets(tmp_path, backend):
    """`hidden` gives the residual stream after a layer; `layers` runs a part of the model."""
    folder = tiny.write_folder(tmp_path / "model", "llama", num_hidden_layers=3)
    verifier = load_verifier(open_checkpoint(folder), "bf16", "bf16", backend)
    cache = verifier.new_cache(8)
    sequence = cache.open(8)
    batch = RaggedBatch.chunk([3, 4, 5], 0, sequence)
    full = verifier.verify(batch, cache, hidden=(0, 2))
    first, last = full.hidden
    assert first.shape == last.shape == (3, 48)
    skipped = verifier.verify(batch, cache, layers=range(0, 1), hidden=(0,))
    assert torch.equal(skipped.hidden[0], first)
    assert not torch.equal(
        verifier.verify(batch, cache, layers=range(0, 1)).logits.tensor[:3], last
    )
    none = verifier.verify(batch, cache, layers=range(0)).logits.tensor[:3].clone()
    assert not torch.equal(none, verifier.verify(batch, cache).logits.tensor[:3])


def test_selected_logit_rows_equal_the_full_ones(tmp_path, backend):
    folder = tiny.write_folder(tmp_path / "model", "qwen2")
    verifier = load_verifier(open_checkpoint(folder), "bf16", "w8a8", backend)
    tokens = list(range(20))
    full = our_logits(verifier, tokens).clone()
    cache = verifier.new_cache(20)
    sequence = cache.open(20)
    batch = RaggedBatch.chunk(tokens, 0, sequence)
    rows = torch.tensor([3, 19])
    assert torch.equal(verifier.verify(batch, cache, rows).logits.tensor[:2], full[rows])
