"""How rotary frequencies are stretched to reach beyond the context a model was first trained on.

Each kind turns the plain frequencies theta^(-2i/R), [R / 2] fp64, into its own, and may scale
cosines and sines by `attention_factor`. `length` is the most that a text may grow to, not what
there is of it: the angle of a key in the cache must never change.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Position interpolation (arXiv 2306.15595): all frequencies divided by `factor`."""

    factor: float
    attention_factor: float = 1.0

    def stretched(self, frequencies: Tensor, theta: float, length: int) -> Tensor:
        return frequencies / self.factor


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1 (arXiv 2407.21783): wavelengths above original / low are divided by `factor`,
    those below original / high are kept, the ones between interpolated."""

    factor: float
    low: float
    high: float
    original: int
    attention_factor: float = 1.0

    def stretched(self, frequencies: Tensor, theta: float, length: int) -> Tensor:
        turns = self.original * frequencies / (2 * math.pi)
        kept = ((turns - self.low) / (self.high - self.low)).clamp(0, 1)
        return frequencies * (kept + (1 - kept) / self.factor)


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071): as Llama3Scaling, but interpolated over the dimensions between
    those that turn `fast` and `slow` times in the original context."""

    factor: float
    original: int
    fast: float
    slow: float
    truncate: bool
    """Round the two dimensions outwards to whole ones."""
    attention_factor: float

    def stretched(self, frequencies: Tensor, theta: float, length: int) -> Tensor:
        pairs = frequencies.shape[0]
        low, high = (self._pair(turns, pairs, theta) for turns in (self.fast, self.slow))
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * pairs - 1)
        width = high - low or 0.001
        divided = ((torch.arange(pairs, dtype=torch.float64) - low) / width).clamp(0, 1)
        return frequencies * (1 - divided + divided / self.factor)

    def _pair(self, turns: float, pairs: int, theta: float) -> float:
        """The pair (as a real number) that turns this often in the original context."""
        return pairs * math.log(self.original / (turns * 2 * math.pi)) / math.log(theta)


@dataclass(frozen=True, slots=True)
class LongRopeScaling:
    """LongRoPE (arXiv 2402.13753): a divisor for each frequency, one set for texts within the
    original context, one for longer ones.

    transformers switches sets when a text grows past the original context, which leaves the keys
    before it rotated by the other set. Here a text that may grow past it has the second set from
    its first token on.
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    original: int
    attention_factor: float

    def stretched(self, frequencies: Tensor, theta: float, length: int) -> Tensor:
        divisors = self.long if length > self.original else self.short
        return frequencies / torch.tensor(divisors, dtype=torch.float64)


Scaling = LinearScaling | Llama3Scaling | YarnScaling | LongRopeScaling
