"""How sure a measured ratio is: the paired bootstrap over prompts.

Two configurations answered the same n prompts. Of each prompt we have a gain (tokens) and a cost
(seconds, or passes), so a configuration's rate is sum(gain) / sum(cost). Prompts differ far more
than configurations do; resampling *prompts*, the same ones for both sides, keeps that difference
out of the ratio's interval (Efron and Tibshirani, An Introduction to the Bootstrap, 1993).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 2000
LEVELS = (2.5, 97.5)

Column = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Interval:
    """A ratio as measured, and its 95 % bootstrap percentile interval."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Rate:
    """Gain and cost of each prompt, in the same order for every configuration."""

    gain: Column
    cost: Column


def paired_ratio(a: Rate, b: Rate, resamples: int = RESAMPLES) -> Interval | None:
    """Rate of `a` over rate of `b`. None where either has no rate: nothing gained or spent."""
    n = a.gain.size
    assert a.cost.size == b.gain.size == b.cost.size == n
    measured = _ratios(a, b, np.arange(n)[None])
    if measured.size == 0:
        return None
    picks = np.random.default_rng(0).integers(0, n, (resamples, n))
    low, high = np.percentile(_ratios(a, b, picks), LEVELS)
    return Interval(float(measured[0]), float(low), float(high))


def _ratios(a: Rate, b: Rate, picks: NDArray[np.int64]) -> Column:
    """The ratio of each row of picks [resamples, n] that has one."""
    gain_a, cost_a, gain_b, cost_b = (
        column[picks].sum(axis=1) for column in (a.gain, a.cost, b.gain, b.cost)
    )
    valid = (cost_a > 0) & (gain_b > 0) & (cost_b > 0)
    ratios: Column = gain_a[valid] * cost_b[valid] / (cost_a[valid] * gain_b[valid])
    return ratios
