"""Save points of a run: after a layer, with what the next one needs."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from torch import Tensor

from quasar.checkpoints.writer import CheckpointWriter, SavePoint
from quasar.quantization.simulation import Fidelity
from quasar.quantization.trial import LinearError, Trial, TrialResult

SHARE = 0.1
"""Of the time, for saving at most: the hidden states of an 8B model are 230 to 640 MB."""


class Saver:
    """Saves a trial and its writer as often as SHARE allows; the first layer always."""

    def __init__(
        self, writer: CheckpointWriter, trial: Trial, others: Mapping[str, Tensor]
    ) -> None:
        """others: tensors to be saved beside the trial's."""
        self._writer, self._trial, self._others = writer, trial, others
        self._saved, self._cost = time.perf_counter(), 0.0

    def __call__(self, state: Mapping[str, Any]) -> None:
        """`state`: what else there is to know."""
        started = time.perf_counter()
        if (started - self._saved) * SHARE < self._cost:
            return
        errors = [asdict(error) for error in self._trial.errors]
        self._writer.save({**state, "errors": errors}, {**self._others, **_tensors(self._trial)})
        self._saved = time.perf_counter()
        self._cost = self._saved - started


def restore(trial: Trial, point: SavePoint) -> None:
    """Put a new trial where a saved one was."""
    for arm, states in trial.states.items():
        states[:] = [point.tensors[f"{arm}.{index}"] for index in range(len(states))]
    trial.errors[:] = [LinearError(**error) for error in point.state["errors"]]


def _tensors(trial: Trial) -> dict[str, Tensor]:
    return {f"{arm}.{i}": x for arm, states in trial.states.items() for i, x in enumerate(states)}


def result_from_json(content: Mapping[str, Any]) -> TrialResult:
    """Inverse of `dataclasses.asdict`."""
    errors = [LinearError(**error) for error in content["errors"]]
    arms = {name: Fidelity(**arm) for name, arm in content.items() if name != "errors"}
    return TrialResult(**arms, errors=errors)
