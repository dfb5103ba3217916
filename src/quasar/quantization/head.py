"""The integer heads of a verifier, made of the target's BF16 rows when a model is loaded.

Their inputs are rotated (`hadamard.py`), the rows likewise before they are rounded: no channel of
the final norm stands out then. KL of SmolLM2-135M, W8A8, WikiText, with the head in BF16 0.0054, in
INT8 0.0121, in INT8 rotated 0.0064; in W4A8 0.092, rotated 0.065.

W4A8: groups of 32 inputs; each takes the grid of a few that has the least square error, from the
one that just covers its weights to a narrower one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quasar.kernels.base import Int4Weight, Int8Weight
from quasar.quantization.hadamard import Rotate, block_of
from quasar.quantization.weights import WeightFormat, clipped_grid, round_to_nearest

CHUNK_ROWS = 4096
"""Rows of a head that are held in fp32 at a time: 16 MB at 1024 columns."""
GROUP_SIZE = 32
SHRINKS = (1.0, 0.96, 0.92)
"""Shares of the covering grid: they take 5 % of the error of Qwen2.5-0.5B's head, 3 % of normal
weights'; twice as many take no more than another 0.3 %."""


def quantize_head(rows: Tensor, rotate: Rotate) -> Int8Weight:
    """rows [vocab, hidden] bf16, a chunk in fp32 at a time."""
    block = block_of(rows.shape[1])
    head = Int8Weight(
        torch.empty(rows.shape, dtype=torch.int8), torch.empty(rows.shape[0]), rotation=block
    )
    for start in range(0, rows.shape[0], CHUNK_ROWS):
        chunk = slice(start, start + CHUNK_ROWS)
        part = round_to_nearest(rotated_rows(rows[chunk], block, rotate))
        head.codes[chunk], head.scale[chunk] = part.codes, part.scale
    return head


def quantize_head_int4(rows: Tensor, rotate: Rotate) -> Int4Weight:
    """As `quantize_head`; hidden is a multiple of 32."""
    groups, block = (rows.shape[0], rows.shape[1] // GROUP_SIZE), block_of(rows.shape[1])
    head = Int4Weight(
        torch.empty(rows.shape, dtype=torch.uint8),
        torch.empty(groups),
        torch.empty(groups, dtype=torch.uint8),
        rotation=block,
    )
    for start in range(0, rows.shape[0], CHUNK_ROWS):
        chunk = slice(start, start + CHUNK_ROWS)
        part = round_groups(rotated_rows(rows[chunk], block, rotate))
        head.codes[chunk], head.scale[chunk], head.zero[chunk] = part.codes, part.scale, part.zero
    return head


def rotated_rows(rows: Tensor, block: int, rotate: Rotate) -> Tensor:
    """A copy in fp32, rotated unless `block` is 0."""
    values = rows.to(torch.float32, copy=True)
    if block:
        rotate(values, block)
    return values


def round_groups(weight: Tensor, shrinks: Sequence[float] = SHRINKS) -> Int4Weight:
    """weight [out, in] fp32 -> the nearest codes on each group's best grid."""
    form = WeightFormat(4, GROUP_SIZE)
    grid = clipped_grid(weight, form, torch.ones(weight.shape[1]), shrinks)
    rounded = grid.pack(grid.codes(weight), None)
    assert isinstance(rounded, Int4Weight)
    return rounded
