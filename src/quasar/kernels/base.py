"""What every kernel backend offers: the operations of a verification pass, and their data.

Two laws hold for each backend. *Row invariance*: the bits of a row never depend on what else is
computed beside it, nor on the number of threads. *One meaning*: `reference.py` is the
specification.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class DenseWeight:
    """A linear layer kept in BF16: weight [out, in] bf16, bias [out] fp32 or None."""

    weight: Tensor
    bias: Tensor | None = None

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """W8A8: weight = codes * scale; codes [out, in] int8, scale [out] fp32, bias as above.

    Where `rotation` is not 0 this weight is W H: blocks of so many inputs are rotated by a Hadamard
    matrix H before they become integers (`Backend`; QuaRot, arXiv 2404.00456).
    """

    codes: Tensor
    scale: Tensor
    bias: Tensor | None = None
    rotation: int = 0

    @property
    def out_features(self) -> int:
        return self.codes.shape[0]


@dataclass(frozen=True, slots=True)
class Int4Weight:
    """W4A8: weight = (codes - zero) * scale, scale and zero one for each group of inputs of a row.

    codes [out, in] uint8 in 0..15, one a byte; scale [out, groups] fp32 > 0 with at most 5
    significant bits; zero [out, groups] uint8 in 0..15; bias and rotation as above. Groups are of
    equal size.

    An integer sum over a group of 128 has at most 18 bits, so its product with the scale is exact
    in fp32: fused or not, a multiply-add has the same bits. Scale (8 bits of exponent, 4 of
    mantissa) and zero point fit 16 bits, what a scale alone takes elsewhere.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor
    bias: Tensor | None = None
    rotation: int = 0

    @property
    def out_features(self) -> int:
        return self.codes.shape[0]

    @property
    def group_size(self) -> int:
        return self.codes.shape[1] // self.scale.shape[1]

    def check(self) -> None:
        """Raise ValueError for what is not of this form: no kernel could keep it."""
        for name, tensor, dtype in (
            ("codes", self.codes, torch.uint8),
            ("scale", self.scale, torch.float32),
            ("zero", self.zero, torch.uint8),
        ):
            if tensor.dtype != dtype or tensor.ndim != 2 or tensor.numel() == 0:
                raise ValueError(f"{name} of a W4A8 weight must be a {dtype} matrix")
        (out, columns), groups = self.codes.shape, self.scale.shape[1]
        if self.scale.shape != (out, groups) or self.zero.shape != (out, groups):
            raise ValueError("scale and zero of a W4A8 weight must be [out, groups]")
        if columns % groups or columns // groups not in GROUP_SIZES:
            raise ValueError(
                f"{columns} inputs in {groups} groups: W4A8 needs groups of {GROUP_SIZES}"
            )
        if max(int(self.codes.max()), int(self.zero.max())) > 15:
            raise ValueError("a W4A8 weight has codes or zero points above 15")
        # Sign, 8 bits of exponent and 4 of mantissa; an exponent of 0 or 255 is no normal number.
        words = self.scale.view(torch.int32)
        if bool(
            ((words & 0x7FFFF) != 0).any() or (words < 1 << 23).any() or (words >= 255 << 23).any()
        ):
            raise ValueError(
                "a W4A8 weight has scales that are not positive, normal and of 5 significant bits"
            )


GROUP_SIZES = (32, 64, 128)
"""Of Int4Weight."""
ROTATIONS = tuple(2**n for n in range(4, 13))
"""Block sizes of a Hadamard rotation."""
LinearWeight = DenseWeight | Int8Weight | Int4Weight
Activation = Literal["silu", "gelu_tanh"]
"""silu(g) = g / (1 + e^-g); gelu_tanh(g) = g / 2 (1 + tanh(sqrt(2 / pi) (g + 0.044715 g^3)))."""


def concatenate(weights: tuple[LinearWeight, ...]) -> LinearWeight:
    """Stack linears that share their input into one; a missing bias counts as zero."""
    bias = None
    if any(w.bias is not None for w in weights):
        zeros = [torch.zeros(w.out_features) for w in weights]
        bias = torch.cat(
            [z if w.bias is None else w.bias for w, z in zip(weights, zeros, strict=True)]
        )
    dense = [w for w in weights if isinstance(w, DenseWeight)]
    if len(dense) == len(weights):
        return DenseWeight(torch.cat([w.weight for w in dense]), bias)
    int8 = [w for w in weights if isinstance(w, Int8Weight)]
    int4 = [w for w in weights if isinstance(w, Int4Weight)]
    forms = {(w.group_size, w.rotation) for w in int4} | {w.rotation for w in int8}
    if len(weights) not in (len(int8), len(int4)) or len(forms) > 1:
        raise ValueError("linears that are fused must share one precision, group size and rotation")
    if int8:
        codes, scale = _stack(int8, "codes"), _stack(int8, "scale")
        return Int8Weight(codes, scale, bias, int8[0].rotation)
    codes, scale, zero = (_stack(int4, name) for name in ("codes", "scale", "zero"))
    return Int4Weight(codes, scale, zero, bias, int4[0].rotation)


