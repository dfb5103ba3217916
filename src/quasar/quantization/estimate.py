"""What a run of the quantiser will take, from one layer done in full and a piece of the head.

Every layer costs the same, so time is measured, not modelled: search, clipping and GPTQ have no
simple law. Sizes are exact, but for linears that turn out to be better left in BF16.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quasar.checkpoints.base import Checkpoint
from quasar.checkpoints.writer import check_target
from quasar.errors import UsageError
from quasar.memory import peak_memory
from quasar.models.tensors import EMBEDDING, final_norm, head_rows
from quasar.quantization.pipeline import (
    QuantizeOptions,
    Source,
    free_space,
    space_needed,
    taken_layer,
)
from quasar.quantization.simulation import HEAD_CHUNK
from quasar.quantization.trial import Trial, workers

ProgressCallback = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Estimate:
    seconds: float
    peak_rss_bytes: int
    """Mapped pages of the model's file included, as far as they are held at a time."""
    shard_bytes: list[int]
    """The size of each file of weights; with `--rotate` those of the rotated form."""
    space_bytes: int
    """What the disk must have free: the files of each form, and twice what a save point keeps."""
    free_bytes: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def estimate(
    checkpoint: Checkpoint, out: Path, options: QuantizeOptions, progress: ProgressCallback
) -> Estimate:
    """Refuses what `quantize` refuses before its work; writes nothing."""
    out = Path(os.path.realpath(out))
    check_target(out)
    place = _existing(out)
    source = Source.of(checkpoint, options)
    steps = _Steps(progress, 2 + 2 * options.rotate + 1)
    seconds = _measured(source, steps)
    if options.rotate:
        seconds += _measured(source.rotated, steps)
    seconds += _reading(source)
    steps.done()
    return Estimate(
        seconds=seconds,
        peak_rss_bytes=peak_memory(),
        shard_bytes=source.file_bytes,
        space_bytes=space_needed(source),
        free_bytes=free_space(place),
    )


def _existing(out: Path) -> Path:
    """The folder that `out` will lie in, or the nearest that is there already."""
    place = next(parent for parent in out.parents if parent.exists())
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        raise UsageError(f"cannot write {out}: {place} is no folder that may be written to")
    return place


class _Steps:
    """Counts what is done of `total`."""

    def __init__(self, progress: ProgressCallback, total: int) -> None:
        self._progress, self._total, self._count = progress, total, 0
        progress("estimating", 0, total)

    def done(self) -> None:
        self._count += 1
        self._progress("estimating", self._count, self._total)


def _measured(source: Source, steps: _Steps) -> float:
    """Seconds of all layers and of the measurement at the end."""
    config, checkpoint = source.config, source.checkpoint
    with workers() as pool:
        started = time.perf_counter()
        trial = _trial(source, pool)
        trial.advance(0, taken_layer(checkpoint, config, 0))
        layer = time.perf_counter() - started
        checkpoint.release()
        steps.done()
        started = time.perf_counter()
        head = head_rows(checkpoint, config)[:HEAD_CHUNK]
        trial.result(final_norm(checkpoint, config), head, lambda done, total: None)
        piece = time.perf_counter() - started
        checkpoint.release()
    steps.done()
    return config.layers * layer + piece * config.vocab_size / len(head)


def _trial(source: Source, pool: Executor) -> Trial:
    table = source.checkpoint.tensor(EMBEDDING)
    return Trial(source.config, source.recipe, source.text, table, pool)


def _reading(source: Source) -> float:
    """The checksum of the source."""
    file = source.checkpoint.files[0]
    started = time.perf_counter()
    piece = next(iter(file.chunks()))
    hashlib.sha256(piece)
    seconds = time.perf_counter() - started
    return seconds * sum(file.size for file in source.checkpoint.files) / len(piece)
