"""How sure a measured ratio or difference is: the paired bootstrap over prompts.

Two configurations answered the same n prompts. Of each prompt we have a gain (tokens) and a cost
(seconds, or passes), so a configuration's rate is sum(gain) / sum(cost). Prompts differ far more
than configurations do; resampling *prompts*, the same ones for both sides, keeps that difference
out of the interval (Efron and Tibshirani, An Introduction to the Bootstrap, 1993).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 2000
LEVELS = (2.5, 97.5)

Column = NDArray[np.float64]
Sums = tuple[Column, Column]
"""Gain and cost of each resample."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A ratio or difference as measured, and its 95 % bootstrap percentile interval."""

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
    return _interval(_ratios, a, b, resamples)


def paired_difference(a: Rate, b: Rate, resamples: int = RESAMPLES) -> Interval | None:
    """Rate of `a` minus rate of `b`. None where either has no rate: nothing spent."""
    return _interval(_differences, a, b, resamples)


def _interval(
    compare: Callable[[Sums, Sums], Column], a: Rate, b: Rate, resamples: int
) -> Interval | None:
    n = a.gain.size
    assert a.cost.size == b.gain.size == b.cost.size == n
    everything = np.arange(n)[None]
    measured = compare(_sums(a, everything), _sums(b, everything))
    if measured.size == 0:
        return None
    picks = np.random.default_rng(0).integers(0, n, (resamples, n))
    low, high = np.percentile(compare(_sums(a, picks), _sums(b, picks)), LEVELS)
    return Interval(float(measured[0]), float(low), float(high))


def _sums(rate: Rate, picks: NDArray[np.int64]) -> Sums:
    """Gain and cost of each row of picks [resamples, n]."""
    return rate.gain[picks].sum(axis=1), rate.cost[picks].sum(axis=1)


def _ratios(a: Sums, b: Sums) -> Column:
    """The ratio of each resample that has one."""
    (gain_a, cost_a), (gain_b, cost_b) = a, b
    valid = (cost_a > 0) & (gain_b > 0) & (cost_b > 0)
    ratios: Column = gain_a[valid] * cost_b[valid] / (cost_a[valid] * gain_b[valid])
    return ratios


def _differences(a: Sums, b: Sums) -> Column:
    """The difference of each resample that has one."""
    (gain_a, cost_a), (gain_b, cost_b) = a, b
    valid = (cost_a > 0) & (cost_b > 0)
    differences: Column = gain_a[valid] / cost_a[valid] - gain_b[valid] / cost_b[valid]
    return differences
