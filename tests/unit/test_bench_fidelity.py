"""Perplexity, KL and top-1: the formulas, and that chunks and windows change nothing."""

from __future__ import annotations

import math

import pytest
import torch

import tiny
from quasar.bench import fidelity
from quasar.bench.fidelity import Fidelity, Passage, compare, windows
from quasar.checkpoints import open_checkpoint
from quasar.errors import QuasarError
from quasar.kernels.base import RaggedBatch
from quasar.kernels.reference import ReferenceBackend
from quasar.verification.verifier import load_verifier


@pytest.fixture(autouse=True)
def one_thread():
    """Rows this small are slower with more."""
    torch.set_num_threads(1)


def test_figures_of_known_laws():
    p = torch.tensor([[0.5, 0.25, 0.25], [0.45, 0.55, 1e-9]])
    q = torch.tensor([[0.25, 0.5, 0.25], [0.45, 0.55, 1e-9]])
    found = Fidelity()
    found.add(p.log() + 3.0, q.log() - 1.0, torch.tensor([2, 0]))
    figures = found.figures()
    assert figures["tokens"] == 2
    assert figures["perplexity"] == pytest.approx((0.25 * 0.45) ** -0.5, rel=1e-6)
    assert figures["reference_perplexity"] == pytest.approx((0.25 * 0.45) ** -0.5, rel=1e-6)
    kl = 0.5 * math.log(2) - 0.25 * math.log(2)
    assert figures["kl"] == pytest.approx(kl / 2, rel=1e-6)
    # The second position is a near tie: log(0.55 / 0.45) = 0.2.
    assert (figures["top1"], figures["top1_without_near_ties"]) == (0.5, 0.0)


def test_nothing_but_near_ties_is_no_share():
    found = Fidelity()
    found.add(torch.tensor([[1.0, 1.1]]), torch.tensor([[1.0, 1.1]]), torch.tensor([0]))
    assert found.figures()["top1_without_near_ties"] is None


@pytest.fixture(scope="module")
def verifiers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    backend = ReferenceBackend()
    dense = open_checkpoint(tiny.write_folder(folder / "dense", "llama"))
    int8 = open_checkpoint(tiny.write_quantized(folder / "int8", "llama"))
    return load_verifier(dense, "bf16", "bf16", backend), load_verifier(
        int8, "w8a8", "w8a8", backend
    )


def direct(verifier, tokens):
    """Logits of every row in one pass."""
    cache = verifier.new_cache(len(tokens))
    batch = RaggedBatch.chunk(tokens, 0, cache.open(len(tokens)))
    return verifier.verify(batch, cache).logits.tensor[: len(tokens)].clone()


@pytest.mark.parametrize("start", [1, 7, 8, 9, 20, 29])
def test_chunked_reading_equals_one_pass(start, verifiers, monkeypatch):
    monkeypatch.setattr(fidelity, "CHUNK", 8)
    tokens = [(7 * i * i + 3) % 97 for i in range(30)]
    (found,) = compare(verifiers[0], [verifiers[1]], [Passage(tokens, start)])
    expected = Fidelity()
    logits = [direct(verifier, tokens)[start - 1 : -1] for verifier in verifiers]
    expected.add(*logits, torch.tensor(tokens[start:]))
    assert found.tokens == 30 - start
    assert found.figures() == pytest.approx(expected.figures(), rel=1e-9)
    assert found.divergence > 0


def test_a_verifier_is_wholly_faithful_to_itself(verifiers):
    tokens = [(5 * i) % 97 for i in range(20)]
    (found,) = compare(verifiers[0], [verifiers[0]], [Passage(tokens, 1), Passage(tokens[3:], 1)])
    figures = found.figures()
    assert figures["tokens"] == 19 + 16
    assert figures["kl"] == 0.0 and figures["top1"] == 1.0
    assert figures["perplexity"] == figures["reference_perplexity"]


def test_windows_cover_the_text():
    assert windows([1, 2, 3, 4, 5], [], 2) == [Passage([1, 2], 1), Passage([3, 4], 1)]
    assert windows([1, 2, 3, 4, 5], [0], 3) == [
        Passage([0, 1, 2], 1),
        Passage([0, 3, 4], 1),
        Passage([0, 5], 1),
    ]
    assert windows([], [0], 3) == []
    with pytest.raises(QuasarError):
        windows([1, 2], [0], 1)
