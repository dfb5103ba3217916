"""The W4A8 head, made of the target's BF16 rows when a model is loaded.

Groups of 32 inputs; each takes the grid of a few that has the least square error, from the one
that just covers its weights to a narrower one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quasar.kernels.base import Int4Weight
from quasar.quantization.weights import HEAD_CHUNK_ROWS

GROUP_SIZE = 32
SHARES = (1.0, 0.96, 0.92)
"""Of the covering grid. Together they take 5 % of the error of Qwen2.5-0.5B's head, 3 % of normal
weights'; twice as many shares take no more than another 0.3 %."""


def quantize_head_int4(rows: Tensor) -> Int4Weight:
    """rows [vocab, hidden] bf16, hidden a multiple of 32, a chunk in fp32 at a time."""
    groups = (rows.shape[0], rows.shape[1] // GROUP_SIZE)
    head = Int4Weight(
        torch.empty(rows.shape, dtype=torch.uint8),
        torch.empty(groups),
        torch.empty(groups, dtype=torch.uint8),
    )
    for start in range(0, rows.shape[0], HEAD_CHUNK_ROWS):
        chunk = slice(start, start + HEAD_CHUNK_ROWS)
        part = round_groups(rows[chunk].float())
        head.codes[chunk], head.scale[chunk], head.zero[chunk] = part.codes, part.scale, part.zero
    return head


def round_groups(weight: Tensor, shares: tuple[float, ...] = SHARES) -> Int4Weight:
    """weight [out, in] fp32 -> the nearest codes on each group's best grid. A group of zeros (or so
    small that its scale would leave the normal numbers) gets scale 1."""
    grouped = weight.view(len(weight), -1, GROUP_SIZE)
    low = grouped.amin(dim=2, keepdim=True).clamp_max_(0)
    high = grouped.amax(dim=2, keepdim=True).clamp_min_(0)
    best, least = _round(grouped, low * shares[0], high * shares[0])
    for share in shares[1:]:
        found, error = _round(grouped, low * share, high * share)
        better = error < least
        best = [torch.where(better, new, old) for new, old in zip(found, best, strict=True)]
        least = torch.minimum(error, least)
    codes, scale, zero = best
    return Int4Weight(codes.flatten(1).to(torch.uint8), scale[..., 0], zero[..., 0].to(torch.uint8))


def _round(grouped: Tensor, low: Tensor, high: Tensor) -> tuple[list[Tensor], Tensor]:
    """Codes, scale and zero point of the grid from `low` to `high`; its square error."""
    mantissa, exponent = torch.frexp((high - low) / 15.0)
    scale = torch.ldexp((mantissa * 32.0).round_() / 32.0, exponent)
    scale = torch.where(scale >= torch.finfo(torch.float32).tiny, scale, torch.ones_like(scale))
    zero = (-low / scale).round_().clamp_(0, 15)
    codes = (grouped / scale).add_(zero).round_().clamp_(0, 15)
    error = ((codes - zero).mul_(scale)).sub_(grouped).square_().sum(dim=2, keepdim=True)
    return [codes, scale, zero], error
