"""Smoothing scales by search: a closed form ranks the candidates, true products judge the best.

Rounding to steps of d adds noise of variance d^2 / 12. A token's step is max_j |x_tj / s_j| / 127,
a weight's is max_j |W_ij s_j| / q over its row or group. With token weights omega_t (sum 1),
e_j = sum_t omega_t x_tj^2 and c_j = sum_i W_ij^2 the noise in all outputs of a group of linears is,
but for the factor 1/12 and the small product of both,

    J(s) = sum_t omega_t max_j (x_tj / s_j)^2 / 127^2 * sum_j s_j^2 c_j
         + sum_g sum_i max_{j in g} (W_ij s_j)^2 / q^2 * sum_{j in g} e_j / s_j^2

where g runs over the groups of input channels that share a weight scale (one for W8A8). It costs
O(tokens * in + out * in), no product, so hundreds of candidates are affordable. They are

    a^alpha / w^beta, r^alpha / w^beta    a = max |x_j|, r = rms x_j, w = max_i |W_ij|:
                                          SmoothQuant (arXiv 2211.10438) and AWQ (2306.00978)
    max(1, a / t)                         Outlier Suppression+ (2304.09145): only what exceeds t
    1                                     no smoothing

Tokens count by the share of noise that they would notice: noise in the output of `o` and `down` is
added to the residual stream, and the norms that read it divide by its size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from quasar.kernels.reference import quantize_rows
from quasar.models.config import ModelConfig
from quasar.quantization.calibrate import GroupSample, Inputs
from quasar.quantization.smooth import (
    balance,
    column_absmax,
    nearest_power_of_two,
    over_query_heads,
    to_query_heads,
)
from quasar.quantization.weights import WeightFormat, by_group, covering_grid

ALPHAS = tuple(i / 10 for i in range(2, 11))
BETAS = tuple(i / 10 for i in range(0, 9, 2))
THRESHOLDS = tuple(0.003 * 1.4**i for i in range(17))
"""Shares of the largest channel maximum, up to 0.65."""
FINALISTS = 4
"""Candidates besides the identity whose products are computed."""
EXTREME = 4.0
"""What a candidate may do to `Surrogate.extreme`."""
IDENTITY_MARGIN = 0.01
"""What a candidate must win by to be taken at all."""
RANKING_TOKENS, CHECKING_TOKENS = 512, 256
WEIGHT_ROWS = 512
"""Rows of W that stand for all in the surrogate, evenly spaced."""


@dataclass(frozen=True, slots=True)
class Surrogate:
    """J(s) of one group of linears. Scales s are [in], one for each input channel."""

    inputs: Tensor
    """|x| of some tokens, [tokens, in]."""
    token_weight: Tensor
    """[tokens], sum 1."""
    energy: Tensor
    """e [in]."""
    column_energy: Tensor
    """c [in]."""
    rows: Tensor
    """|W| of some rows, [rows, in]."""
    row_share: float
    """Rows of W that each of these stands for."""
    format: WeightFormat

    @classmethod
    def of(cls, inputs: Inputs, weights: Sequence[Tensor], format: WeightFormat) -> Surrogate:
        """weights [out, in] fp32: those of every linear of the group."""
        count = sum(weight.shape[0] for weight in weights)
        step = max(1, count // WEIGHT_ROWS)
        some = torch.cat([weight[::step] for weight in weights]).abs()
        return cls(
            inputs=inputs.rows.abs(),
            token_weight=inputs.token_weight,
            energy=inputs.energy(),
            column_energy=torch.stack([weight.square().sum(dim=0) for weight in weights]).sum(
                dim=0
            ),
            rows=some,
            row_share=count / some.shape[0],
            format=format,
        )

    def __call__(self, scale: Tensor) -> float:
        size = self.format.group_size or scale.shape[0]
        steps = (self.inputs / scale).amax(dim=1) / 127
        squares = scale.square()
        activations = self.token_weight @ steps.square() * (squares @ self.column_energy)
        groups = scale.shape[0] // size
        maxima = by_group(self.rows * scale, groups).amax(dim=2) / self.format.half_range
        energy = (self.energy / squares).view(-1, size).sum(dim=1)
        weights = self.row_share * (maxima.square().sum(dim=0) @ energy)
        return float(activations + weights)

    def extreme(self, scale: Tensor, absmax: Tensor) -> float:
        """Noise of the rounded activations of a token with the largest |x| [in] of all.

        The few tokens with massive activations are seldom among `inputs`, and a channel that is
        large in them alone looks as if it could be scaled up.
        """
        return float((absmax / scale).amax().square() * (scale.square() @ self.column_energy))


def unchanged(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True, slots=True)
class Candidate:
    """Scales [in] of one group and how they were found."""

    label: str
    scale: Tensor


@dataclass(frozen=True, slots=True)
class Shape:
    """What scales may be: `pool` makes one size of those channels that must share a scale, and
    `spread` turns the scales found for these into scales [in]."""

    pool: Callable[[Tensor], Tensor] = unchanged
    spread: Callable[[Tensor], Tensor] = unchanged


def shape_of(group: str, config: ModelConfig) -> Shape:
    """`o`: powers of two, equal for the query heads that share a kv head. Others are free."""
    if group != "o":
        return Shape()
    return Shape(
        lambda x: over_query_heads(x, config),
        lambda scale: to_query_heads(nearest_power_of_two(scale), config),
    )


def search_scales(
    weights: Sequence[Tensor], sample: GroupSample, format: WeightFormat, shape: Shape
) -> Candidate | None:
    """The best scales for linears [out, in] fp32 of one input; None: no smoothing is as good."""
    surrogate = Surrogate.of(sample.fitting.thinned(RANKING_TOKENS), weights, format)
    most = EXTREME * surrogate.extreme(torch.ones_like(sample.absmax), sample.absmax)
    sound = [
        candidate
        for candidate in candidates(weights, sample, shape)
        if surrogate.extreme(candidate.scale, sample.absmax) <= most
    ]
    ranked = sorted(sound, key=lambda c: surrogate(c.scale))
    noise = Noise.of(sample.checking.thinned(CHECKING_TOKENS), weights, format)
    best, least = None, (1 - IDENTITY_MARGIN) * noise(torch.ones_like(sample.absmax))
    for candidate in ranked[:FINALISTS]:
        found = noise(candidate.scale)
        if found < least:
            best, least = candidate, found
    return best


def candidates(weights: Sequence[Tensor], sample: GroupSample, shape: Shape) -> Iterator[Candidate]:
    """All but the identity."""
    sizes = column_absmax(*weights), sample.absmax, sample.fitting.energy().sqrt()
    for label, scale in _families(*map(shape.pool, sizes)):
        yield Candidate(label, shape.spread(scale))


def _families(weight: Tensor, absmax: Tensor, rms: Tensor) -> Iterator[tuple[str, Tensor]]:
    for (symbol, size), alpha, beta in product((("a", absmax), ("r", rms)), ALPHAS, BETAS):
        yield f"{symbol}^{alpha:g} / w^{beta:g}", balance(size, weight, alpha, beta)
    for share in THRESHOLDS:
        threshold = (absmax.max() * share).clamp_min(torch.finfo(torch.float32).tiny)
        yield f"max(1, a / {share:.3g} max a)", (absmax / threshold).clamp_min(1)


@dataclass(frozen=True, slots=True)
class Noise:
    """Relative square error of the quantised products, summed over the linears of a group."""

    inputs: Inputs
    weights: Sequence[Tensor]
    exact: Sequence[Tensor]
    """[rows, out] of each linear."""
    format: WeightFormat

    @classmethod
    def of(cls, inputs: Inputs, weights: Sequence[Tensor], format: WeightFormat) -> Noise:
        return cls(inputs, weights, [F.linear(inputs.rows, w) for w in weights], format)

    def __call__(self, scale: Tensor) -> float:
        codes, step = quantize_rows(self.inputs.rows / scale)
        rounded, total = codes.float() * step, 0.0
        for weight, exact in zip(self.weights, self.exact, strict=True):
            scaled = weight * scale
            grid = covering_grid(scaled, self.format)
            error = self._energy(F.linear(rounded, grid.values(grid.codes(scaled))) - exact)
            total += error / max(self._energy(exact), 1e-30)
        return total

    def _energy(self, outputs: Tensor) -> float:
        return float(self.inputs.token_weight @ outputs.square().sum(dim=1))
