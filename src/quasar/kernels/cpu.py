"""The native backend: C++ kernels called with plain addresses.

A pass makes five calls a layer, so an operation here only passes on what was checked and looked up
when weights were packed, the cache was made and the batch was bound.
"""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from quasar.kernels.arena import Arena, huge_bytes
from quasar.kernels.base import (
    AttentionSpec,
    Buffer,
    DenseWeight,
    Int8Weight,
    LinearWeight,
    NoiseKey,
    PackedLinear,
    Peaks,
    RaggedBatch,
    check_rotation,
)

_native: Any
try:
    _native = importlib.import_module("quasar._native")
except ImportError as error:
    _native, _absence = None, f"the native module is not built ({error})"

LANES = 16
"""Gate and up rows alternate in runs of this many; layouts are padded to twice as many rows."""

PEAK_BYTES = 256 << 20


@dataclass(slots=True)
class CpuLinear:
    """A packed linear. `tensors` own the memory whose addresses `handle` holds."""

    precision: str
    out_features: int
    in_features: int
    nbytes: int
    handle: Any
    tensors: tuple[Tensor, ...]


def _check(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if tensor.dtype != dtype or tuple(tensor.shape) != shape or tensor.device.type != "cpu":
        found = f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"
        raise ValueError(f"{name} must be {dtype} {shape} on the CPU, not {found}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous")


def _check_attention(spec: AttentionSpec) -> None:
    heads, kv_heads, head_dim = spec.heads, spec.kv_heads, spec.head_dim
    if kv_heads < 1 or heads < 1 or heads % kv_heads or head_dim % 2 or not 2 <= head_dim <= 1024:
        shape = f"{heads} / {kv_heads} heads of {head_dim}"
        raise ValueError(f"attention of {shape} cannot be grouped or rotated")
    if not 0 <= spec.window < 2**31:
        raise ValueError(f"window must be 0 or a number of positions, not {spec.window}")
    table = (*spec.cos.shape[:1], min(spec.cos.shape[-1], head_dim // 2))
    _check("cos", spec.cos, torch.float32, table)
    _check("sin", spec.sin, torch.float32, table)
    if (spec.q_norm is None) != (spec.k_norm is None):
        raise ValueError("q_norm and k_norm must both be given, or neither")
    for name, norm in (("q_norm", spec.q_norm), ("k_norm", spec.k_norm)):
        if norm is not None:
            _check(name, norm, torch.float32, (head_dim,))
    if not 0 <= spec.norm_eps < math.inf:
        raise ValueError(f"norm_eps must be a number of at least 0, not {spec.norm_eps}")


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows of a linear: what is packed, and what a product's sums are finished with."""

    precision: str
    values: Tensor
    """[out, in]."""
    scale: Tensor | None
    """[out] fp32 of W8A8, [out, groups] of W4A8."""
    zero: Tensor | None
    """[out, groups] uint8, of W4A8."""
    bias: Tensor | None
    """[out] fp32."""
    rotation: int = 0

    @classmethod
    def of(cls, weight: LinearWeight) -> _Rows:
        """Raises ValueError for what a kernel must not see."""
        if isinstance(weight, DenseWeight):
            rows, dtype = cls("bf16", weight.weight, None, None, weight.bias), torch.bfloat16
        elif isinstance(weight, Int8Weight):
            rows = cls("w8a8", weight.codes, weight.scale, None, weight.bias, weight.rotation)
            dtype = torch.int8
        else:
            weight.check()
            parts = (weight.codes, weight.scale, weight.zero, weight.bias)
            rows, dtype = cls("w4a8", *parts, weight.rotation), torch.uint8
        shape = tuple(rows.values.shape)
        if len(shape) != 2 or 0 in shape:
            raise ValueError(f"a linear's weight must be a matrix, not {shape}")
        _check("a linear's weight", rows.values, dtype, shape)
        if rows.rotation:
            check_rotation(shape[1], rows.rotation)
        for name, tensor in (("scale", rows.scale), ("bias", rows.bias), ("zero", rows.zero)):
            if tensor is not None:
                grouped = tensor.shape[1:] if rows.zero is not None and name != "bias" else ()
                dtype = torch.uint8 if name == "zero" else torch.float32
                _check(f"a linear's {name}", tensor, dtype, (shape[0], *grouped))
        return rows

    @property
    def group_size(self) -> int:
        """0 but for W4A8."""
        return 0 if self.zero is None else self.values.shape[1] // self.zero.shape[1]


def _interleave(gate: Tensor, up: Tensor) -> Tensor:
    """Rows 0..15 of gate, 0..15 of up, 16..31 of gate ...; missing rows of the last run are 0."""
    rows = -(-gate.shape[0] // LANES) * LANES
    both = gate.new_zeros(2, rows, *gate.shape[1:])
    both[0, : gate.shape[0]], both[1, : gate.shape[0]] = gate, up
    runs = both.view(2, rows // LANES, LANES, *gate.shape[1:])
    return runs.transpose(0, 1).reshape(2 * rows, *gate.shape[1:])


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _pad(vector: Tensor) -> Tensor:
    """[n] -> [n rounded up to 32], zeros behind."""
    padded = vector.new_zeros(-(-vector.shape[0] // (2 * LANES)) * 2 * LANES)
    padded[: vector.shape[0]] = vector
    return padded


def _pair(gate: Tensor | None, up: Tensor | None) -> Tensor | None:
    """Interleaved vectors of gate and up; a missing one (a bias) counts as zero."""
    one = up if gate is None else gate
    if one is None:
        return None
    zeros = torch.zeros_like(one)
    return _interleave(zeros if gate is None else gate, zeros if up is None else up)


class CpuBackend:
    """One instruction-set tier with `threads` threads. Calls from several threads take turns."""

    name = "cpu"
    block_size = 64

    def __init__(self, cap: str, threads: int) -> None:
        """Raises RuntimeError with the reason where no native tier runs."""
        self._kernels = _native.Kernels(cap, threads)
        self.isa: str = self._kernels.isa
        self.threads = threads
        self._arena = Arena()
        self._attention: dict[int, tuple[Any, AttentionSpec]] = {}
        self._norm_linear = self._kernels.norm_linear
        self._norm_gated = self._kernels.norm_gated
        self._linear = self._kernels.linear
        self._linear_add = self._kernels.linear_add
        self._norm_add = self._kernels.norm_add
        self._attend = self._kernels.attend

    def rotate(self, x: Tensor, block: int) -> None:
        rows, columns = x.shape
        check_rotation(columns, block)
        _check("what is rotated", x, torch.float32, (rows, columns))
        self._kernels.rotate(x.data_ptr(), rows, columns, block)

    def pack(self, weight: LinearWeight) -> PackedLinear:
        rows = _Rows.of(weight)
        return self._packed(rows, rows.values.shape[0], gated=0)

    def pack_gated(
        self, gate: LinearWeight, up: LinearWeight, activation: str = "silu"
    ) -> PackedLinear:
        one, two = _Rows.of(gate), _Rows.of(up)
        kinds = [
            (rows.precision, rows.values.shape, rows.group_size, rows.rotation)
            for rows in (one, two)
        ]
        if kinds[0] != kinds[1]:
            raise ValueError("gate and up must share precision, shape, group size and rotation")
        both = replace(
            one,
            values=_interleave(one.values, two.values),
            scale=_pair(one.scale, two.scale),
            zero=_pair(one.zero, two.zero),
            bias=_pair(one.bias, two.bias),
        )
        gated = _native.ACTIVATIONS[activation]
        return self._packed(both, 2 * one.values.shape[0], gated)

    def _packed(self, rows: _Rows, out_features: int, gated: int) -> CpuLinear:
        """`out_features` may be less than the number of (padded, interleaved) rows."""
        (out, columns), group_size = rows.values.shape, rows.group_size
        precision = _native.PRECISIONS[rows.precision]
        parts = (_address(tensor) for tensor in (rows.values, rows.scale, rows.zero))
        weight = _native.Weight(*parts, out, columns, precision, group_size)
        packed = self._arena.empty(self._kernels.packed_bytes(weight))
        self._kernels.pack(weight, packed.data_ptr())
        # The scales of W4A8 lie among its codes.
        vectors = (None if group_size else rows.scale, rows.bias)
        padded = [None if vector is None else _pad(vector) for vector in vectors]
        handle = _native.Linear(
            *(packed.data_ptr(), *(_address(vector) for vector in padded)),
            *(out_features, columns, precision, group_size, gated, rows.rotation),
        )
        tensors = (packed, *(vector for vector in padded if vector is not None))
        nbytes = sum(tensor.nbytes for tensor in tensors)
        return CpuLinear(rows.precision, out_features, columns, nbytes, handle, tensors)

    # The linears of these four come from `pack`: that is not asked again at every call.

    def norm_linear(
        self, rows: int, x: Buffer, norm: Buffer, eps: float, linear: Any, out: Buffer
    ) -> None:
        self._norm_linear(linear.handle, rows, x.pointer, norm.pointer, eps, out.pointer)

    def norm_gated(
        self, rows: int, x: Buffer, norm: Buffer, eps: float, linear: Any, out: Buffer
    ) -> None:
        self._norm_gated(linear.handle, rows, x.pointer, norm.pointer, eps, out.pointer)

    def linear(self, rows: int, a: Buffer, linear: Any, out: Buffer) -> None:
        self._linear(linear.handle, rows, a.pointer, out.pointer)

    def linear_add(self, rows: int, a: Buffer, linear: Any, x: Buffer) -> None:
        self._linear_add(linear.handle, rows, a.pointer, x.pointer)

    def norm_add(self, rows: int, y: Buffer, norm: Buffer, eps: float, x: Buffer) -> None:
        columns = norm.tensor.shape[1]
        self._norm_add(rows, columns, y.pointer, norm.pointer, eps, x.pointer)

    def _attention_of(self, spec: AttentionSpec) -> Any:
        """The native handle of a spec, made once; the spec is kept so that its id stays its own."""
        known = self._attention.get(id(spec))
        if known is not None:
            return known[0]
        _check_attention(spec)
        norms = (0 if norm is None else norm.data_ptr() for norm in (spec.q_norm, spec.k_norm))
        handle = _native.Attention(
            *(spec.heads, spec.kv_heads, spec.head_dim, self.block_size),
            *(2 * spec.cos.shape[1], spec.window, spec.scale, spec.norm_eps),
            *(spec.cos.data_ptr(), spec.sin.data_ptr(), *norms, spec.cos.shape[0]),
        )
        self._attention[id(spec)] = (handle, spec)
        return handle

    def new_cache(self, spec: AttentionSpec, blocks: int) -> Buffer:
        nbytes = self._kernels.cache_block_bytes(self._attention_of(spec))
        storage = huge_bytes(max(1, blocks) * nbytes).view(torch.bfloat16)
        return Buffer.of(storage.view(max(1, blocks), nbytes // 2)[:blocks])

    def bind(self, batch: RaggedBatch) -> object:
        """Checks the batch and looks its addresses up: once a pass."""
        rows, sequences = batch.rows, batch.sequences
        stride = batch.block_tables.shape[1]
        fields = (
            ("positions", batch.positions, torch.int32, (rows,)),
            ("row_offsets", batch.row_offsets, torch.int32, (sequences + 1,)),
            ("context_lengths", batch.context_lengths, torch.int32, (sequences,)),
            ("block_tables", batch.block_tables, torch.int32, (sequences, stride)),
            ("ancestors", batch.ancestors, torch.int64, (rows,)),
            ("is_tree", batch.is_tree, torch.uint8, (sequences,)),
        )
        for name, tensor, dtype, shape in fields:
            _check(name, tensor, dtype, shape)
        addresses = (tensor.data_ptr() for _, tensor, _, _ in fields)
        return _native.Batch(batch, sequences, rows, stride, *addresses)

    def attend(
        self, bound: object, qkv: Buffer, spec: AttentionSpec, cache: Buffer, out: Buffer
    ) -> None:
        handle = self._attention[id(spec)][0]
        self._attend(handle, bound, qkv.pointer, cache.pointer, out.pointer)

    def move(
        self, spec: AttentionSpec, cache: Buffer, table: Tensor, source: Tensor, target: Tensor
    ) -> None:
        count = source.shape[0]
        _check("table", table, torch.int32, (table.numel(),))
        _check("source", source, torch.int32, (count,))
        _check("target", target, torch.int32, (count,))
        addresses = (tensor.data_ptr() for tensor in (table, source, target))
        self._kernels.move_slots(self._attention_of(spec), cache.pointer, *addresses, count)

    def argmax(self, rows: int, logits: Buffer) -> list[int]:
        ids: list[int] = self._kernels.argmax(logits.pointer, rows, logits.tensor.shape[1])
        return ids

    def top_k(self, logits: Buffer, row: int, k: int) -> tuple[Tensor, Tensor]:
        columns = logits.tensor.shape[1]
        k = min(k, columns)
        values, ids = torch.empty(k), torch.empty(k, dtype=torch.int64)
        at = logits.pointer + 4 * row * columns
        self._kernels.top_k(at, columns, k, values.data_ptr(), ids.data_ptr())
        return values, ids

    def gumbel_argmax(
        self, logits: Buffer, row: int, temperature: float, threshold: float, noise: NoiseKey
    ) -> int:
        columns = logits.tensor.shape[1]
        at = logits.pointer + 4 * row * columns
        key = (noise.seed, noise.sample, noise.position)
        if math.isnan(threshold):
            raise ValueError("threshold is not a number")
        token: int = self._kernels.gumbel_argmax(at, columns, 1.0 / temperature, threshold, *key)
        return token

    @cached_property
    def _stream(self) -> Tensor:
        """256 MiB of huge pages to read, more than the caches hold; kept once it is needed."""
        return huge_bytes(PEAK_BYTES).fill_(1)

    def measure_bandwidth(self) -> float:
        rate: float = self._kernels.read_bandwidth(
            self._stream.data_ptr(), self._stream.nbytes, 0.0
        )
        return rate

    def measure_peaks(self, seconds: float) -> Peaks:
        return Peaks(
            self._kernels.read_bandwidth(self._stream.data_ptr(), self._stream.nbytes, seconds),
            self._kernels.multiply_rate(_native.PRECISIONS["w8a8"], seconds),
            self._kernels.multiply_rate(_native.PRECISIONS["bf16"], seconds),
        )


def probe(cap: str, threads: int) -> CpuBackend | str:
    """The native backend at or below the tier `cap`, or the reason why it does not run here."""
    if _native is None:
        return _absence
    try:
        return CpuBackend(cap, threads)
    except RuntimeError as error:
        return f"{error} (QUASAR_ISA={cap})"
