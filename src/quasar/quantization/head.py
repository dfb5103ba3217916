"""The W4A8 head, made of the target's BF16 rows when a model is loaded.

Groups of 32 inputs; each takes the grid of a few that has the least square error, from the one
that just covers its weights to a narrower one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quasar.kernels.base import Int4Weight
from quasar.quantization.weights import HEAD_CHUNK_ROWS, WeightFormat, clipped_grid

GROUP_SIZE = 32
SHRINKS = (1.0, 0.96, 0.92)
"""Shares of the covering grid: they take 5 % of the error of Qwen2.5-0.5B's head, 3 % of normal
weights'; twice as many take no more than another 0.3 %."""


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


def round_groups(weight: Tensor, shrinks: Sequence[float] = SHRINKS) -> Int4Weight:
    """weight [out, in] fp32 -> the nearest codes on each group's best grid."""
    form = WeightFormat(4, GROUP_SIZE)
    grid = clipped_grid(weight, form, torch.ones(weight.shape[1]), shrinks)
    rounded = grid.pack(grid.codes(weight), None)
    assert isinstance(rounded, Int4Weight)
    return rounded
