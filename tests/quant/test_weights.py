"""INT8 weights: how far codes * scale may lie from the weight, and the head in chunks."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from quasar.quantization import weights
from quasar.quantization.weights import dequantize, quantize_head, round_to_nearest


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


def test_head_is_the_same_in_chunks(monkeypatch):
    rows = torch.randn(103, 24, generator=torch.Generator().manual_seed(1)).bfloat16()
    whole = round_to_nearest(rows.float())
    monkeypatch.setattr(weights, "HEAD_CHUNK_ROWS", 10)
    head = quantize_head(rows)
    assert torch.equal(head.codes, whole.codes)
    assert torch.equal(head.scale, whole.scale)
