"""Hadamard rotation of what a verifier rounds to INT8 (QuaRot, arXiv 2404.00456; SpinQuant's R4).

The inputs of `down`, silu(gate) * up, have outliers in other channels for every token, where no
smoothing scale reaches them: in Qwen2.5-Coder-0.5B the largest of 4,864 is 20 times their root mean
square, and a row's step is set by it. Times a Hadamard matrix H, block by block, an outlier spreads
over its block. (x H)(W H)^T = x W^T, so a verifier that rotates inputs computes the same function.

A W8A8 folder keeps plain weights, which every engine reads, and says that they are to be rotated; a
verifier rotates and rounds them once more when it loads them. Measured on that model, on 800 tokens
of the BF16 verifier's answers, mean KL to BF16 over that of plain rounding: searched scales alone
0.83, rotated before the first rounding 0.23, after it 0.30. 4-bit weights are stored rotated.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quasar.kernels.base import ROTATIONS, Int8Weight
from quasar.quantization.weights import round_to_nearest

LARGEST_BLOCK = 256
"""Channels. KL of that model with `down` alone in W8A8, over that without rotation: blocks of 64
0.07, of 128 0.06, of 256 0.05 to 0.06."""
CHUNK_VALUES = 1 << 22
"""Weights that are held in fp32 at a time."""

Rotate = Callable[[Tensor, int], None]
"""Rotates x [rows, columns] fp32 in place, in blocks of so many: `Backend.rotate`."""


def block_of(columns: int) -> int:
    """Size of the blocks in which so many channels are rotated; 0 where they cannot be."""
    fitting = [b for b in ROTATIONS if b <= LARGEST_BLOCK and columns % b == 0]
    return max(fitting, default=0)


def rotate_with_matrix(x: Tensor, block: int) -> None:
    """`Backend.rotate` as a product of matrices: fast for whole texts, but for the last bits."""
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < block:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), matrix)
    x[:] = (x.view(-1, block) @ (matrix * block**-0.5)).view(x.shape)


def rotated(weight: Int8Weight, block: int, rotate: Rotate) -> Int8Weight:
    """INT8 weights W -> W H, rounded again, a chunk in fp32 at a time."""
    codes, scale = torch.empty_like(weight.codes), torch.empty_like(weight.scale)
    rows = max(1, CHUNK_VALUES // codes.shape[1])
    for start in range(0, codes.shape[0], rows):
        chunk = slice(start, start + rows)
        values = weight.codes[chunk].float() * weight.scale[chunk, None]
        rotate(values, block)
        part = round_to_nearest(values)
        codes[chunk], scale[chunk] = part.codes, part.scale
    return Int8Weight(codes, scale, weight.bias, block)
