"""Matrix products against their twin: W8A8 and W4A8 bit for bit, BF16 closely; row invariance."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import TIERS_HERE, native
from torch import Tensor

from quasar.kernels.base import (
    GROUP_SIZES,
    Backend,
    Buffer,
    DenseWeight,
    Int4Weight,
    Int8Weight,
    LinearWeight,
    concatenate,
)
from quasar.kernels.reference import ReferenceBackend, quantize_rows, rms_norm

EPS = 1e-5
PRECISIONS = ("w8a8", "bf16", "w4a8")
ROWS = (*range(1, 41), 130)

pytestmark = pytest.mark.skipif(not TIERS_HERE, reason="no native tier runs here")
tiers = pytest.mark.parametrize("tier", TIERS_HERE)
precisions = pytest.mark.parametrize("precision", PRECISIONS)


def random_int4(n: int, k: int, group_size: int, g: torch.Generator) -> Int4Weight:
    """Any codes and zero points; scales of 5 bits whose sizes differ by a factor of 8."""
    groups = k // group_size
    codes = torch.randint(0, 16, (n, k), generator=g, dtype=torch.uint8)
    zero = torch.randint(0, 16, (n, groups), generator=g, dtype=torch.uint8)
    mantissa = torch.randint(16, 32, (n, groups), generator=g).float()
    exponent = torch.randint(-10, -7, (n, groups), generator=g)
    return Int4Weight(codes, torch.ldexp(mantissa, exponent), zero)


@dataclass
class Case:
    """Inputs [rows, k] and two layers k -> n of one precision. W4A8: k is rounded up to groups."""

    x: Tensor
    norm: Tensor
    first: LinearWeight
    second: LinearWeight
    residual: Tensor

    @classmethod
    def make(
        cls,
        precision: str,
        rows: int,
        n: int,
        k: int,
        bias: bool = True,
        seed: int = 0,
        group_size: int = 32,
    ) -> Case:
        g = torch.Generator().manual_seed(seed)
        if precision == "w4a8":
            k = -(-k // group_size) * group_size

        def layer() -> LinearWeight:
            offset = torch.randn(n, generator=g) if bias else None
            if precision == "bf16":
                return DenseWeight((torch.randn(n, k, generator=g) / k**0.5).bfloat16(), offset)
            if precision == "w4a8":
                return replace(random_int4(n, k, group_size, g), bias=offset)
            codes = torch.randint(-128, 128, (n, k), generator=g, dtype=torch.int8)
            return Int8Weight(codes, torch.rand(n, generator=g) / k**0.5 / 50, offset)

        magnitudes = 10 ** (4 * torch.rand(rows, 1, generator=g) - 2)
        x = torch.randn(rows, k, generator=g) * magnitudes
        norm = torch.randn(1, k, generator=g)
        return cls(x, norm, layer(), layer(), torch.randn(rows, n, generator=g))

    def results(self, backend: Backend, rows: slice = slice(None)) -> dict[str, Tensor]:
        """All three operations on some of the rows."""
        x, norm = Buffer.of(self.x[rows].contiguous()), Buffer.of(self.norm)
        m, n = x.tensor.shape[0], self.first.out_features
        linear = backend.pack(self.first)
        plain, gated = Buffer.empty(m, n), Buffer.empty(m, n)
        added = Buffer.of(self.residual[rows].clone())
        backend.norm_linear(m, x, norm, EPS, linear, plain)
        backend.norm_gated(m, x, norm, EPS, backend.pack_gated(self.first, self.second), gated)
        backend.linear_add(m, x, linear, added)
        return {"plain": plain.tensor, "gated": gated.tensor, "added": added.tensor}


def assert_agree(case: Case, found: dict[str, Tensor], precision: str) -> None:
    """W8A8 and W4A8 have one result; the twin's exponential and BF16 sums may round elsewhere.

    Terms of a sum are about as large as the input, or 1 where it was normalised.
    """
    tolerance = 1e-5 + 2**-22 * case.x.shape[1] ** 0.5
    terms = case.x.abs().amax(dim=-1, keepdim=True).clamp(min=1)
    for name, value in case.results(ReferenceBackend()).items():
        if precision != "bf16" and name != "gated":
            assert torch.equal(found[name], value), name
        else:
            largest = value.abs().amax(dim=-1, keepdim=True).maximum(terms)
            assert ((found[name] - value).abs() <= tolerance * largest).all(), name


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor], rows: slice) -> None:
    for name, value in expected.items():
        assert torch.equal(found[name], value[rows]), name


@tiers
@given(
    precision=st.sampled_from(PRECISIONS),
    rows=st.sampled_from(ROWS),
    n=st.integers(1, 150),
    k=st.integers(1, 400),
    bias=st.booleans(),
    threads=st.integers(1, 4),
    seed=st.integers(0, 1 << 20),
    group_size=st.sampled_from(GROUP_SIZES),
)
@settings(max_examples=90)
def test_odd_shapes_agree_with_the_twin(
    tier: str,
    precision: str,
    rows: int,
    n: int,
    k: int,
    bias: bool,
    threads: int,
    seed: int,
    group_size: int,
) -> None:
    case = Case.make(precision, rows, n, k, bias, seed, group_size)
    assert_agree(case, case.results(native(tier, threads)), precision)


@tiers
@precisions
@pytest.mark.parametrize("shape", [(960, 576), (576, 1536), (48, 4864), (33, 65536)], ids=str)
@pytest.mark.parametrize("rows", [1, 6, 17])
def test_model_shapes_agree_with_the_twin(
    tier: str, precision: str, rows: int, shape: tuple[int, int]
) -> None:
    case = Case.make(precision, rows, *shape)
    assert_agree(case, case.results(native(tier, 2)), precision)


@tiers
@precisions
def test_many_rows_agree_with_the_twin(tier: str, precision: str) -> None:
    case = Case.make(precision, 512, 70, 96)
    assert_agree(case, case.results(native(tier, 2)), precision)


@tiers
@precisions
@pytest.mark.parametrize("shape", [(75, 210), (160, 1024)], ids=str)
def test_a_row_depends_on_nothing_beside_it(
    tier: str, precision: str, shape: tuple[int, int]
) -> None:
    """Alone, in any company and for any number of threads a row has the same bits."""
    case = Case.make(precision, 512, *shape)
    expected = case.results(native(tier, 1))
    for rows in (*range(1, 41), 130):
        found = case.results(native(tier, 1 + rows % 3), slice(rows, 2 * rows))
        assert_equal(found, expected, slice(rows, 2 * rows))
    for row in (0, 13, 14, 511):
        found = case.results(native(tier, 2), slice(row, row + 1))
        assert_equal(found, expected, slice(row, row + 1))


@tiers
def test_extreme_codes_do_not_overflow(tier: str) -> None:
    """All weights -128 and all activations 127 over 65536 inputs: the largest sum there is."""
    k = 65536
    weight = Int8Weight(torch.full((40, k), -128, dtype=torch.int8), torch.ones(40))
    x, out = Buffer.of(torch.ones(2, k)), Buffer.of(torch.zeros(2, 40))
    backend = native(tier, 2)
    backend.linear_add(2, x, backend.pack(weight), out)
    scale = quantize_rows(x.tensor[:1])[1]
    assert torch.equal(out.tensor, torch.full((2, 40), -128.0 * 127 * k) * scale)


@tiers
@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("zero", [0, 15])
def test_extreme_codes_of_w4a8_do_not_overflow(tier: str, group_size: int, zero: int) -> None:
    """The largest sum of a group, on either side, and the powers of its scales."""
    n, k = 70, 512
    groups = k // group_size
    codes = torch.full((n, k), 15 - zero, dtype=torch.uint8)
    scale = torch.full((n, groups), 1.9375)
    scale[1], scale[2], scale[3:, ::2] = 2.0**-126, 2.0**100, 2.0**-9
    weight = Int4Weight(codes, scale, torch.full((n, groups), zero, dtype=torch.uint8))
    x = torch.ones(3, k)
    x[1], x[2, ::2] = -1.0, -1.0
    out, expected = Buffer.empty(3, n), Buffer.empty(3, n)
    backend, twin = native(tier, 2), ReferenceBackend()
    backend.linear(3, Buffer.of(x), backend.pack(weight), out)
    twin.linear(3, Buffer.of(x), twin.pack(weight), expected)
    assert torch.equal(out.tensor, expected.tensor)
    assert (out.tensor[0].sign() == (1 if zero == 0 else -1)).all()


@tiers
@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_stacked_w4a8_linears_are_one(tier: str, group_size: int) -> None:
    g = torch.Generator().manual_seed(group_size)
    parts = [random_int4(n, 256, group_size, g) for n in (40, 7, 30)]
    parts[1] = replace(parts[1], bias=torch.randn(7, generator=g))
    backend, x = native(tier, 2), Buffer.of(torch.randn(5, 256, generator=g))
    found, alone = Buffer.empty(5, 77), [Buffer.empty(5, part.out_features) for part in parts]
    backend.linear(5, x, backend.pack(concatenate(tuple(parts))), found)
    for part, out in zip(parts, alone, strict=True):
        backend.linear(5, x, backend.pack(part), out)
    assert torch.equal(found.tensor, torch.cat([out.tensor for out in alone], dim=1))


@tiers
@pytest.mark.parametrize(("group_size", "bits"), [(32, 4.5), (64, 4.25), (128, 4.125)])
def test_w4a8_takes_16_bits_beside_the_codes_of_a_group(
    tier: str, group_size: int, bits: float
) -> None:
    weight = random_int4(96, 512, group_size, torch.Generator())
    assert native(tier, 1).pack(weight).nbytes == 96 * 512 * bits / 8


@pytest.mark.parametrize("tier", [*TIERS_HERE, "reference"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"codes": torch.full((40, 256), 16, dtype=torch.uint8)}, "above 15"),
        ({"zero": torch.full((40, 8), 16, dtype=torch.uint8)}, "above 15"),
        ({"scale": torch.full((40, 8), 1 + 2**-5)}, "5 significant bits"),
        ({"scale": torch.full((40, 8), -1.0)}, "positive"),
        ({"scale": torch.full((40, 8), 1e-40)}, "normal"),
        ({"scale": torch.full((40, 8), torch.inf)}, "normal"),
        ({"scale": torch.ones(40, 7)}, r"\[out, groups\]"),
        ({"codes": torch.ones(40, 250, dtype=torch.uint8)}, "250 inputs in 8 groups"),
        ({"codes": torch.ones(40, 128, dtype=torch.uint8)}, "128 inputs in 8 groups"),
        ({"codes": torch.ones(40, 256, dtype=torch.int8)}, "uint8"),
    ],
    ids=str,
)
def test_w4a8_weights_of_another_form_are_refused(
    tier: str, change: dict[str, Tensor], message: str
) -> None:
    backend = ReferenceBackend() if tier == "reference" else native(tier, 1)
    weight = replace(random_int4(40, 256, 32, torch.Generator()), **change)
    with pytest.raises(ValueError, match=message):
        backend.pack(weight)


@tiers
@pytest.mark.parametrize("shape", [(1, 2), (33, 31), (150, 401), (64, 4864)], ids=str)
@pytest.mark.parametrize("rows", [1, 6, 7, 33])
def test_int8_sums_are_the_integers(tier: str, rows: int, shape: tuple[int, int]) -> None:
    """With scales of 1 an output is its sum, so every tier gives the same one."""
    n, k = shape
    g = torch.Generator().manual_seed(rows)
    codes = torch.randint(-128, 128, (n, k), generator=g, dtype=torch.int8)
    codes[0] = -128
    x = torch.randint(-127, 128, (rows, k), generator=g).float()
    x[:, 0] = 127.0  # the largest: the row's scale becomes 1
    x[0] = 127.0
    backend, out = native(tier, 2), Buffer.empty(rows, n)
    backend.linear(rows, Buffer.of(x), backend.pack(Int8Weight(codes, torch.ones(n))), out)
    assert torch.equal(out.tensor.long(), x.long() @ codes.long().t())


@tiers
@precisions
@pytest.mark.parametrize("rows", [1, 7, 40])
def test_a_plain_store_is_a_sum_with_nothing(tier: str, precision: str, rows: int) -> None:
    case, backend = Case.make(precision, rows, 75, 210), native(tier, 2)
    packed, x = backend.pack(case.first), Buffer.of(case.x)
    stored, added = Buffer.empty(rows, 75), Buffer.of(torch.zeros(rows, 75))
    backend.linear(rows, x, packed, stored)
    backend.linear_add(rows, x, packed, added)
    assert torch.equal(stored.tensor, added.tensor)


@tiers
@pytest.mark.parametrize("columns", [1, 16, 576, 901])
@pytest.mark.parametrize("rows", [1, 2, 37])
def test_a_norm_is_added(tier: str, rows: int, columns: int) -> None:
    g = torch.Generator().manual_seed(columns)
    y, x = torch.randn(2, rows, columns, generator=g) * 3
    norm = torch.randn(1, columns, generator=g)
    found = Buffer.of(x.clone())
    native(tier, 2).norm_add(rows, Buffer.of(y), Buffer.of(norm), EPS, found)
    assert torch.equal(found.tensor, x + rms_norm(y, norm, EPS))


@tiers
@pytest.mark.parametrize("value", [0.0, 1e-40, 1e-38, 3e38], ids=str)
@pytest.mark.parametrize("precision", ["w8a8", "w4a8"])
def test_extreme_inputs_quantise_as_the_twin_does(tier: str, value: float, precision: str) -> None:
    """A row of zeros, of denormals, of the largest numbers."""
    case = Case.make(precision, 3, 33, 64, bias=False)
    case.x = value * torch.sign(case.x)
    found, expected = case.results(native(tier, 1)), case.results(ReferenceBackend())
    assert torch.equal(found["added"], expected["added"])


@tiers
@precisions
def test_a_nan_stays_visible(tier: str, precision: str) -> None:
    case = Case.make(precision, 4, 40, 100)
    case.x[2, 57] = torch.nan
    found = case.results(native(tier, 2))
    clean = torch.tensor([0, 1, 3])
    for name, value in found.items():
        assert value[2].isnan().all(), name
        assert not value[clean].isnan().any(), name


def gelu_tanh(gates: Tensor) -> Tensor:
    """(1 + tanh(u)) / 2 = sigmoid(2 u), which does not cancel far below zero."""
    return gates * torch.sigmoid((8 / torch.pi) ** 0.5 * (gates + 0.044715 * gates**3))


def test_gelu_tanh_is_that_of_torch() -> None:
    gates = torch.linspace(-6, 6, 999, dtype=torch.float64)
    assert torch.allclose(gelu_tanh(gates), F.gelu(gates, approximate="tanh"), 1e-12, 1e-15)


@tiers
@pytest.mark.parametrize(("name", "activation"), [("silu", F.silu), ("gelu_tanh", gelu_tanh)])
def test_gates_of_any_size(tier: str, name: str, activation: Callable[..., Tensor]) -> None:
    """An activation is exact zero or the gate itself far out, and never NaN or infinite."""
    far = torch.tensor([-1e30, -200.0, -89.0, -88.0, -87.0, -20.0, -1e-30, 0.0, 88.0, 1e30])
    gates = torch.cat((far, torch.linspace(-12, 12, 481)))
    n = gates.numel()
    zeros = torch.zeros(n, 16, dtype=torch.bfloat16)
    gate, up = DenseWeight(zeros, gates), DenseWeight(zeros, torch.full((n,), 3.0))
    backend, out = native(tier, 1), Buffer.empty(1, n)
    row = Buffer.of(torch.ones(1, 16))
    backend.norm_gated(1, row, row, EPS, backend.pack_gated(gate, up, name), out)
    expected = 3 * activation(gates.double())
    # e^-z is as wrong as z, whose rounding grows with it.
    tolerance = 1e-6 + (gates.double() < -1) * 1e-5
    assert ((out.tensor[0] - expected).abs() <= tolerance * expected.abs() + 1e-35).all()
