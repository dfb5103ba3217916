"""Plain torch kernels: the executable specification that every fast kernel is tested against.

Each row is computed alone (a matrix product may choose another reduction order for another number
of rows), so this backend is row-invariant too. It is also what runs where no native tier does.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from quasar.kernels.base import (
    Activation,
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
    concatenate,
)

INT8_PRODUCTS = torch.cpu._is_vnni_supported()
"""Whether torch._int_mm is fast here. Without VNNI it is a plain loop: 1.2 GMAC/s a core on Zen 3,
where fp32 has 36."""
EXACT = 1024
"""Columns whose sum of products of INT8 codes fp32 holds exactly: 1024 * 128^2 = 2^24."""


@dataclass(frozen=True, slots=True)
class ReferenceLinear:
    precision: str
    out_features: int
    in_features: int
    nbytes: int
    weight: Tensor
    """[out, in]: int8 codes (of W4A8 less their zero points), or BF16 values."""
    scale: Tensor | None
    """[out], or [out, groups]."""
    bias: Tensor | None
    activation: Activation = "silu"
    """Of the gate, where `pack_gated` made it."""
    rotation: int = 0

    def __call__(self, row: Tensor) -> Tensor:
        """row [in] fp32 -> [out] fp32."""
        if self.scale is None:
            product = self.weight.float() @ row.bfloat16().float()
        else:
            if self.rotation:
                row = hadamard_rotated(row, self.rotation)
            codes, row_scale = quantize_rows(row[None])
            if self.scale.ndim == 1:
                product = integer_product(codes, self.weight)[0].float() * self.scale
            else:
                product = grouped_product(codes[0], self.weight, self.scale)
            product = product * row_scale[0]
        return product if self.bias is None else product + self.bias


def integer_product(codes: Tensor, weight: Tensor) -> Tensor:
    """codes [rows, in] int8, weight [out, in] int8 -> exact sums [rows, out] int32."""
    rows, columns = codes.shape
    if INT8_PRODUCTS and columns > 1:  # torch._int_mm (2.13) returns garbage for one column
        some = codes.expand(32, -1).contiguous() if rows == 1 else codes
        return torch._int_mm(some, weight.t())[:rows]
    sums = torch.zeros(rows, weight.shape[0], dtype=torch.int32)
    for start in range(0, columns, EXACT):
        some, other = (x[:, start : start + EXACT].float() for x in (codes, weight))
        sums += (some @ other.t()).int()
    return sums


def grouped_product(codes: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """codes [in] int8, weight [out, in] int8, scale [out, groups] -> [out] fp32.

    Integers stay below 2^18 in a group, so fp32 holds them exactly whatever the order of the sum,
    and so it does their products with scales of 5 bits: only the additions of groups round.
    """
    out, groups = scale.shape
    grouped = weight.view(out, groups, -1).transpose(0, 1).float()
    integers = torch.bmm(grouped, codes.view(groups, -1, 1).float())[..., 0]
    total = torch.zeros(out)
    for integer, group_scale in zip(integers, scale.t(), strict=True):
        total = total + integer * group_scale
    return total


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Per-row symmetric INT8: x [rows, columns] fp32 -> codes int8, scale [rows, 1] fp32."""
    absmax = x.abs().amax(dim=-1, keepdim=True)
    # A scalar over a tensor would be reciprocal() * 127 in torch: two roundings instead of one.
    factor = torch.where(absmax > 0, torch.full_like(absmax, 127.0) / absmax, 0.0)
    return (x * factor).round().clamp(-127, 127).to(torch.int8), absmax / 127.0


