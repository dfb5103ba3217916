"""The tensors that stand for one linear in a compressed-tensors folder, as docs/format.md has them.

4-bit integers lie eight to a 32-bit word, the first in the lowest bits. The format counts them from
-8 to 7 and adds 8 before packing, so what is packed is our 0..15 as it is.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from quasar.kernels.base import DenseWeight, Int8Weight, LinearWeight

PER_WORD = 8
SCALE, ZERO = "weight_scale", "weight_zero_point"
PACKED, SHAPE = "weight_packed", "weight_shape"


def words(count: int) -> int:
    """32-bit words that hold so many 4-bit integers."""
    return -(-count // PER_WORD)


def pack(codes: Tensor) -> Tensor:
    """[rows, n] uint8 in 0..15 -> [rows, words(n)] int32, zeros behind."""
    padded = F.pad(codes, (0, -codes.shape[1] % PER_WORD))
    pairs = padded[:, ::2] | padded[:, 1::2] << 4
    # Flat, because the strides of a row or column alone may be anything.
    return pairs.flatten().view(torch.int32).view(codes.shape[0], -1)


def unpack(packed: Tensor, count: int) -> Tensor:
    """[rows, words(count)] int32 -> [rows, count] uint8 in 0..15."""
    pairs = packed.flatten().view(torch.uint8)
    codes = torch.stack((pairs & 15, pairs >> 4), dim=1).view(packed.shape[0], -1)
    return codes if codes.shape[1] == count else codes[:, :count].contiguous()


def stored_linear(weight: LinearWeight) -> Iterator[tuple[str, Tensor]]:
    """Names below the module's, and tensors; zero points are packed along the rows."""
    if isinstance(weight, DenseWeight):
        yield "weight", weight.weight
    elif isinstance(weight, Int8Weight):
        yield "weight", weight.codes
        yield SCALE, weight.scale[:, None]
    else:
        yield PACKED, pack(weight.codes)
        yield SCALE, weight.scale.bfloat16()
        yield ZERO, pack(weight.zero.t()).t().contiguous()
        yield SHAPE, torch.tensor(weight.codes.shape, dtype=torch.int64)
    if weight.bias is not None:
        yield "bias", weight.bias.bfloat16()
