"""Integer weights: how far they may lie from the fp32 ones, and the head in chunks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quasar.quantization import weights
from quasar.quantization.weights import (
    WeightFormat,
    clipped_grid,
    covering_grid,
    dequantize,
    grid_error,
    round_to_nearest,
)


@given(st.integers(0, 2**31), st.integers(1, 9), st.integers(1, 70), st.floats(-60, 60))
def test_error_is_at_most_half_a_step(seed, rows, columns, exponent):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator) * 2.0**exponent
    quantized = round_to_nearest(weight)
    step = quantized.scale[:, None]
    assert ((dequantize(quantized) - weight).abs() <= 0.5001 * step).all()
    assert quantized.codes.min() >= -127
    assert (quantized.codes.abs().amax(dim=1) == 127).all()


def test_rounds_to_even():
    quantized = round_to_nearest(torch.tensor([[127.0, 0.5, 1.5, -0.5, -2.5]]))
    assert quantized.codes.tolist() == [[127, 0, 2, 0, -2]]


def test_rows_without_size_get_a_positive_scale():
    weight = torch.tensor([[0.0, 0.0], [1e-44, -1e-44], [3.0, -1.0]])
    quantized = round_to_nearest(weight)
    assert quantized.scale[:2].tolist() == [1.0, 1.0]
    assert quantized.codes[:2].abs().max() == 0
    assert torch.isfinite(dequantize(quantized)).all()


def four_bits(weight, size=32):
    grid = covering_grid(weight, WeightFormat(4, size))
    return grid.pack(grid.codes(weight), None)


@given(st.integers(0, 2**31), st.sampled_from([32, 64, 128]), st.floats(-40, 40))
def test_four_bit_error_is_within_a_step(seed, size, exponent):
    """Half a step, and what rounding the scale (1/32) and the zero point adds at the ends."""
    generator = torch.Generator().manual_seed(seed)
    weight = (torch.randn(3, 256, generator=generator) + 0.5) * 2.0**exponent
    found = four_bits(weight, size)
    assert found.codes.dtype == found.zero.dtype == torch.uint8
    assert found.codes.max() <= 15 and found.zero.max() <= 15
    assert found.group_size == size
    step = found.scale.repeat_interleave(size, dim=1)
    assert ((dequantize(found) - weight).abs() <= 1.01 * step).all()
    inside = (found.codes > 0) & (found.codes < 15)
    assert ((dequantize(found) - weight).abs() <= 0.5001 * step)[inside].all()


def test_four_bit_sums_times_scales_are_exact():
    """The largest sum of a group of 128 has 18 bits, a scale 5: fp32 holds the product."""
    weight = torch.randn(40, 256, generator=torch.Generator().manual_seed(3))
    scale = four_bits(weight).scale
    mantissa, _ = torch.frexp(scale)
    assert ((mantissa * 32) == (mantissa * 32).round()).all()
    for size in (1, 128 * 15 * 127 - 1, 128 * 15 * 127):
        product = torch.tensor(float(size)) * scale
        assert torch.equal(product.double(), size * scale.double())


@pytest.mark.parametrize("sign", [1, -1])
def test_one_sided_groups_keep_zero_in_range(sign):
    weight = sign * (torch.rand(4, 64, generator=torch.Generator().manual_seed(4)) + 3)
    found = four_bits(weight)
    assert (found.zero == (0 if sign > 0 else 15)).all()
    assert ((dequantize(found) - weight).abs() / weight.abs()).max() < 0.1


def test_four_bit_groups_without_size():
    weight = torch.zeros(2, 64)
    weight[1, 32:] = 1e-44
    found = four_bits(weight)
    assert (found.scale == 1).all() and (found.codes == found.zero.repeat_interleave(32, 1)).all()
    assert dequantize(found).abs().max() == 0


@pytest.mark.parametrize("format", [WeightFormat(), WeightFormat(4, 32)], ids=["w8", "w4"])
def test_clipping_lowers_the_weighted_error(format):
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(20, 128, generator=generator)
    weight[:, ::32] *= 3
    energy = torch.rand(128, generator=generator) + 0.5
    energy[::32] = 0.01
    plain, clipped = covering_grid(weight, format), clipped_grid(weight, format, energy)
    before, after = grid_error(weight, plain, energy), grid_error(weight, clipped, energy)
    assert (after <= before).all()
    assert after.sum() < 0.95 * before.sum()
    expected = ((clipped.values(clipped.codes(weight)) - weight).square() * energy).sum()
    assert float(after.sum()) == pytest.approx(float(expected), rel=1e-5)


def test_rows_are_clipped_some_at_a_time(monkeypatch):
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(50, 64, generator=generator)
    energy = torch.rand(64, generator=generator)
    expected = clipped_grid(weight, WeightFormat(4, 32), energy)
    monkeypatch.setattr(weights, "CLIPPED_ROWS", 16)
    found = clipped_grid(weight, WeightFormat(4, 32), energy)
    assert torch.equal(found.scale, expected.scale) and torch.equal(found.zero, expected.zero)