def hadamard_rotated(x: Tensor, block: int) -> Tensor:
    """x [..., n] fp32 with every block of `block` values times the normed Hadamard matrix."""
    x = x * block**-0.5
    half = 1
    while half < block:
        pairs = x.view(*x.shape[:-1], -1, 2, half)
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        x = torch.stack((low + high, low - high), dim=-2).view(x.shape)
        half *= 2
    return x


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """(x / rms(x)) * weight over the last dimension, the mean square summed in fp64."""
    mean_square = x.double().pow(2).mean(dim=-1, keepdim=True).float()
    # torch.sqrt of fp32 may be a last place off; the fp64 root rounds to the true one.
    return x * (1.0 / (mean_square + eps).double().sqrt().float()) * weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [..., head_dim] by cos, sin [R / 2]: halves of the first R."""
    low, high, passed = x.tensor_split((cos.shape[-1], 2 * cos.shape[-1]), dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin, passed), dim=-1)


def activate(gate: Tensor, activation: Activation) -> Tensor:
    if activation == "silu":
        return gate / (1.0 + torch.exp(-gate))
    return F.gelu(gate, approximate="tanh")


def philox4x32(counter: Tensor, key: tuple[int, int]) -> Tensor:
    """Philox4x32-10 (Salmon et al., SC 2011): counter [n, 4] int64 of 32-bit words -> the same."""
    mask = 0xFFFFFFFF
    c0, c1, c2, c3 = counter.unbind(dim=-1)
    k0, k1 = key
    for _ in range(10):
        h0, l0 = _multiply_words(c0, 0xD2511F53)
        h1, l1 = _multiply_words(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = h1 ^ c1 ^ k0, l1, h0 ^ c3 ^ k1, l0
        k0, k1 = (k0 + 0x9E3779B9) & mask, (k1 + 0xBB67AE85) & mask
    return torch.stack((c0, c1, c2, c3), dim=-1)


def _multiply_words(a: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of a 32 x 32 bit product, without leaving signed 64 bits."""
    low = (a & 0xFFFF) * factor
    high = (a >> 16) * factor + (low >> 16)
    return (high >> 16) & 0xFFFFFFFF, ((high & 0xFFFF) << 16) | (low & 0xFFFF)


