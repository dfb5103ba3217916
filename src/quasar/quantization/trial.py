"""Three models side by side on one text: BF16, a recipe, and plain round-to-nearest.

All hidden states pass through one layer before the next is read, so a trial needs one layer in
memory, and when the last layer is done the whole-model effect of the recipe is known.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from quasar.errors import CheckpointError
from quasar.kernels.base import DenseWeight, Int8Weight, LinearWeight
from quasar.kernels.reference import rms_norm
from quasar.memory import trim_heap
from quasar.models.config import ModelConfig
from quasar.models.layer import Layer, LayerTensors, Observer, embedded, unobserved
from quasar.models.tensors import GROUPS, layer_prefix
from quasar.quantization.calibrate import (
    CalibrationText,
    SampledRows,
    sample_layer,
)
from quasar.quantization.recipe import LayerResult, Recipe
from quasar.quantization.simulation import Arm, Fidelity, compare, relative_errors, simulated
from quasar.quantization.smooth import UNSMOOTHED
from quasar.quantization.weights import QuantizedLayer

Seen = TypeVar("Seen", bound=Observer)


@contextmanager
def workers() -> Iterator[Executor]:
    """A thread for each CPU, each of which runs torch operations alone, on its own sequence.

    On a busy machine the barriers inside torch's own parallel operations cost tens of milliseconds
    each: quantising a 135M model beside three other processes took more than ten minutes with
    them, two without.
    """
    threads = torch.get_num_threads()
    pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)))
    torch.set_num_threads(1)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)


@dataclass(frozen=True, slots=True)
class LinearError:
    """Relative error |quantised output - output| / |output| of one linear on held-out inputs."""

    name: str
    scheme: str
    """w8a8, w4a8 or bf16."""
    smoothing: str
    rotation: int
    """Size of the blocks in which a verifier rotates its inputs, or 0."""
    recipe: float
    rtn: float


@dataclass(frozen=True, slots=True)
class TrialResult:
    """How the models predict the held-out text, and the error of every linear."""

    bf16: Fidelity
    recipe: Fidelity
    rtn: Fidelity
    int8_head: Fidelity
    """The recipe with an INT8 head, as a verifier makes it by default."""
    errors: list[LinearError]


class Trial:
    """The texts on their way through the model.

    A layer is calibrated on the BF16 model's activations. On those of the quantised layers before
    it KL came out 2 % lower for SmolLM2-135M and 5 % higher for Qwen2.5-Coder-0.5B: within noise,
    and it costs another pass over the calibration text.
    """

    def __init__(
        self,
        config: ModelConfig,
        recipe: Recipe,
        text: CalibrationText,
        table: Tensor,
        workers: Executor,
    ) -> None:
        """table [vocab, hidden] bf16: the embedding."""
        self.config, self.workers = config, workers
        self.recipe = recipe
        self.calibration = [embedded(table, ids, config) for ids in text.calibration]
        self.bf16 = [embedded(table, ids, config) for ids in text.held_out]
        self.quantized, self.rtn = list(self.bf16), list(self.bf16)
        self.targets = torch.cat([ids[1:] for ids in text.held_out])
        self.errors: list[LinearError] = []

    @property
    def states(self) -> dict[str, list[Tensor]]:
        """The residual streams of all texts: all that the next layer needs. May be replaced."""
        return {
            "calibration": self.calibration,
            "bf16": self.bf16,
            "quantized": self.quantized,
            "rtn": self.rtn,
        }

    def advance(self, index: int, tensors: LayerTensors) -> QuantizedLayer:
        """Move every text through one layer; gives the layer as the recipe quantises it."""
        layer = Layer(self.config, index, tensors)
        rows = self._move(self.bf16, layer, SampledRows)
        plain = QuantizedLayer.round(tensors, self.recipe.format)
        result = LayerResult(plain, plain, UNSMOOTHED)
        if self.recipe != self.recipe.plain:
            result = self._calibrated(layer_prefix(index), layer, tensors)
        for states, arm in ((self.rtn, plain), (self.quantized, result.verified)):
            self._move(states, simulated(self.config, index, arm), lambda: unobserved)
        held_out = {g: torch.cat([part[g] for part in rows]) for g in GROUPS}
        self._record(layer_prefix(index), tensors, result, plain, held_out)
        return result.layer

    def _calibrated(self, prefix: str, layer: Layer, tensors: LayerTensors) -> LayerResult:
        """What was seen of the inputs, 900 MB of an 8B model's layer for GPTQ, goes at the end."""
        sample = sample_layer(layer, self.calibration, self.workers, self.recipe.needs_moments)
        for group, names in GROUPS.items():
            moments = sample[group].moments
            if moments is not None and not moments.diagonal().isfinite().all():
                raise CheckpointError(f"inputs of {prefix}{names[0]} are not finite or too large")
        return self.recipe.apply(tensors, sample, self.config, self.workers)

    def _record(
        self,
        prefix: str,
        tensors: LayerTensors,
        result: LayerResult,
        plain: QuantizedLayer,
        held_out: Mapping[str, Tensor],
    ) -> None:
        scales = result.smoothing.scales
        observed = (held_out, self.config, self.workers)
        recipe = relative_errors(tensors, result.verified, scales, *observed)
        rtn = relative_errors(tensors, plain, {}, *observed)
        for group, names in GROUPS.items():
            label = result.smoothing.labels.get(group, "none")
            for name in names:
                weight = result.verified.linears[name]
                scheme = scheme_of(weight)
                rotation = 0 if isinstance(weight, DenseWeight) else weight.rotation
                figures = (rotation, recipe[name], rtn[name])
                self.errors.append(LinearError(prefix + name, scheme, label, *figures))

    def _move(self, states: list[Tensor], layer: Layer, make: Callable[[], Seen]) -> list[Seen]:
        """Replace the hidden states of each sequence by the layer's output; gives the observers."""

        def run(index: int) -> Seen:
            observer = make()
            states[index] = layer(states[index], observer)
            return observer

        seen = list(self.workers.map(run, range(len(states))))
        trim_heap()
        return seen

    def result(
        self,
        norm: Tensor,
        head: Tensor,
        progress: Callable[[int, int], None],
        reference: Arm | None = None,
    ) -> TrialResult:
        """After the last layer, with the final norm [hidden] fp32 and the head [vocab, hidden].

        `reference`: what to compare with, where it is not this trial's own BF16 model.
        """
        outputs = self._outputs(self.quantized, norm)
        arms = [
            reference or Arm(self.reference(norm)),
            Arm(outputs),
            Arm(self._outputs(self.rtn, norm)),
            Arm(outputs, int8_head=True),
        ]
        bf16, recipe, rtn, int8 = compare(arms, head, self.targets, self.workers, progress)
        return TrialResult(bf16, recipe, rtn, int8, self.errors)

    def reference(self, norm: Tensor) -> Tensor:
        """After the last layer: what the BF16 final norm gives, [positions, hidden] fp32."""
        return self._outputs(self.bf16, norm)

    def _outputs(self, arm: Sequence[Tensor], norm: Tensor) -> Tensor:
        eps = self.config.rms_norm_eps
        return torch.cat([rms_norm(hidden[:-1], norm, eps) for hidden in arm])


def scheme_of(weight: LinearWeight) -> str:
    if isinstance(weight, DenseWeight):
        return "bf16"
    return "w8a8" if isinstance(weight, Int8Weight) else "w4a8"
