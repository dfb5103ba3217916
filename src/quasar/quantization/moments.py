"""Second moments of the inputs of linears: what GPTQ knows of the calibration text.

H = sum_t omega_t x_t x_t^T / sum_t omega_t is summed sequence by sequence, so that it takes the
same memory for a text of any length. A block of rows of H is one thread's work and takes the
sequences in their order: the bits depend neither on the number of threads nor on their timing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor

import torch
from torch import Tensor

from quasar.quantization.hadamard import rotate_with_matrix

BLOCK = 1024
"""Rows of H that are one piece of work."""


def blocks(channels: int) -> Iterator[slice]:
    for start in range(0, channels, BLOCK):
        yield slice(start, min(start + BLOCK, channels))


class MomentSums:
    """By group of linears: H before its division, blocks on and above the diagonal."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._weights: dict[str, float] = defaultdict(float)

    def add(
        self,
        rows: Mapping[str, Sequence[Tensor]],
        weights: Mapping[str, Sequence[Tensor]],
        workers: Executor,
    ) -> None:
        """Some sequences: by group, the inputs [tokens, in] fp32 and omega [tokens] of each."""
        work = []
        for group, parts in rows.items():
            channels = parts[0].shape[1]
            if group not in self._sums:
                self._sums[group] = torch.zeros(channels, channels)
            self._weights[group] += sum(float(w.double().sum()) for w in weights[group])
            # Rows at the top have most to the right of them: the longest work begins first.
            work += [(group, block) for block in blocks(channels)]

        def add_to(part: tuple[str, slice]) -> None:
            group, block = part
            target = self._sums[group][block, block.start :]
            for x, weight in zip(rows[group], weights[group], strict=True):
                target.addmm_((x[:, block] * weight[:, None]).t(), x[:, block.start :])

        list(workers.map(add_to, work))

    def means(self) -> dict[str, Tensor]:
        """H [in, in] of each group; the sums are used up."""
        found = {}
        while self._sums:
            group, matrix = self._sums.popitem()
            for block in blocks(len(matrix)):
                matrix[block, block.start :] /= self._weights[group]
                matrix[block.stop :, block] = matrix[block, block.stop :].t()
            found[group] = matrix
        return found


def moments_over(moments: Tensor, divisor: Tensor, size: int = 0) -> Tensor:
    """Those of x / divisor, and where `size` is not 0 rotated in blocks of so many: R^T H R.

    moments [in, in] fp32, symmetric; divisor [in]. A copy, and the only one.
    """
    matrix = torch.empty_like(moments)
    for block in blocks(len(matrix)):
        torch.div(moments[block], divisor, out=matrix[block])
        matrix[block] /= divisor[block, None]
        if size:
            rotate_with_matrix(matrix[block], size)
    for block in blocks(len(matrix) if size else 0):
        columns = matrix[:, block].t().contiguous()
        rotate_with_matrix(columns, size)
        matrix[:, block] = columns.t()
    return matrix