def gumbel_noise(columns: int, noise: NoiseKey) -> Tensor:
    """The Gumbel noise of tokens 0..columns-1 at one position, fp32 [columns]."""
    counter = torch.zeros((columns + 3) // 4, 4, dtype=torch.int64)
    counter[:, 0] = torch.arange(counter.shape[0])
    counter[:, 1], counter[:, 2] = noise.position, noise.sample
    words = philox4x32(counter, (noise.seed & 0xFFFFFFFF, noise.seed >> 32)).flatten()[:columns]
    uniform = ((words >> 9).double() + 0.5) * 2.0**-23
    return -torch.log(-torch.log(uniform)).float()


def _without_nan(logits: Tensor) -> Tensor:
    """NaN counts as the smallest logit: it never wins against a number."""
    return torch.where(logits.isnan(), -torch.inf, logits)


def _heads(spec: AttentionSpec, row: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q [heads, head_dim], k and v [kv_heads, head_dim] of one row of a qkv buffer."""
    heads = row.view(-1, spec.head_dim)
    q, k, v = torch.split(heads, [spec.heads, spec.kv_heads, spec.kv_heads])
    return q, k, v


def _place(spec: AttentionSpec, x: Tensor, norm: Tensor | None, position: int) -> Tensor:
    """q or k [heads, head_dim] normed, then rotated to its position."""
    if norm is not None:
        x = rms_norm(x, norm, spec.norm_eps)
    return rotate(x, spec.cos[position], spec.sin[position])


class ReferenceBackend:
    name = "reference"
    isa = "reference"
    block_size = 32

    def __init__(self, threads: int = 1) -> None:
        self.threads = threads

    def rotate(self, x: Tensor, block: int) -> None:
        check_rotation(x.shape[1], block)
        x[:] = hadamard_rotated(x, block)

    def pack(self, weight: LinearWeight) -> ReferenceLinear:
        scale: Tensor | None
        rotation = 0 if isinstance(weight, DenseWeight) else weight.rotation
        if isinstance(weight, DenseWeight):
            values, scale, precision = weight.weight, None, "bf16"
        elif isinstance(weight, Int8Weight):
            values, scale, precision = weight.codes, weight.scale.float(), "w8a8"
        else:
            weight.check()
            zero = weight.zero.repeat_interleave(weight.group_size, dim=1)
            values = weight.codes.to(torch.int8) - zero.to(torch.int8)
            scale, precision = weight.scale, "w4a8"
        bias = None if weight.bias is None else weight.bias.float()
        out_features, in_features = values.shape
        nbytes = values.numel() * values.element_size()
        if rotation:
            check_rotation(in_features, rotation)
        parts = (values, scale, bias)
        return ReferenceLinear(
            precision, out_features, in_features, nbytes, *parts, rotation=rotation
        )

    def pack_gated(
        self, gate: LinearWeight, up: LinearWeight, activation: Activation = "silu"
    ) -> PackedLinear:
        return replace(self.pack(concatenate((gate, up))), activation=activation)

    def norm_linear(
        self, rows: int, x: Buffer, norm: Buffer, eps: float, linear: PackedLinear, out: Buffer
    ) -> None:
        assert isinstance(linear, ReferenceLinear)
        for row in range(rows):
            out.tensor[row] = linear(rms_norm(x.tensor[row], norm.tensor[0], eps))

    def norm_gated(
        self, rows: int, x: Buffer, norm: Buffer, eps: float, linear: PackedLinear, out: Buffer
    ) -> None:
        assert isinstance(linear, ReferenceLinear)
        for row in range(rows):
            gate, up = linear(rms_norm(x.tensor[row], norm.tensor[0], eps)).chunk(2)
            out.tensor[row] = activate(gate, linear.activation) * up

    def linear(self, rows: int, a: Buffer, linear: PackedLinear, out: Buffer) -> None:
        assert isinstance(linear, ReferenceLinear)
        for row in range(rows):
            out.tensor[row] = linear(a.tensor[row])

    def linear_add(self, rows: int, a: Buffer, linear: PackedLinear, x: Buffer) -> None:
        assert isinstance(linear, ReferenceLinear)
        for row in range(rows):
            x.tensor[row] += linear(a.tensor[row])

    def norm_add(self, rows: int, y: Buffer, norm: Buffer, eps: float, x: Buffer) -> None:
        for row in range(rows):
            x.tensor[row] += rms_norm(y.tensor[row], norm.tensor[0], eps)

    def new_cache(self, spec: AttentionSpec, blocks: int) -> Buffer:
        """Per block: K [kv_heads, block_size, head_dim], then V in the same layout."""
        elements = 2 * spec.kv_heads * self.block_size * spec.head_dim
        return Buffer.of(torch.zeros(blocks, elements, dtype=torch.bfloat16))

    def bind(self, batch: RaggedBatch) -> RaggedBatch:
        return batch

    def _slots(self, spec: AttentionSpec, cache: Buffer, table: Tensor, slots: Tensor) -> Tensor:
        """K and V at `slots`: [2, kv_heads, slots, head_dim] bf16."""
        blocks = cache.tensor.view(-1, 2, spec.kv_heads, self.block_size, spec.head_dim)
        index = table[slots // self.block_size].long()
        found: Tensor = blocks[index, :, :, (slots % self.block_size).long()]
        return found.permute(1, 2, 0, 3)

    def _store(
        self, spec: AttentionSpec, cache: Buffer, table: Tensor, slot: int, kv: Tensor
    ) -> None:
        """kv [2, kv_heads, head_dim] -> the cache, rounded to BF16."""
        blocks = cache.tensor.view(-1, 2, spec.kv_heads, self.block_size, spec.head_dim)
        blocks[int(table[slot // self.block_size]), :, :, slot % self.block_size] = kv.bfloat16()

    def attend(
        self, bound: object, qkv: Buffer, spec: AttentionSpec, cache: Buffer, out: Buffer
    ) -> None:
        assert isinstance(bound, RaggedBatch)
        offsets = bound.row_offsets.tolist()
        for sequence, context in enumerate(bound.context_lengths.tolist()):
            table = bound.block_tables[sequence]
            rows = range(offsets[sequence], offsets[sequence + 1])
            for node, row in enumerate(rows):
                _, k, v = _heads(spec, qkv.tensor[row])
                k = _place(spec, k, spec.k_norm, int(bound.positions[row]))
                self._store(spec, cache, table, context + node, torch.stack((k, v)))
            for node, row in enumerate(rows):
                q, _, _ = _heads(spec, qkv.tensor[row])
                q = _place(spec, q, spec.q_norm, int(bound.positions[row])).bfloat16().float()
                slots = self._visible(bound, sequence, context, node, row)[-spec.window :]
                out.tensor[row] = self._attend_row(spec, cache, table, slots, q)

    def _visible(
        self, batch: RaggedBatch, sequence: int, context: int, node: int, row: int
    ) -> Tensor:
        """Cache slots that a row sees, in logical order."""
        if not batch.is_tree[sequence]:
            return torch.arange(context + node + 1)
        bits = int(batch.ancestors[row])
        own = [context + 1 + i for i in range(node) if bits >> i & 1]
        return torch.tensor([*range(context + 1), *own])

    def _attend_row(
        self, spec: AttentionSpec, cache: Buffer, table: Tensor, slots: Tensor, q: Tensor
    ) -> Tensor:
        """q [heads, head_dim] against the visible slots -> [heads * head_dim]."""
        k, v = self._slots(spec, cache, table, slots).float()
        grouped = q.view(spec.kv_heads, -1, spec.head_dim)
        scores = grouped @ k.transpose(1, 2) * spec.scale
        weights = torch.exp(scores - scores.amax(dim=-1, keepdim=True))
        attended: Tensor = (weights @ v) / weights.sum(dim=-1, keepdim=True)
        return attended.flatten()

    def move(
        self, spec: AttentionSpec, cache: Buffer, table: Tensor, source: Tensor, target: Tensor
    ) -> None:
        kept = self._slots(spec, cache, table, source).clone()
        for i, slot in enumerate(target.tolist()):
            self._store(spec, cache, table, slot, kept[:, :, i])

    def argmax(self, rows: int, logits: Buffer) -> list[int]:
        numbers = (_without_nan(row) for row in logits.tensor[:rows])
        return [int((row == row.max()).int().argmax()) for row in numbers]

    def top_k(self, logits: Buffer, row: int, k: int) -> tuple[Tensor, Tensor]:
        _, ids = torch.sort(_without_nan(logits.tensor[row]), descending=True, stable=True)
        return logits.tensor[row, ids[:k]], ids[:k]

    def gumbel_argmax(
        self, logits: Buffer, row: int, temperature: float, threshold: float, noise: NoiseKey
    ) -> int:
        scores = logits.tensor[row] * (1.0 / temperature)
        noisy = scores + gumbel_noise(scores.shape[0], noise)
        kept = torch.where(logits.tensor[row] >= threshold, noisy, -torch.inf)
        return int(kept.argmax())

    def measure_bandwidth(self) -> float:
        stream = torch.ones(1 << 26)
        return stream.nbytes * _calls_per_second(stream.sum, 0.0) * 1e-9

    def measure_peaks(self, seconds: float) -> Peaks:
        """The rates that torch reaches: a sum over 256 MiB, and square products."""
        stream = torch.ones(1 << 26)
        codes = torch.ones(1024, 1024, dtype=torch.int8)
        values = codes.bfloat16()
        return Peaks(
            stream.nbytes * _calls_per_second(stream.sum, seconds) * 1e-9,
            codes.shape[0] ** 3
            * _calls_per_second(lambda: integer_product(codes, codes), seconds)
            * 1e-9,
            codes.shape[0] ** 3 * _calls_per_second(lambda: values @ values, seconds) * 1e-9,
        )


def _calls_per_second(call: Callable[[], Tensor], seconds: float) -> float:
    """The best rate of single calls within about `seconds`, after one that warms up."""
    call()
    best, end = float("inf"), time.perf_counter() + seconds
    while best == float("inf") or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return 1.0 / best


def probe(cap: str, threads: int) -> ReferenceBackend:
    """This backend runs everywhere."""
    return ReferenceBackend(threads)
