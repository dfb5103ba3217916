"""The paired bootstrap, against cases whose answer is known."""

from __future__ import annotations

import numpy as np
import pytest

from quasar.bench.statistics import Rate, paired_ratio


def rate(gain, cost):
    return Rate(np.asarray(gain, np.float64), np.asarray(cost, np.float64))


def test_a_constant_ratio_has_no_spread_however_prompts_differ():
    cost = np.array([1.0, 50.0, 3.0, 700.0])
    gain = np.array([9.0, 2.0, 80.0, 4.0])
    found = paired_ratio(rate(gain, cost / 2), rate(gain, cost))
    assert (found.mean, found.low, found.high) == pytest.approx((2.0, 2.0, 2.0))


def test_the_ratio_is_of_totals():
    found = paired_ratio(rate([10, 90], [1, 1]), rate([10, 10], [1, 1]))
    assert found.mean == pytest.approx(100 / 20)


def test_the_interval_is_that_of_the_mean_of_many():
    """With unit costs and a base of ones the ratio is a mean: its 95 % interval is known."""
    gain = np.random.default_rng(1).normal(10.0, 2.0, 400)
    ones = np.ones(400)
    found = paired_ratio(rate(gain, ones), rate(ones, ones))
    error = gain.std() / 20
    assert found.mean == pytest.approx(gain.mean())
    assert found.low == pytest.approx(gain.mean() - 1.96 * error, abs=0.15 * error)
    assert found.high == pytest.approx(gain.mean() + 1.96 * error, abs=0.15 * error)


def test_it_is_the_same_each_time():
    a, b = rate([1, 2, 3], [2, 1, 2]), rate([1, 1, 1], [1, 1, 2])
    assert paired_ratio(a, b) == paired_ratio(a, b)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (rate([1], [0]), rate([1], [1])),
        (rate([1], [1]), rate([0], [1])),
        (rate([1], [1]), rate([1], [0])),
        (rate([], []), rate([], [])),
    ],
)
def test_no_rate_no_ratio(a, b):
    assert paired_ratio(a, b) is None


def test_resamples_without_a_rate_are_left_out():
    found = paired_ratio(rate([4, 0], [1, 0]), rate([2, 0], [1, 0]))
    assert (found.mean, found.low, found.high) == (2.0, 2.0, 2.0)
