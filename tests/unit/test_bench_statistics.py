"""The paired bootstrap, against cases whose answer is known."""

from __future__ import annotations

import numpy as np
import pytest

from quasar.bench.statistics import Rate, paired_difference, paired_ratio


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


def test_a_constant_difference_has_no_spread_however_prompts_differ():
    right = np.array([0.0, 1.0, 0.0, 1.0, 1.0])
    ones = np.ones(5)
    found = paired_difference(rate(right + 0.25, ones), rate(right, ones))
    assert (found.mean, found.low, found.high) == pytest.approx((0.25, 0.25, 0.25))


def test_the_interval_of_a_difference_is_that_of_the_mean_of_many():
    """n questions, of which one side alone has b and the other alone c: the variance of the
    difference (b - c) / n is (b + c - (b - c)^2 / n) / n^2."""
    n, b, c = 400, 30, 50
    first = np.concatenate([np.ones(b), np.zeros(c), np.ones(n - b - c)])
    second = np.concatenate([np.zeros(b), np.ones(c), np.ones(n - b - c)])
    found = paired_difference(rate(second, np.ones(n)), rate(first, np.ones(n)))
    error = (c + b - (c - b) ** 2 / n) ** 0.5 / n
    assert found.mean == pytest.approx((c - b) / n)
    assert found.low == pytest.approx(found.mean - 1.96 * error, abs=0.15 * error)
    assert found.high == pytest.approx(found.mean + 1.96 * error, abs=0.15 * error)


def test_nothing_gained_is_a_difference_but_nothing_spent_is_none():
    assert paired_difference(rate([0], [1]), rate([1], [2])).mean == -0.5
    assert paired_difference(rate([1], [0]), rate([1], [1])) is None
    assert paired_difference(rate([], []), rate([], [])) is None
