"""Orthogonal matrices of any size that spread every channel over all others.

R = diag(signs) (F_1 kron F_2 kron ...) diag(last), the signs random from a fixed seed. The factors
are Hadamard matrices over the root of their size, with entries of one magnitude: an outlier in one
channel comes out as small as it can be in each (QuaRot, arXiv 2404.00456, section 3). Sylvester's
have the orders 2^k, Paley's many others: 576 = 36 * 16, 896 = 28 * 32. A size for which none of
these serves has a random orthogonal factor in the place of Paley's. Without the last signs the
Hadamard matrix by which a verifier multiplies the inputs of an INT8 head would undo a part of R.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LARGEST_POWER = 64
"""Larger powers of two are split: a product with two factors of 64 takes 1/32 of one with 4096."""


@dataclass(frozen=True, slots=True)
class Rotation:
    """The matrix R; signs and last [n] fp32, factors [f, f] fp32, the product of their sizes n."""

    signs: Tensor
    factors: tuple[Tensor, ...]
    last: Tensor

    @classmethod
    def of(cls, size: int, seed: int) -> Rotation:
        generator = torch.Generator().manual_seed(seed)
        signs, last = torch.randint(0, 2, (2, size), generator=generator).float() * 2 - 1
        return cls(signs, tuple(x.float() for x in _factors(size, generator)), last)

    def __call__(self, x: Tensor) -> Tensor:
        """x R: x [..., n] fp32 -> the same shape."""
        return self._product(x * self.signs, 1) * self.last

    def rows(self, x: Tensor) -> Tensor:
        """R^T x: x [n, columns] fp32 -> the same shape."""
        return self._product(x * self.signs[:, None], x.shape[1]) * self.last[:, None]

    def _product(self, x: Tensor, columns: int) -> Tensor:
        """`columns` numbers lie between those that one sum takes in neighbouring channels."""
        shape, inner = x.shape, len(self.signs) * columns
        for factor in self.factors:
            inner //= len(factor)
            # A channel's number has a digit a factor, the first one's counts most.
            if inner == 1:
                x = x.reshape(-1, len(factor)) @ factor
                continue
            parts = x.reshape(-1, len(factor), inner)
            x = torch.bmm(factor.t().expand(len(parts), -1, -1), parts)
        return x.reshape(shape)


def _factors(size: int, generator: torch.Generator) -> list[Tensor]:
    """fp64; the first is none of Sylvester's, if `size` is no power of two."""
    odd = size // (size & -size)
    if odd == 1:
        return _sylvester(size)
    order = odd
    while size % order == 0:
        if (matrix := paley(order)) is not None:
            return [matrix / order**0.5, *_sylvester(size // order)]
        order *= 2
    return [_random(odd, generator), *_sylvester(size // odd)]


def _sylvester(size: int) -> list[Tensor]:
    """Factors of a power of two, none for 1."""
    if size > LARGEST_POWER:
        return [*_sylvester(LARGEST_POWER), *_sylvester(size // LARGEST_POWER)]
    if size == 1:
        return []
    two, matrix = torch.tensor([[1.0, 1.0], [1.0, -1.0]]).double(), torch.ones(1, 1).double()
    while len(matrix) < size:
        matrix = torch.kron(matrix, two)
    return [matrix / size**0.5]


def _random(size: int, generator: torch.Generator) -> Tensor:
    """Uniform over orthogonal matrices: QR of normal entries, the diagonal of R made positive."""
    normal = torch.randn(size, size, generator=generator, dtype=torch.float64)
    q, r = torch.linalg.qr(normal)
    rotation: Tensor = q * r.diagonal().sign()
    return rotation


def paley(order: int) -> Tensor | None:
    """Paley's Hadamard matrix [order, order] of +-1, fp64, for primes q; None if there is none.

    First construction: order = q + 1, q = 3 mod 4; second: order = 2 (q + 1), q = 1 mod 4.
    """
    if order % 4:
        return None
    if _is_prime(order - 1):
        return _bordered(order - 1, -1.0) + torch.eye(order).double()
    half = order // 2
    if half % 4 == 2 and _is_prime(half - 1):
        symmetric, identity = _bordered(half - 1, 1.0), torch.eye(half).double()
        first = torch.tensor([[1.0, 1.0], [1.0, -1.0]]).double()
        second = torch.tensor([[1.0, -1.0], [-1.0, -1.0]]).double()
        return torch.kron(symmetric, first) + torch.kron(identity, second)
    return None


def _bordered(q: int, column: float) -> Tensor:
    """[q + 1, q + 1]: the quadratic characters of i - j below a row of ones, 0 on the diagonal."""
    square = torch.zeros(q, dtype=torch.bool)
    square[torch.arange(1, q) ** 2 % q] = True
    differences = (torch.arange(q)[:, None] - torch.arange(q)) % q
    matrix = torch.zeros(q + 1, q + 1, dtype=torch.float64)
    matrix[0, 1:], matrix[1:, 0] = 1.0, column
    matrix[1:, 1:] = square[differences] * 2.0 - 1.0
    matrix.fill_diagonal_(0.0)
    return matrix


def _is_prime(n: int) -> bool:
    return n > 1 and all(n % d for d in range(2, int(n**0.5) + 1))