def check_rotation(columns: int, block: int) -> None:
    """Raise ValueError for blocks that no kernel rotates."""
    if block not in ROTATIONS or columns % block:
        raise ValueError(
            f"{columns} inputs cannot be rotated in blocks of {block}: a power of two from "
            f"{ROTATIONS[0]} to {ROTATIONS[-1]} that divides them is needed"
        )


def _stack(weights: Sequence[LinearWeight], name: str) -> Tensor:
    return torch.cat([getattr(weight, name) for weight in weights])


class PackedLinear(Protocol):
    """A weight in the layout of one backend."""

    @property
    def precision(self) -> str: ...

    @property
    def out_features(self) -> int: ...

    @property
    def in_features(self) -> int: ...

    @property
    def nbytes(self) -> int:
        """Bytes read from memory by one pass."""


@dataclass(slots=True)
class Buffer:
    """A contiguous [rows, columns] tensor whose address is looked up once."""

    tensor: Tensor
    pointer: int

    @classmethod
    def of(cls, tensor: Tensor) -> Buffer:
        assert tensor.is_contiguous()
        return cls(tensor, tensor.data_ptr())

    @classmethod
    def empty(cls, rows: int, columns: int, dtype: torch.dtype = torch.float32) -> Buffer:
        return cls.of(torch.empty(rows, columns, dtype=dtype))


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Grouped-query attention with rotary embedding, as one layer has it.

    The leading R = 2 * cos.shape[1] <= head_dim dimensions of a head are rotated (neox halves: i
    pairs with i + R/2), the others pass. Tensors may be shared by the specs of several layers.
    """

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    cos: Tensor
    """[positions, R / 2] fp32."""
    sin: Tensor
    window: int = 0
    """A row sees the last `window` logical positions, its own included; 0: all of them."""
    q_norm: Tensor | None = None
    """[head_dim] fp32, RMSNorm of each head of q before the rotation; with k_norm or not at all."""
    k_norm: Tensor | None = None
    norm_eps: float = 0.0

    @property
    def qkv_columns(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim


class Slots(Protocol):
    """Where a sequence lies in the cache, and where its positions begin in the rotary tables."""

    table: Tensor
    rotary_row: int


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """The rows of one pass: several sequences, each with its own number of rows.

    Row r of sequence s is node i = r - row_offsets[s] of that sequence. Its K and V are appended at
    cache slot context_lengths[s] + i. It sees all context slots, node 0 (the root of a tree) and
    node j > 0 (slot context + j) if bit j - 1 of ancestors[r] is set (its own bit is). Where
    is_tree[s] is 0 the sequence is a chain of any length: node i sees nodes 0..i and `ancestors` is
    not read.
    Slot p of sequence s lies in block block_tables[s, p // block_size] at p % block_size.
    """

    tokens: Tensor
    """[rows] int64."""
    positions: Tensor
    """[rows] int32, the row of the rotary tables for each row."""
    row_offsets: Tensor
    """[sequences + 1] int32."""
    context_lengths: Tensor
    """[sequences] int32, slots filled before this pass."""
    block_tables: Tensor
    """[sequences, max blocks] int32."""
    ancestors: Tensor
    """[rows] int64, a bit pattern: at most 64 nodes below the root of a tree."""
    is_tree: Tensor
    """[sequences] uint8."""

    @classmethod
    def chunk(cls, tokens: list[int], context: int, sequence: Slots) -> RaggedBatch:
        """Consecutive tokens of one sequence whose first `context` slots are filled."""
        rows, first = len(tokens), sequence.rotary_row + context
        return cls(
            torch.tensor(tokens),
            torch.arange(first, first + rows, dtype=torch.int32),
            torch.tensor([0, rows], dtype=torch.int32),
            torch.tensor([context], dtype=torch.int32),
            sequence.table[None],
            torch.zeros(rows, dtype=torch.int64),
            torch.zeros(1, dtype=torch.uint8),
        )

    @property
    def rows(self) -> int:
        return self.tokens.shape[0]

    @property
    def sequences(self) -> int:
        return self.context_lengths.shape[0]


@dataclass(frozen=True, slots=True)
class NoiseKey:
    """Where a token's noise comes from: nothing else may influence it."""

    seed: int
    sample: int
    position: int


@dataclass(frozen=True, slots=True)
class Peaks:
    """What the machine can do right now with a backend's threads."""

    read_bandwidth_gbps: float
    """10^9 bytes a second, read from memory."""
    int8_gmacs: float
    """10^9 multiply-adds a second, INT8 x INT8 -> INT32."""
    bf16_gmacs: float


class Backend(Protocol):
    """The operations of a pass. Buffers are fp32 unless said; only `rows` rows are touched.

    "prepare" is what a linear does to its fp32 input: W8A8 quantises each row to INT8
    (scale = absmax / 127, codes = round-to-nearest-even(x * (127 / absmax)), all zero when absmax
    is 0); BF16 rounds to nearest even. Before that, a weight whose `rotation` is B has every block
    of B inputs rotated: x times fp32 B^-1/2, then for s = 1, 2, 4 ... B / 2 the values i and i + s
    of each 2 s (i < s) become their sum and their difference, in fp32. RMSNorm is
    (x * (1 / sqrt(mean(x^2) + eps))) * weight, the sum taken in fp64 and rounded to fp32 once.
    W8A8 product: float(int32 sum) * weight_scale[n] * row_scale[m] in that order, then + bias.
    W4A8 prepares as W8A8 does. Its product: the sum of float(int32 sum of (code - zero) * a) *
    weight_scale[n, group] over the groups, ascending, in fp32; then * row_scale[m], then + bias.
    """

    name: str
    isa: str
    threads: int
    block_size: int
    """Cache slots a block."""

    def rotate(self, x: Tensor, block: int) -> None:
        """x [rows, columns] fp32 becomes x H, the rotation that "prepare" has; `check_rotation`."""

    def pack(self, weight: LinearWeight) -> PackedLinear: ...

    def pack_gated(
        self, gate: LinearWeight, up: LinearWeight, activation: Activation = "silu"
    ) -> PackedLinear:
        """Gate and up projections as one product whose epilogue is activation(gate) * up."""

    def norm_linear(
        self, rows: int, x: Buffer, norm: Buffer, eps: float, linear: PackedLinear, out: Buffer
    ) -> None:
        """out[:, :N] = linear(prepare(rmsnorm(x))). norm is [1, K] fp32."""

    def norm_gated(
        self, rows: int, x: Buffer, norm: Buffer, eps: float, linear: PackedLinear, out: Buffer
    ) -> None:
        """out = activation(gate) * up of prepare(rmsnorm(x)), for a weight of `pack_gated`."""

    def linear(self, rows: int, a: Buffer, linear: PackedLinear, out: Buffer) -> None:
        """out = linear(prepare(a))."""

    def linear_add(self, rows: int, a: Buffer, linear: PackedLinear, x: Buffer) -> None:
        """x += linear(prepare(a))."""

    def norm_add(self, rows: int, y: Buffer, norm: Buffer, eps: float, x: Buffer) -> None:
        """x += rmsnorm(y): a norm between a sublayer and the residual stream."""

    def new_cache(self, spec: AttentionSpec, blocks: int) -> Buffer:
        """Storage for one layer's K and V in BF16, [blocks, elements a block], layout its own."""

    def bind(self, batch: RaggedBatch) -> object:
        """Make the batch ready for `attend`: called once a pass."""

    def attend(
        self, bound: object, qkv: Buffer, spec: AttentionSpec, cache: Buffer, out: Buffer
    ) -> None:
        """Norm q and k if the spec says so, rotate them, round q, k, v to BF16, append k and v to
        the cache, attend from it.

        qkv [rows, (heads + 2 kv_heads) * head_dim] fp32, out [rows, heads * head_dim] fp32.
        Scores = scale * (q . k); softmax in fp32: maximum first, then exponentials and their sum
        in logical order, the visible slots counting as consecutive positions. A norm is that of
        `norm_linear` over head_dim: one rounding to BF16, after the rotation.
        """

    def move(
        self, spec: AttentionSpec, cache: Buffer, table: Tensor, source: Tensor, target: Tensor
    ) -> None:
        """Copy K and V of slots source[i] to target[i] (int32, target <= source, ascending)."""

    def argmax(self, rows: int, logits: Buffer) -> list[int]:
        """Index of the largest logit of each row; the lowest index wins a tie, NaN loses any."""

    def top_k(self, logits: Buffer, row: int, k: int) -> tuple[Tensor, Tensor]:
        """The k largest (values fp32, ids int64), descending, ties by ascending id."""

    def gumbel_argmax(
        self, logits: Buffer, row: int, temperature: float, threshold: float, noise: NoiseKey
    ) -> int:
        """argmax over tokens with logit >= threshold of logit * (1 / temperature) + gumbel.

        gumbel = -log(-log(u)), u = ((w >> 9) + 0.5) * 2^-23, w = word (token % 4) of
        Philox4x32-10 with counter (token // 4, position, sample, 0), key (seed low, seed high).
        """

    def measure_peaks(self, seconds: float) -> Peaks:
        """Measure each peak for about `seconds`."""

    def measure_bandwidth(self) -> float:
        """The read bandwidth of this moment, in 10^9 bytes a second: one read of 256 MiB."""
