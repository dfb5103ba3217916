"""From a row of logits to a token: filters become one threshold, noise is keyed by position.

Order of the filters: temperature, top-k, top-p, min-p. Each keeps ties of its last token, so that
the kept set depends on the logits alone. All sums are sequential fp64: no thread changes a bit.
"""

from __future__ import annotations

import numpy as np

from quasar.errors import QuasarError
from quasar.kernels.base import Backend, Buffer, NoiseKey
from quasar.types import SamplingParams

NOT_FINITE = "the model's logits are not finite"
NUCLEUS_START = 64
"""Tokens sorted at first for top-p; doubled eightfold until they hold the mass."""


class Sampler:
    """Draws tokens for one request."""

    def __init__(self, backend: Backend, params: SamplingParams, sample: int = 0) -> None:
        self.backend = backend
        self.params = params
        self.sample = sample

    @property
    def greedy(self) -> bool:
        return self.params.temperature == 0.0

    def draw(self, logits: Buffer, row: int, position: int) -> int:
        """The token at absolute `position`, by Gumbel-max over the kept logits of `row`."""
        threshold = self.threshold(logits, row)
        noise = NoiseKey(self.params.seed, self.sample, position)
        return self.backend.gumbel_argmax(logits, row, self.params.temperature, threshold, noise)

    def threshold(self, logits: Buffer, row: int) -> float:
        """Tokens with a logit below this are out. Raises QuasarError for non-finite logits."""
        params, vocabulary = self.params, logits.tensor.shape[1]
        largest = float(self.backend.top_k(logits, row, 1)[0][0])
        if not np.isfinite(largest):
            raise QuasarError(NOT_FINITE)
        threshold = -np.inf
        if 0 < params.top_k < vocabulary:
            threshold = float(self.backend.top_k(logits, row, params.top_k)[0][-1])
        if params.top_p < 1.0:
            threshold = max(threshold, self._nucleus(logits, row, threshold, largest))
        if params.min_p > 0.0:
            threshold = max(threshold, largest + params.temperature * float(np.log(params.min_p)))
        return threshold

    def _nucleus(self, logits: Buffer, row: int, threshold: float, largest: float) -> float:
        """Smallest logit of the smallest set that holds `top_p` of the mass above `threshold`."""
        values = logits.tensor[row].numpy().astype(np.float64)
        temperature = self.params.temperature
        kept = values[values >= threshold]
        wanted = self.params.top_p * np.exp((kept - largest) / temperature).sum()
        count = min(NUCLEUS_START, kept.size)
        while True:
            top = self.backend.top_k(logits, row, count)[0].numpy().astype(np.float64)
            mass = np.exp((top - largest) / temperature).cumsum()
            if mass[-1] >= wanted or count == kept.size:
                return float(top[min(int(np.searchsorted(mass, wanted)), count - 1)])
            count = min(8 * count, kept.size)
