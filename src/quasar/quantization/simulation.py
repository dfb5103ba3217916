"""What a quantised layer computes, over whole texts, and how far its predictions lie from BF16.

The products are those of a verification pass: INT8 codes a row, an exact integer sum, the scales in
fp32. Measured on 2 cores of a Zen 5 machine the integer product of torch runs at 800 GMAC-ops/s
against 190 of fp32, so simulating costs a quarter of the BF16 arm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

import torch
from torch import Tensor

from quasar.kernels.base import Int8Weight
from quasar.kernels.reference import quantize_rows
from quasar.models.config import ModelConfig
from quasar.models.layer import Layer, head_chunks
from quasar.quantization.weights import QuantizedLayer

HEAD_CHUNK, POSITIONS = 4096, 256
"""Vocabulary rows by text positions in one tile of logits: 4 MB."""


@dataclass(frozen=True, slots=True)
class Int8Linear:
    """x [rows, in] fp32 -> [rows, out]: INT8 activations a row, INT8 weights."""

    weight: Int8Weight

    def __call__(self, x: Tensor) -> Tensor:
        codes, scale = quantize_rows(x)
        sums = torch._int_mm(codes, self.weight.codes.t())
        product = sums.float() * self.weight.scale * scale
        return product if self.weight.bias is None else product + self.weight.bias


def simulated(config: ModelConfig, index: int, layer: QuantizedLayer) -> Layer:
    """The layer as a W8A8 verifier computes it, but for the rounding of K and V in its cache."""
    return Layer(config, index, layer.norms, {n: Int8Linear(w) for n, w in layer.linears.items()})


@dataclass(frozen=True, slots=True)
class Fidelity:
    """How one model predicts a text, beside the BF16 model."""

    kl: float
    """Mean KL divergence of its next-token distribution from that of BF16, in nats."""
    top1: float
    """Share of positions whose most likely token is that of BF16."""
    perplexity: float


class _Scores:
    """Running statistics of one arm over chunks of the vocabulary; all [positions]."""

    def __init__(self, positions: int) -> None:
        self.logsumexp = torch.full((positions,), -math.inf)
        self.best = torch.full((positions,), -math.inf)
        self.argmax = torch.zeros(positions, dtype=torch.int64)
        self.target_logit = torch.zeros(positions)
        self.excess = torch.zeros(positions)
        """E_p[z_reference - z] over the part seen, p the reference's distribution on it."""

    def add(self, start: int, logits: Tensor, targets: Tensor) -> None:
        best, index = logits.max(dim=1)
        self.argmax = torch.where(best > self.best, index + start, self.argmax)
        self.best = torch.maximum(best, self.best)
        self.logsumexp = torch.logaddexp(self.logsumexp, logits.logsumexp(dim=1))
        rows = ((targets >= start) & (targets < start + logits.shape[1])).nonzero()[:, 0]
        self.target_logit[rows] = logits[rows, targets[rows] - start]

    def sums(self, reference: _Scores) -> Tensor:
        """Sums over positions, fp64: KL divergence, agreeing tokens, negative log-likelihood.

        KL(p | q) = E_p[log p - log q] = E_p[z_p - z_q] - lse_p + lse_q.
        """
        kl = self.excess - reference.logsumexp + self.logsumexp
        agree = self.argmax == reference.argmax
        return torch.stack(
            [x.double().sum() for x in (kl, agree, self.logsumexp - self.target_logit)]
        )


class _Positions:
    """A slice of the text in all arms."""

    def __init__(self, arms: Sequence[Tensor], targets: Tensor) -> None:
        self.arms, self.targets = arms, targets
        self.scores = [_Scores(len(targets)) for _ in arms]

    def add(self, start: int, rows: Tensor) -> None:
        """rows [chunk, hidden] fp32: the head from token id `start` on."""
        reference, before = self.scores[0], self.scores[0].logsumexp
        expected = self.arms[0] @ rows.t()
        reference.add(start, expected, self.targets)
        kept = (before - reference.logsumexp).exp()
        weights = (expected - reference.logsumexp[:, None]).exp_()
        for arm, score in zip(self.arms[1:], self.scores[1:], strict=True):
            logits = arm @ rows.t()
            score.add(start, logits, self.targets)
            score.excess = score.excess * kept + (weights * (expected - logits)).sum(dim=1)

    def sums(self) -> Tensor:
        return torch.stack([score.sums(self.scores[0]) for score in self.scores])


def compare(
    arms: Sequence[Tensor],
    head: Tensor,
    targets: Tensor,
    workers: Executor,
    progress: Callable[[int, int], None],
) -> list[Fidelity]:
    """Fidelity of each arm to arm 0, in one stream over the head.

    arms: final-norm outputs [positions, hidden] fp32; head [vocab, hidden] bf16; targets
    [positions], the text's next tokens. Slices of positions are spread over `workers`.
    """
    cuts = [torch.split(x, POSITIONS) for x in (*arms, targets)]
    parts = [_Positions(states, ids) for *states, ids in zip(*cuts, strict=True)]
    for start, rows in head_chunks(head, HEAD_CHUNK):
        list(workers.map(lambda part, start=start, rows=rows: part.add(start, rows), parts))
        progress(start + len(rows), len(head))
    means = torch.stack([part.sums() for part in parts]).sum(dim=0) / len(targets)
    return [Fidelity(kl, top1, _perplexity(nll)) for kl, top1, nll in means.tolist()]


def _perplexity(nll: float) -> float:
    """exp(nll), infinite where it leaves fp64."""
    try:
        return math.exp(nll)
    except OverflowError:
        return math.inf
