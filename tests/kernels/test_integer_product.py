"""The twin's INT8 product: exact by either of its ways, on any CPU."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quasar.kernels import reference
from quasar.kernels.reference import EXACT, integer_product

ways = pytest.mark.parametrize("int8_products", [False, True])


@ways
@given(
    rows=st.sampled_from([1, 2, 31, 33]),
    columns=st.sampled_from([1, 2, 3, 65, EXACT - 1, EXACT, EXACT + 1, 3 * EXACT + 5]),
    out=st.integers(1, 40),
    seed=st.integers(0, 2**16),
)
def test_sums_are_exact(int8_products, rows, columns, out, seed):
    g = torch.Generator().manual_seed(seed)
    codes = torch.randint(-127, 128, (rows, columns), generator=g, dtype=torch.int8)
    weight = torch.randint(-128, 128, (out, columns), generator=g, dtype=torch.int8)
    expected = (codes.long() @ weight.long().t()).int()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "INT8_PRODUCTS", int8_products)
        assert torch.equal(integer_product(codes, weight), expected)


@ways
def test_largest_sums_are_exact(int8_products, monkeypatch):
    monkeypatch.setattr(reference, "INT8_PRODUCTS", int8_products)
    codes = torch.full((2, 4 * EXACT + 1), -128, dtype=torch.int8)
    codes[1, ::2] = 127
    expected = (codes.long() @ codes.long().t()).int()
    assert torch.equal(integer_product(codes, codes), expected)
