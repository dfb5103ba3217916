"""What a quantised layer computes, over whole texts, and how far its predictions lie from BF16.

The W8A8 products are those of a verification pass: INT8 codes a row, an exact integer sum, the
scales in fp32. W4A8 products have the same factors but are summed in fp32. With VNNI the integer
product of torch takes a quarter of the time of fp32 (2 cores of Zen 5: 800 against 190 GMAC/s).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from quasar.kernels.base import Int4Weight, Int8Weight, LinearWeight
from quasar.kernels.reference import integer_product, quantize_rows
from quasar.models.config import ModelConfig
from quasar.models.layer import FloatLinear, Layer, Product, head_chunks
from quasar.models.tensors import GROUPS
from quasar.quantization.hadamard import rotate_with_matrix
from quasar.quantization.head import quantize_head
from quasar.quantization.smooth import Scales, output_scales
from quasar.quantization.weights import QuantizedLayer, dequantize

HEAD_CHUNK, POSITIONS = 4096, 256
"""Vocabulary rows by text positions in one tile of logits: 4 MB."""


@dataclass(frozen=True, slots=True)
class Int8Linear:
    """x [rows, in] fp32 -> [rows, out]: INT8 activations a row, INT8 weights."""

    weight: Int8Weight

    def __call__(self, x: Tensor) -> Tensor:
        codes, scale = prepared(x, self.weight.rotation)
        product = integer_product(codes, self.weight.codes).float() * self.weight.scale * scale
        return product if self.weight.bias is None else product + self.weight.bias


class Int4Linear:
    """x [rows, in] fp32 -> [rows, out]: INT8 activations a row, 4-bit weights.

    The order of the sum is not that of a kernel, so the last bits differ.
    """

    def __init__(self, weight: Int4Weight) -> None:
        self.values, self.bias, self.rotation = dequantize(weight), weight.bias, weight.rotation

    def __call__(self, x: Tensor) -> Tensor:
        codes, scale = prepared(x, self.rotation)
        product = F.linear(codes.float(), self.values) * scale
        return product if self.bias is None else product + self.bias


def prepared(x: Tensor, rotation: int) -> tuple[Tensor, Tensor]:
    """What a linear makes of its inputs [rows, in]: codes int8, and a scale a row [rows, 1]."""
    if rotation:
        x = x.clone()
        rotate_with_matrix(x, rotation)
    return quantize_rows(x)


def simulated_linear(weight: LinearWeight | Int4Weight) -> Product:
    if isinstance(weight, Int8Weight):
        return Int8Linear(weight)
    if isinstance(weight, Int4Weight):
        return Int4Linear(weight)
    return FloatLinear(weight.weight.float(), weight.bias)


def simulated(config: ModelConfig, index: int, layer: QuantizedLayer) -> Layer:
    """The layer as a verifier computes it, but for the rounding of K and V in its cache."""
    linears = {name: simulated_linear(weight) for name, weight in layer.linears.items()}
    return Layer(config, index, layer.norms, linears)


def relative_errors(
    tensors: Mapping[str, Tensor],
    layer: QuantizedLayer,
    scales: Scales,
    inputs: Mapping[str, Tensor],
    config: ModelConfig,
    workers: Executor,
) -> dict[str, float]:
    """By linear |quantised output - output| / |output|, in the units of the unsmoothed layer.

    tensors: the fp32 layer; inputs: [rows, in] by group; biases are left out.
    """
    outputs = output_scales(scales, config)

    def error(linear: tuple[str, str]) -> float:
        group, name = linear
        rows = inputs[group]
        expected = F.linear(rows, tensors[f"{name}.weight"])
        smoothed = rows / scales[group] if group in scales else rows
        product = simulated_linear(replace(layer.linears[name], bias=None))(smoothed)
        difference = product * outputs.get(name, torch.ones(())) - expected
        # In fp64: squares of large outputs leave fp32.
        size, missed = (x.double().norm() for x in (expected, difference))
        return float(missed / size.clamp_min(1e-30))

    linears = [(group, name) for group, names in GROUPS.items() for name in names]
    found = workers.map(error, linears)
    return {name: value for (_, name), value in zip(linears, found, strict=True)}


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

    def figures(self, reference: _Scores) -> Tensor:
        """[3, positions] fp64: KL divergence, agreement, negative log-likelihood.

        KL(p | q) = E_p[log p - log q] = E_p[z_p - z_q] - lse_p + lse_q.
        """
        kl = self.excess - reference.logsumexp + self.logsumexp
        agree = self.argmax == reference.argmax
        return torch.stack([x.double() for x in (kl, agree, self.logsumexp - self.target_logit)])


@dataclass(frozen=True, slots=True)
class Arm:
    """A model at the end of a text: its final norm's outputs [positions, hidden] fp32.

    `head` [vocab, hidden] bf16 takes the place of the one that the arms share.
    """

    hidden: Tensor
    int8_head: bool = False
    head: Tensor | None = None

    def split(self, size: int) -> list[Arm]:
        return [replace(self, hidden=part) for part in torch.split(self.hidden, size)]

    def logits(self, rows: Tensor, start: int = 0) -> Tensor:
        """rows [chunk, hidden] fp32 of the shared head, from token id `start` on ->
        [positions, chunk]."""
        if self.head is not None:
            rows = self.head[start : start + len(rows)].float()
        if not self.int8_head:
            return self.hidden @ rows.t()
        return Int8Linear(quantize_head(rows, rotate_with_matrix))(self.hidden)


class _Positions:
    """A slice of the text in all arms."""

    def __init__(self, arms: Sequence[Arm], targets: Tensor) -> None:
        self.arms, self.targets = arms, targets
        self.scores = [_Scores(len(targets)) for _ in arms]

    def add(self, start: int, rows: Tensor) -> None:
        """rows [chunk, hidden] fp32: the head from token id `start` on."""
        reference, before = self.scores[0], self.scores[0].logsumexp
        expected = self.arms[0].logits(rows, start)
        reference.add(start, expected, self.targets)
        kept = (before - reference.logsumexp).exp()
        weights = (expected - reference.logsumexp[:, None]).exp_()
        for arm, score in zip(self.arms[1:], self.scores[1:], strict=True):
            logits = arm.logits(rows, start)
            score.add(start, logits, self.targets)
            score.excess = score.excess * kept + (weights * (expected - logits)).sum(dim=1)

    def figures(self) -> Tensor:
        return torch.stack([score.figures(self.scores[0]) for score in self.scores])


def compare_positions(
    arms: Sequence[Arm],
    head: Tensor,
    targets: Tensor,
    workers: Executor,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Tensor:
    """KL divergence from arm 0, agreement with it (0 or 1) and negative log-likelihood.

    head [vocab, hidden] bf16; targets [positions], the text's next tokens. In one stream over the
    head; slices of positions are spread over `workers`. The result is [arms, 3, positions] fp64.
    """
    cuts = zip(*(arm.split(POSITIONS) for arm in arms), strict=True)
    parts = [
        _Positions(x, ids) for x, ids in zip(cuts, torch.split(targets, POSITIONS), strict=True)
    ]
    for start, rows in head_chunks(head, HEAD_CHUNK):
        list(workers.map(lambda part, start=start, rows=rows: part.add(start, rows), parts))
        progress(start + len(rows), len(head))
    return torch.cat([part.figures() for part in parts], dim=2)


def compare(
    arms: Sequence[Arm],
    head: Tensor,
    targets: Tensor,
    workers: Executor,
    progress: Callable[[int, int], None],
) -> list[Fidelity]:
    """Fidelity of each arm to arm 0; arguments as in `compare_positions`."""
    means = compare_positions(arms, head, targets, workers, progress).mean(dim=2)
    return [Fidelity(kl, top1, _perplexity(nll)) for kl, top1, nll in means.tolist()]


def _perplexity(nll: float) -> float:
    """exp(nll), infinite where it leaves fp64."""
    try:
        return math.exp(nll)
    except OverflowError:
        return math.inf
