"""Hadamard rotation of inputs: one meaning on all tiers bit for bit, orthogonal, refused if odd."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_linear import Case, assert_equal
from tiers import TIERS_HERE, native

from quasar.kernels.base import ROTATIONS, Buffer, Int8Weight, concatenate
from quasar.kernels.reference import ReferenceBackend, hadamard_rotated
from quasar.quantization.hadamard import block_of, rotate_with_matrix, rotated
from quasar.quantization.weights import dequantize, round_to_nearest

needs_native = pytest.mark.skipif(not TIERS_HERE, reason="no native tier runs here")
tiers = pytest.mark.parametrize("tier", TIERS_HERE)


def rotated_case(precision: str, rows: int, n: int, block: int, blocks: int, seed: int) -> Case:
    case = Case.make(precision, rows, n, block * blocks, seed=seed)
    first, second = (replace(w, rotation=block) for w in (case.first, case.second))
    return replace(case, first=first, second=second)


@needs_native
@tiers
@settings(max_examples=60, deadline=None)
@given(
    precision=st.sampled_from(("w8a8", "w4a8")),
    rows=st.sampled_from((*range(1, 20), 70)),
    n=st.integers(1, 80),
    block=st.sampled_from(ROTATIONS[:7]),
    blocks=st.integers(1, 3),
    threads=st.integers(1, 3),
    seed=st.integers(0, 1000),
)
def test_rotated_linears_are_the_twins_bit_for_bit(
    tier: str,
    precision: str,
    rows: int,
    n: int,
    block: int,
    blocks: int,
    threads: int,
    seed: int,
) -> None:
    if precision == "w4a8":
        block = max(block, 32)  # of whole groups
    case = rotated_case(precision, rows, n, block, blocks, seed)
    found, expected = case.results(native(tier, threads)), case.results(ReferenceBackend())
    for name in ("plain", "added"):
        assert torch.equal(found[name], expected[name]), name


@needs_native
@tiers
def test_a_rotated_row_depends_on_nothing_beside_it(tier: str) -> None:
    case = rotated_case("w8a8", 130, 75, 64, 9, 0)
    expected = case.results(native(tier, 1))
    for rows in (slice(0, 1), slice(7, 13), slice(40, 80), slice(129, 130)):
        assert_equal(case.results(native(tier, 2), rows), expected, rows)


@needs_native
@tiers
@pytest.mark.parametrize("columns", [10240, 10496, 65536])
@pytest.mark.parametrize("precision", ["w8a8", "w4a8"])
def test_a_rotated_row_may_be_longer_than_a_threads_own_memory(
    tier: str, precision: str, columns: int
) -> None:
    """10,240 inputs just fit (40 KiB), however short the row is once it is rounded."""
    case = rotated_case(precision, 2, 33, 256, columns // 256, columns)
    expected = case.results(ReferenceBackend())
    for threads in (1, 3):
        found = case.results(native(tier, threads))
        assert all(torch.equal(found[name], expected[name]) for name in ("plain", "added"))
        assert_equal(case.results(native(tier, 2), slice(1, 2)), found, slice(1, 2))


@needs_native
@tiers
@pytest.mark.parametrize("block", ROTATIONS)
def test_rows_are_rotated_in_place(tier: str, block: int) -> None:
    x = torch.randn(5, 2 * block, generator=torch.Generator().manual_seed(block))
    found = x.clone()
    native(tier, 2).rotate(found, block)
    assert torch.equal(found, hadamard_rotated(x, block))


@pytest.mark.parametrize("block", ROTATIONS)
def test_the_rotation_is_sylvesters_matrix(block: int) -> None:
    """Entry i, j is (-1)^popcount(i & j) / sqrt(block): symmetric, its own inverse."""
    found = hadamard_rotated(torch.eye(min(block, 64), block), block) * block**0.5
    indices = torch.arange(block)
    for i, row in enumerate(found):
        signs = torch.tensor([(-1.0) ** (i & int(j)).bit_count() for j in indices])
        assert torch.allclose(row, signs, atol=1e-5)
    x = torch.randn(3, 2 * block)
    assert torch.allclose(hadamard_rotated(hadamard_rotated(x, block), block), x, atol=1e-5)


@pytest.mark.parametrize("block", [16, 64, 256])
def test_the_matrix_rotates_alike(block: int) -> None:
    x = torch.randn(7, 3 * block)
    found = x.clone()
    rotate_with_matrix(found, block)
    assert torch.allclose(found, hadamard_rotated(x, block), atol=1e-5)


def test_a_rotated_weight_times_rotated_inputs_is_the_product() -> None:
    g = torch.Generator().manual_seed(3)
    weight, x = torch.randn(300, 512, generator=g), torch.randn(9, 512, generator=g)
    bias = torch.randn(300, generator=g)
    plain = round_to_nearest(weight, bias)
    found = rotated(plain, 128, ReferenceBackend().rotate)
    assert found.rotation == 128 and found.bias is bias
    product = hadamard_rotated(x, 128) @ dequantize(found).t()
    expected = x @ dequantize(plain).t()
    assert (product - expected).norm() < 0.01 * expected.norm()


def test_an_outlier_costs_less_when_it_is_spread() -> None:
    """The step of a row is set by its largest value: one of 40 among 1."""
    g = torch.Generator().manual_seed(0)
    weight = round_to_nearest(torch.randn(64, 256, generator=g))
    x = torch.randn(4, 256, generator=g)
    x[torch.arange(4), torch.tensor([3, 90, 17, 200])] = 40.0
    exact, backend, errors = x @ dequantize(weight).t(), ReferenceBackend(), []
    for form in (weight, rotated(weight, 256, backend.rotate)):
        out = Buffer.empty(4, 64)
        backend.linear(4, Buffer.of(x), backend.pack(form), out)
        errors.append(float((out.tensor - exact).norm()))
    assert errors[1] < 0.5 * errors[0]


@pytest.mark.parametrize(
    ("columns", "block"), [(4864, 256), (1536, 256), (48, 16), (96, 32), (40, 0), (8, 0)]
)
def test_blocks_of_a_size(columns: int, block: int) -> None:
    assert block_of(columns) == block


@pytest.mark.parametrize("tier", [*TIERS_HERE, "reference"])
@pytest.mark.parametrize(("columns", "block"), [(64, 24), (64, 8), (96, 64), (64, -16)])
def test_blocks_that_do_not_fit_are_refused(tier: str, columns: int, block: int) -> None:
    backend = ReferenceBackend() if tier == "reference" else native(tier, 1)
    codes = torch.ones(4, columns, dtype=torch.int8)
    with pytest.raises(ValueError, match=f"{columns} inputs cannot be rotated in blocks of"):
        backend.pack(Int8Weight(codes, torch.ones(4), rotation=block))


@pytest.mark.parametrize("tier", [*TIERS_HERE, "reference"])
@pytest.mark.parametrize("block", [0, 8, 24, 128])
def test_rows_are_not_rotated_in_blocks_that_do_not_fit(tier: str, block: int) -> None:
    backend = ReferenceBackend() if tier == "reference" else native(tier, 1)
    x = torch.ones(2, 64)
    with pytest.raises(ValueError, match=f"64 inputs cannot be rotated in blocks of {block}"):
        backend.rotate(x, block)
    assert torch.equal(x, torch.ones(2, 64))


def test_linears_of_several_rotations_are_not_one() -> None:
    weight = Int8Weight(torch.ones(4, 64, dtype=torch.int8), torch.ones(4))
    with pytest.raises(ValueError, match="share one precision, group size and rotation"):
        concatenate((weight, replace(weight, rotation=32)))
    both = concatenate((replace(weight, rotation=32),) * 2)
    assert isinstance(both, Int8Weight) and both.rotation == 32
