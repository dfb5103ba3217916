"""GPTQ: less error in the outputs than rounding to nearest, and the same where it cannot help."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quasar.quantization import gptq
from quasar.quantization.gptq import (
    BLOCK,
    DAMPING,
    SWEEPS,
    Objective,
    centre,
    compensated_codes,
    refined,
    rounded,
)
from quasar.quantization.weights import Grid, WeightFormat, covering_grid, short

FORMATS = [WeightFormat(), WeightFormat(4, 32), WeightFormat(4, 64)]


def correlated(channels=192, rank=40):
    """Moments of inputs that mostly move together, as in a real model."""
    generator = torch.Generator().manual_seed(11)
    x = torch.randn(2000, rank, generator=generator) @ torch.randn(
        rank, channels, generator=generator
    )
    x += 0.3 * torch.randn(2000, channels, generator=generator)
    return x.t() @ x / 2000


def output_error(weight, values, moments):
    difference = values - weight
    return float(((difference @ moments) * difference).sum())


@pytest.mark.parametrize("format", FORMATS, ids=lambda f: f"{f.bits}-{f.group_size}")
def test_outputs_are_closer_than_by_rounding(format):
    moments = correlated()
    weight = torch.randn(50, 192, generator=torch.Generator().manual_seed(12))
    grid = covering_grid(weight, format)
    objective = Objective.of(moments.clone())
    codes = compensated_codes(weight, grid, objective)
    assert torch.equal(codes, codes.round())
    assert codes.min() >= grid.low and codes.max() <= grid.high
    nearest = output_error(weight, grid.values(grid.codes(weight)), moments)
    assert output_error(weight, grid.values(codes), moments) < 0.5 * nearest


def test_rows_are_rounded_some_at_a_time(monkeypatch):
    objective = Objective.of(correlated())
    weight = torch.randn(50, 192, generator=torch.Generator().manual_seed(12))
    grid = covering_grid(weight, WeightFormat(4, 32))
    expected, codes = rounded(weight, grid, objective)
    first = compensated_codes(weight, grid, objective)
    assert torch.equal(codes, refined(weight, grid, first, objective)[1])
    monkeypatch.setattr(gptq, "ROWS", 16)
    found, chunked = rounded(weight, grid, objective)
    assert (chunked == codes).float().mean() > 0.98
    assert (found.scale == expected.scale).float().mean() > 0.98


@pytest.mark.parametrize("format", FORMATS, ids=lambda f: f"{f.bits}-{f.group_size}")
def test_independent_inputs_are_rounded_to_nearest(format):
    """A diagonal H leaves nothing to make up for."""
    energy = torch.rand(192, generator=torch.Generator().manual_seed(13)) + 0.1
    weight = torch.randn(30, 192, generator=torch.Generator().manual_seed(14))
    grid = covering_grid(weight, format)
    codes = compensated_codes(weight, grid, Objective.of(torch.diag(energy)))
    assert torch.equal(codes, grid.codes(weight))


@pytest.mark.parametrize("dead", [3, 192])
def test_channels_without_energy_are_rounded_to_nearest(dead):
    moments = correlated()
    moments[:dead] = 0
    moments[:, :dead] = 0
    weight = torch.randn(20, 192, generator=torch.Generator().manual_seed(15))
    grid = covering_grid(weight, WeightFormat(4, 32))
    codes = compensated_codes(weight, grid, Objective.of(moments.clone()))
    assert torch.equal(codes[:, :dead], grid.codes(weight)[:, :dead])


@pytest.fixture
def damped(monkeypatch):
    """So much that GPTQ leaves the refinement something to do on a few channels."""
    monkeypatch.setattr(gptq, "DAMPING", 0.5)


def row_errors(weight, values, moments):
    """(W - Q) H (W - Q)^T of each row, in fp64."""
    difference = (weight - values).double()
    return ((difference @ moments.double()) * difference).sum(dim=1)


def started(weight, format, moments, share=1.0):
    """A grid, the codes of GPTQ and the objective."""
    grid = covering_grid(weight, format, share)
    objective = Objective.of(moments.clone())
    return grid, compensated_codes(weight, grid, objective), objective


def twin(weight, grid, codes, moments):
    """`refined`, one row, group and channel at a time in fp64."""
    size = weight.shape[1] // grid.groups
    block = BLOCK // size * size if size <= BLOCK else BLOCK
    scale, codes, moments = grid.scale.clone(), codes.double(), moments.double()
    for row, code in enumerate(codes):
        w, zero = weight[row].double(), grid.zero[row, :, 0].double().repeat_interleave(size)

        def error(code, scale, w=w, zero=zero):
            difference = w - (code - zero) * scale.double().repeat_interleave(size)
            return float(difference @ moments @ difference)

        s = scale[row, :, 0]
        for start in [*range(0, len(w), block)] * SWEEPS:
            channels = range(start, min(start + block, len(w)))
            for j in channels:
                code[j] = best_code(code, s, j, grid, error)
            for group in {j // size: None for j in channels} if size <= BLOCK else ():
                s[group] = best_scale(code, s, group, error)
    return replace(grid, scale=scale), codes.float()


def best_code(code, scale, j, grid, error):
    def with_code(value):
        changed = code.clone()
        changed[j] = value
        return error(changed, scale)

    # GPTQ's codes of 8 bits are never as far from the best ones.
    near = range(max(grid.low, int(code[j]) - 15), min(grid.high, int(code[j]) + 15) + 1)
    return min(near, key=with_code)


def best_scale(code, scale, group, error):
    """A parabola through three points has its least value at the best scale."""

    def with_scale(value):
        changed = scale.double()
        changed[group] = value
        return error(code, changed)

    old = float(scale[group])
    left, middle, right = (with_scale(old * share) for share in (0.5, 1.0, 1.5))
    bend = left + right - 2 * middle
    if bend <= 0:
        return old
    found = float(short(torch.tensor(old + old / 4 * (left - right) / bend)))
    return found if found > 0 and with_scale(found) < middle else old


@pytest.mark.parametrize(
    ("format", "channels"),
    [(WeightFormat(), 160), (WeightFormat(4, 32), 160), (WeightFormat(4, 64), 192)],
    ids=lambda x: str(x),
)
def test_refined_as_one_row_and_channel_at_a_time(format, channels, damped):
    moments = correlated(channels)
    weight = torch.randn(8, channels, generator=torch.Generator().manual_seed(16))
    # A grid that is too narrow, so that many scales change.
    grid, codes, objective = started(weight, format, moments, share=0.8)
    found, expected = (
        f(weight, grid, codes, x) for f, x in ((refined, objective), (twin, objective.moments))
    )
    if format.bits == 4:
        assert (found[0].scale != grid.scale).float().mean() > 0.3
    # Near ties may go either way, and what follows in the row with them.
    same = (found[1] == expected[1]).all(dim=1) & (found[0].scale == expected[0].scale)[
        :, :, 0
    ].all(dim=1)
    assert same.float().mean() > 0.8
    errors = [row_errors(weight, g.values(c), objective.moments) for g, c in (found, expected)]
    torch.testing.assert_close(errors[0], errors[1], rtol=0.02, atol=0)


@st.composite
def problems(draw):
    """Weights, moments and a format, of odd shapes and with rows and channels of zeros."""
    format = draw(st.sampled_from([WeightFormat(), *(WeightFormat(4, n) for n in (32, 64, 128))]))
    size = format.group_size or 1
    channels = size * draw(st.integers(1, 400 // size))
    rows = draw(st.integers(1, 9))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    tokens = draw(st.integers(1, 2 * channels))
    mixed = torch.randn(tokens, channels, generator=generator)
    mixed += draw(st.floats(0, 5)) * torch.randn(tokens, 1, generator=generator)
    mixed *= torch.rand(channels, generator=generator) ** draw(st.integers(0, 4))
    mixed[:, torch.rand(channels, generator=generator) < draw(st.sampled_from([0, 0.1, 1]))] = 0
    weight = torch.randn(rows, channels, generator=generator)
    weight *= 10.0 ** draw(st.integers(-30, 3))
    weight[torch.rand(rows, generator=generator) < draw(st.sampled_from([0, 0.3]))] = 0
    return weight, format, mixed.t() @ mixed / tokens


@given(problems())
@settings(max_examples=100)
def test_refined_is_never_worse(problem):
    weight, format, moments = problem
    grid, codes, objective = started(weight, format, moments)
    given_grid, given_codes = grid.scale.clone(), codes.clone()
    found, refined_codes = refined(weight, grid, codes, objective)
    assert torch.equal(grid.scale, given_grid) and torch.equal(codes, given_codes)
    before = row_errors(weight, grid.values(codes), objective.moments)
    after = row_errors(weight, found.values(refined_codes), objective.moments)
    assert (after <= before * (1 + 1e-5)).all()
    assert torch.equal(refined_codes, refined_codes.round())
    assert refined_codes.min() >= grid.low and refined_codes.max() <= grid.high
    assert (found.scale >= torch.finfo(torch.float32).tiny).all()
    assert torch.equal(found.zero, grid.zero)
    if format.bits == 4:
        assert torch.equal(found.scale, short(found.scale))
    again, codes_again = refined(weight, grid, codes, objective)
    assert torch.equal(again.scale, found.scale) and torch.equal(codes_again, refined_codes)


@pytest.mark.parametrize("format", FORMATS, ids=lambda f: f"{f.bits}-{f.group_size}")
def test_refined_is_better_where_channels_move_together(format, damped):
    weight = torch.randn(50, 192, generator=torch.Generator().manual_seed(17))
    grid, codes, objective = started(weight, format, correlated())
    found, refined_codes = refined(weight, grid, codes, objective)
    before = row_errors(weight, grid.values(codes), objective.moments).sum()
    after = row_errors(weight, found.values(refined_codes), objective.moments).sum()
    assert after < 0.98 * before
    if format.bits == 4:
        assert not torch.equal(found.scale, grid.scale)


def test_scales_are_refitted():
    """Weights on a grid of another scale; independent inputs, so that codes stay as they are."""
    codes = torch.randint(0, 16, (8, 64), generator=torch.Generator().manual_seed(18)).float()
    scale = torch.full((8, 2, 1), 1.25)
    grid = Grid(scale, torch.full_like(scale, 8), 0, 15)
    weight = grid.values(codes)
    wrong = replace(grid, scale=scale * 0.95)
    found, refined_codes = refined(weight, wrong, codes, Objective.of(torch.eye(64)))
    assert torch.equal(refined_codes, codes)
    assert torch.equal(found.scale, scale)


def test_one_row_and_one_group():
    """The transpose of a row has its memory: what was given stays."""
    weight = torch.randn(1, 32, generator=torch.Generator().manual_seed(19))
    grid, codes, objective = started(weight, WeightFormat(4, 32), correlated(32))
    wrong = replace(grid, scale=grid.scale * 0.5)
    kept, given_codes = wrong.scale.clone(), codes.clone()
    found, refined_codes = refined(weight, wrong, codes, objective)
    assert not torch.equal(found.scale, kept) and not torch.equal(refined_codes, given_codes)
    assert torch.equal(wrong.scale, kept) and torch.equal(codes, given_codes)


def test_the_factor_is_that_of_the_damped_inverse():
    moments = correlated()
    centre(moments)
    objective = Objective.of(moments.clone())
    damped = moments + DAMPING * moments.diagonal().mean() * torch.eye(192)
    product = objective.factor.double().t() @ objective.factor.double()
    expected = torch.linalg.inv(damped.double())[objective.order][:, objective.order]
    assert torch.allclose(product, expected, rtol=1e-3, atol=1e-4 * float(expected.max()))
    assert torch.equal(objective.factor, objective.factor.triu())


@pytest.mark.parametrize("size", [2.0**-118, 2.0**120])
def test_a_common_factor_of_the_moments_changes_nothing(size):
    """Not even near the ends of fp32, where the inverse of H or the sum of its diagonal is none."""
    weight = torch.randn(20, 192, generator=torch.Generator().manual_seed(20))
    grid = covering_grid(weight, WeightFormat(4, 32))
    expected, codes = rounded(weight, grid, Objective.of(correlated()))
    found, same = rounded(weight, grid, Objective.of(correlated() * size))
    assert torch.equal(same, codes)
    assert torch.equal(found.scale, expected.scale)


def test_moments_below_the_normal_numbers_are_none():
    weight = torch.randn(20, 192, generator=torch.Generator().manual_seed(20))
    grid = covering_grid(weight, WeightFormat(4, 32))
    codes = compensated_codes(weight, grid, Objective.of(correlated() * 1e-43))
    assert torch.equal(codes, grid.codes(weight))
