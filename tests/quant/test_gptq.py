"""GPTQ: less error in the outputs than rounding to nearest, and the same where it cannot help."""

from __future__ import annotations

import pytest
import torch

from quasar.quantization import gptq
from quasar.quantization.gptq import DAMPING, InverseFactor, compensated_codes
from quasar.quantization.weights import WeightFormat, covering_grid

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
    inverse = InverseFactor.of(moments.clone())
    codes = compensated_codes(weight, grid, inverse)
    assert torch.equal(codes, codes.round())
    assert codes.min() >= grid.low and codes.max() <= grid.high
    nearest = output_error(weight, grid.values(grid.codes(weight)), moments)
    assert output_error(weight, grid.values(codes), moments) < 0.5 * nearest


def test_rows_are_rounded_some_at_a_time(monkeypatch):
    inverse = InverseFactor.of(correlated())
    weight = torch.randn(50, 192, generator=torch.Generator().manual_seed(12))
    grid = covering_grid(weight, WeightFormat(4, 32))
    expected = compensated_codes(weight, grid, inverse)
    monkeypatch.setattr(gptq, "ROWS", 16)
    assert (compensated_codes(weight, grid, inverse) == expected).float().mean() > 0.99


@pytest.mark.parametrize("format", FORMATS, ids=lambda f: f"{f.bits}-{f.group_size}")
def test_independent_inputs_are_rounded_to_nearest(format):
    """A diagonal H leaves nothing to make up for."""
    energy = torch.rand(192, generator=torch.Generator().manual_seed(13)) + 0.1
    weight = torch.randn(30, 192, generator=torch.Generator().manual_seed(14))
    grid = covering_grid(weight, format)
    codes = compensated_codes(weight, grid, InverseFactor.of(torch.diag(energy)))
    assert torch.equal(codes, grid.codes(weight))


@pytest.mark.parametrize("dead", [3, 192])
def test_channels_without_energy_are_rounded_to_nearest(dead):
    moments = correlated()
    moments[:dead] = 0
    moments[:, :dead] = 0
    weight = torch.randn(20, 192, generator=torch.Generator().manual_seed(15))
    grid = covering_grid(weight, WeightFormat(4, 32))
    codes = compensated_codes(weight, grid, InverseFactor.of(moments.clone()))
    assert torch.equal(codes[:, :dead], grid.codes(weight)[:, :dead])


def test_the_factor_is_that_of_the_damped_inverse():
    moments = correlated()
    inverse = InverseFactor.of(moments.clone())
    damped = moments + DAMPING * moments.diagonal().mean() * torch.eye(192)
    product = inverse.factor.double().t() @ inverse.factor.double()
    expected = torch.linalg.inv(damped.double())[inverse.order][:, inverse.order]
    assert torch.allclose(product, expected, rtol=1e-3, atol=1e-4 * float(expected.max()))
    assert torch.equal(inverse.factor, inverse.factor.triu())
