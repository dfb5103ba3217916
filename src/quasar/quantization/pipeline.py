"""Checkpoint in, W8A8 or W4A8 checkpoint out: one layer in memory at a time, all or nothing.

A recipe can be worse than plain round-to-nearest (SmoothQuant is on some models), so both are
measured against BF16 on held-out text, and the better one is what the folder holds. A rotated form
of the model, where one is asked for, is written beside the other, and the better of the two stays.
A run that is interrupted goes on where it last saved, and its folder has the bytes of an
uninterrupted one.
"""

from __future__ import annotations

import hashlib
import logging
import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quasar import __version__
from quasar.checkpoints.base import Checkpoint
from quasar.checkpoints.shards import SHARD_BYTES, plan
from quasar.checkpoints.writer import CheckpointWriter
from quasar.errors import CheckpointError, UsageError
from quasar.kernels.base import ROTATIONS
from quasar.memory import peak_memory, trim_heap
from quasar.models.config import ModelConfig
from quasar.models.families import parse_config
from quasar.models.layer import LayerTensors, read_layer
from quasar.models.tensors import (
    EMBEDDING,
    FINAL_NORM,
    GROUPS,
    HEAD,
    check_model,
    final_norm,
    head_rows,
    layer_prefix,
    layer_shapes,
    linear_shapes,
)
from quasar.quantization.calibrate import SEQUENCE_TOKENS, CalibrationText, calibration_text
from quasar.quantization.folder import folder_config
from quasar.quantization.hadamard import block_of
from quasar.quantization.recipe import (
    GROUP_SIZES,
    SCHEMES,
    SMOOTHING,
    WEIGHTS,
    Recipe,
    default_int8,
    default_recipe,
)
from quasar.quantization.report import REPORT_FILE, Report, Rotation
from quasar.quantization.rotation import RotatedCheckpoint, check_rotatable
from quasar.quantization.saving import Saver, restore, result_from_json
from quasar.quantization.simulation import Arm
from quasar.quantization.trial import Trial, TrialResult, workers
from quasar.quantization.weights import QuantizedLayer
from quasar.text.tokenizer import Tokenizer, load_tokenizer

log = logging.getLogger("quasar")

UNROTATED, REFERENCE = "unrotated", "reference"
"""What a save point keeps while the rotated form is made: what the other one came to, and the
outputs of the BF16 model's final norm on the held-out text."""

ProgressCallback = Callable[[str, int, int], None]
"""Called with a stage's name, steps done and steps in all; what it raises stops the run."""


@dataclass(frozen=True, slots=True)
class QuantizeOptions:
    """What to make of a checkpoint. Refuses what this version cannot do."""

    scheme: str = "w8a8"
    smooth: str = "search"
    weights: str | None = None
    """How weights are rounded; None for the scheme's default."""
    group_size: int | None = None
    """Input channels that share a scale, for 4-bit weights; None for the default."""
    hadamard: bool | None = None
    """Whether a verifier rotates inputs of `down`; None: if smoothing is searched."""
    calibration: Path | None = None
    """A UTF-8 text; None for the built-in one."""
    shard_bytes: int = SHARD_BYTES
    """Largest file of weights, unless one tensor is larger."""
    rotate: bool = False
    """Whether to make a rotated form too, and to keep it if it is better."""
    int8: tuple[str, ...] | None = None
    """Groups that keep 8 bits in W4A8; None: those of `default_int8`, if smoothing is searched."""

    def __post_init__(self) -> None:
        for option, value, known in (
            ("--scheme", self.scheme, SCHEMES),
            ("--smooth", self.smooth, SMOOTHING),
            ("--weights", self.weights, (None, *WEIGHTS)),
        ):
            if value not in known:
                raise UsageError(
                    f"{option} {value} is not available in this version, which has "
                    f"{', '.join(name for name in known if name)}"
                )
        if self.group_size is not None and self.scheme == "w8a8":
            raise UsageError("--group-size: w8a8 has one scale a row of weights, no groups")
        if self.group_size not in (None, *GROUP_SIZES):
            raise UsageError(
                f"--group-size {self.group_size} is none of {', '.join(map(str, GROUP_SIZES))}"
            )

        self._check_int8()

    def _check_int8(self) -> None:
        if self.int8 is None:
            return
        if self.scheme == "w8a8":
            raise UsageError("--int8: w8a8 has 8 bits everywhere")
        for group in self.int8:
            if group not in GROUPS:
                raise UsageError(f"--int8 {group!r} is none of {', '.join(GROUPS)}")
        if set(self.int8) == set(GROUPS):
            raise UsageError("--int8: with all groups in INT8 this is --scheme w8a8")

    def recipe(self, config: ModelConfig) -> Recipe:
        """For this model; UsageError where its inputs of `down` cannot be rotated as asked."""
        block, int8 = self._block(config), self.int8
        if int8 is None:
            int8 = default_int8(config) if self.smooth == "search" else ()
        chosen = tuple(group for group in GROUPS if group in int8)
        return default_recipe(
            self.scheme, self.smooth, self.weights, self.group_size, block, chosen
        )

    def _block(self, config: ModelConfig) -> int:
        wanted = self.hadamard
        if wanted is None:
            wanted = self.smooth == "search"
        block = block_of(config.intermediate_size) if wanted else 0
        if self.hadamard and not block:
            raise UsageError(
                f"--hadamard on: no power of two from {ROTATIONS[0]} on divides the "
                f"{config.intermediate_size} inputs of down_proj"
            )
        return block


def quantize(
    checkpoint: Checkpoint,
    out: Path,
    options: QuantizeOptions | None = None,
    progress: ProgressCallback | None = None,
) -> Report:
    """Write the quantised form of `checkpoint` to the folder `out`, with its report card.

    Raises UsageError for options, a calibration file or a target folder that cannot be used, and
    CheckpointError for the model's faults; these leave nothing behind. What else is raised, also by
    `progress`, may leave a hidden folder beside `out`, from which the same call goes on.
    """
    options = options or QuantizeOptions()
    source = Source.of(checkpoint, options)
    with CheckpointWriter(out, options.shard_bytes, resumable=True) as writer:
        check_space(writer.folder, source)
        return _Run(source, writer, progress or (lambda *_: None)).report()


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint and what to make of it. Whatever can be refused about the two was refused."""

    checkpoint: Checkpoint
    config: ModelConfig
    tokenizer: Tokenizer
    text: CalibrationText
    options: QuantizeOptions
    recipe: Recipe

    @classmethod
    def of(cls, checkpoint: Checkpoint, options: QuantizeOptions) -> Source:
        if checkpoint.precision != "bf16":
            raise CheckpointError(
                f"{checkpoint.path} is already quantised: it holds {checkpoint.precision} weights"
            )
        config = parse_config(checkpoint.config)
        if options.rotate:
            check_rotatable(config)
        check_model(checkpoint, config)
        recipe = options.recipe(config)
        check_groups(config, recipe)
        tokenizer = load_tokenizer(checkpoint)
        longest = min(SEQUENCE_TOKENS, config.context_length)
        text = calibration_text(tokenizer, options.calibration, longest, recipe.needs_moments)
        return cls(checkpoint, config, tokenizer, text, options, recipe)

    @property
    def rotated(self) -> Source:
        """What is made where a rotation is asked for and turns out better."""
        checkpoint = RotatedCheckpoint(self.checkpoint, self.config)
        config = replace(self.config, tied_embeddings=False)
        return replace(self, checkpoint=checkpoint, config=config)

    def key(self, fingerprint: str) -> str:
        """Equal for runs that make the same folder, the name of the calibration file included."""
        digest = hashlib.sha256()
        for ids in (*self.text.calibration, *self.text.held_out):
            digest.update(ids.numpy().tobytes() + b"end")
        options = (self.recipe, self.options.rotate, self.options.shard_bytes, self.text.name)
        versions = (__version__, torch.__version__)
        return f"{fingerprint} {digest.hexdigest()} {options} {versions}"

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Names, shapes and types of all that is written if no linear stays in BF16: no data."""
        layer = blank_layer(self.config, self.recipe)
        for index in range(self.config.layers):
            for name, tensor in layer.stored(self.config):
                yield layer_prefix(index) + name, tensor
        for name in self.tables:
            shape = self.checkpoint.shape(name)
            yield name, torch.empty(shape, dtype=torch.bfloat16, device="meta")

    @property
    def tables(self) -> list[str]:
        """What is copied. A tied head is the embedding and is not written twice."""
        return [EMBEDDING, FINAL_NORM] + [HEAD] * (not self.config.tied_embeddings)

    @property
    def state_bytes(self) -> int:
        """The residual streams of all arms, and what a rotated form is compared with."""
        arms = 3 + self.options.rotate
        tokens = [
            sum(map(len, part)) for part in (self.text.calibration, *arms * [self.text.held_out])
        ]
        return 4 * self.config.hidden_size * sum(tokens)

    @property
    def file_bytes(self) -> list[int]:
        """The size of each file of weights, in the larger form if there are two."""
        form = self.rotated if self.options.rotate else self
        return plan(form.tensors(), self.options.shard_bytes)


def check_groups(config: ModelConfig, recipe: Recipe) -> None:
    size = recipe.format.group_size
    for name, (_, columns) in linear_shapes(config).items():
        if size and columns % size:
            raise UsageError(
                f"--scheme w4a8: groups of {size} (--group-size) do not divide the "
                f"{columns} inputs of {name}"
            )


def check_space(folder: Path, source: Source) -> None:
    """UsageError if the disk has no room; `folder` is there and may hold an interrupted run."""
    there = sum(path.stat().st_size for path in folder.iterdir())
    needed, free = space_needed(source) - there, free_space(folder)
    if needed > free:
        raise UsageError(
            f"{folder.parent} has {free / 1e6:,.0f} MB free, of {needed / 1e6:,.0f} MB that are "
            "needed"
        )


def space_needed(source: Source) -> int:
    """Bytes on disk: the weights in each form, and two save points, one of them in the making."""
    forms = 1 + source.options.rotate
    return forms * sum(source.file_bytes) + 2 * source.state_bytes


def free_space(folder: Path) -> int:
    return shutil.disk_usage(folder).free


@dataclass(frozen=True, slots=True)
class Form:
    """The model as the recipe made it, rotated or not."""

    result: TrialResult
    dense: list[str]
    """Linears that were left in BF16, by the family's names."""

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Form:
        """Inverse of `dataclasses.asdict`."""
        return cls(result_from_json(content["result"]), content["dense"])

    def beside(self, unrotated: Form) -> TrialResult:
        """The result with round-to-nearest as it is without rotation."""
        plain = unrotated.result
        errors = [
            replace(error, rtn=other.rtn)
            for error, other in zip(self.result.errors, plain.errors, strict=True)
        ]
        return replace(self.result, rtn=plain.rtn, errors=errors)


def rotation(forms: Sequence[Form]) -> Rotation | None:
    """What rotating did, if it was tried."""
    if len(forms) == 1:
        return None
    unrotated, rotated = (form.result.recipe for form in forms)
    return Rotation(unrotated, rotated)


class _Run:
    """One checkpoint on its way to one folder."""

    def __init__(
        self, source: Source, writer: CheckpointWriter, progress: ProgressCallback
    ) -> None:
        self.started = time.perf_counter()
        self.writer, self.progress = writer, progress
        self.original, self.recipe = source, source.recipe
        self.fingerprint = source.checkpoint.fingerprint()
        self.point = writer.resume(source.key(self.fingerprint))
        state = self.point.state if self.point else {}
        self.seconds_before: float = state.get("seconds", 0.0)
        self.peak_before: int = state.get("peak_rss_bytes", 0)
        tensors = self.point.tensors if self.point else {}
        self.reference = {name: x for name, x in tensors.items() if name == REFERENCE}
        self.unrotated: Form | None = None
        self._turn_to(source)
        if UNROTATED in state:
            self.unrotated = Form.from_json(state[UNROTATED])
            self._turn_to(source.rotated)
        self.dense: list[str] = list(state.get("dense", ()))

    def _turn_to(self, source: Source) -> None:
        """What is written from here on."""
        self.source, self.dense = source, []
        self.checkpoint, self.config = source.checkpoint, source.config

    def report(self) -> Report:
        forms = self._forms()
        best = min(forms, key=lambda form: form.result.recipe.kl)
        rtn, state = forms[0].result.rtn, self._state(result=asdict(forms[-1].result))
        kept = best.result.recipe.kl <= rtn.kl
        self._tell(forms, best)
        if kept:
            self.writer.choose(best is forms[0], state)
            self._turn_to(self.original if best is forms[0] else self.source)
            self.dense = best.dense
        else:
            self._turn_to(self.original)
            self.writer.restart(state)
            self._write_plain()
        return self._finish(forms, best, kept)

    def _tell(self, forms: Sequence[Form], best: Form) -> None:
        """Why the folder holds less than was asked for."""
        rtn, kl = forms[0].result.rtn.kl, best.result.recipe.kl
        if kl > rtn:
            log.warning(
                "%s: KL %.5f on held-out text is worse than round-to-nearest's %.5f, which is kept "
                "instead",
                *(self.recipe.name, kl, rtn),
            )
        elif best is not forms[-1]:
            log.warning(
                "--rotate: KL %.5f on held-out text is no better than %.5f without, which is kept",
                *(forms[1].result.recipe.kl, kl),
            )

    def _forms(self) -> list[Form]:
        """The model as the recipe makes it, and rotated as well if that is asked for."""
        first = self.unrotated or self._form()
        if not self.original.options.rotate:
            return [first]
        if self.unrotated is None:
            self.unrotated, self.point = first, None
            self._turn_to(self.original.rotated)
            self.writer.set_aside(self._state(), self.reference)
        return [first, self._form()]

    def _form(self) -> Form:
        """All tensors as the recipe makes them, and what that does to the model's predictions."""
        state = self.point.state if self.point else {}
        if "result" in state:
            return Form(result_from_json(state["result"]), self.dense)
        with workers() as pool:
            trial = self._trial(pool)
            save, done = Saver(self.writer, trial, self.reference), state.get("layers", 0)
            if self.point is not None and done:
                restore(trial, self.point)
                log.warning("going on after layer %d of %d", done, self.config.layers)
            self._write("layers", trial.advance, done, lambda n: save(self._state(layers=n)))
            norm = final_norm(self.checkpoint, self.config)
            head = head_rows(self.checkpoint, self.config)
            self._write_tables()
            result = self._measured(trial, norm, head)
            if self.original.options.rotate and self.unrotated is None:
                self.reference = {REFERENCE: trial.reference(norm)}
        self.writer.save(self._state(result=asdict(result)), self.reference)
        return Form(result, self.dense)

    def _trial(self, pool: Executor) -> Trial:
        table = self.checkpoint.tensor(EMBEDDING)
        trial = Trial(self.config, self.recipe, self.source.text, table, pool)
        del table
        self.checkpoint.release()
        return trial

    def _measured(self, trial: Trial, norm: Tensor, head: Tensor) -> TrialResult:
        def progress(done: int, total: int) -> None:
            self.checkpoint.release()
            self.progress(self._stage("measuring"), done, total)

        original = None
        if self.unrotated is not None:
            rows = head_rows(self.original.checkpoint, self.original.config)
            original = Arm(self.reference[REFERENCE], head=rows)
        result = trial.result(norm, head, progress, original)
        self._check_finite(result)
        return result

    def _stage(self, name: str) -> str:
        return name if self.source is self.original else f"rotated {name}"

    def _state(self, **progress: Any) -> dict[str, Any]:
        before = {} if self.unrotated is None else {UNROTATED: asdict(self.unrotated)}
        return {
            **before,
            "seconds": self.seconds,
            "peak_rss_bytes": self.peak,
            "dense": self.dense,
            **progress,
        }

    @property
    def seconds(self) -> float:
        """Interrupted runs included, as far as they count."""
        return self.seconds_before + time.perf_counter() - self.started

    @property
    def peak(self) -> int:
        return max(self.peak_before, peak_memory())

    def _check_finite(self, result: TrialResult) -> None:
        """Finite weights can still overflow on the way to the logits; KL would compare nothing."""
        arms = {
            "": result.bf16,
            " when rounded to integers": result.rtn,
            f" when quantised by {self.recipe.name}": result.recipe,
        }
        for form, arm in arms.items():
            if not (math.isfinite(arm.kl) and math.isfinite(arm.perplexity)):
                raise CheckpointError(
                    f"{self.checkpoint.path}: the model's logits are not finite{form} "
                    f"(perplexity {arm.perplexity}, KL {arm.kl})"
                )

    def _write_plain(self) -> None:
        """All tensors by round-to-nearest."""
        format = self.recipe.format
        self._write("round-to-nearest", lambda _, x: QuantizedLayer.round(x, format))
        self._write_tables()

    def _write(
        self,
        stage: str,
        quantize_layer: Callable[[int, LayerTensors], QuantizedLayer],
        done: int = 0,
        save: Callable[[int], None] = lambda layers: None,
    ) -> None:
        """The layers from `done` on."""
        layers = self.config.layers
        for index in range(done, layers):
            self.progress(self._stage(stage), index, layers)
            layer = quantize_layer(index, taken_layer(self.checkpoint, self.config, index))
            prefix = layer_prefix(index)
            for name, tensor in layer.stored(self.config):
                self.writer.add(prefix + name, tensor)
            self.dense += [prefix + name for name in layer.dense(self.config)]
            self.checkpoint.release()
            trim_heap()
            save(index + 1)
        self.progress(self._stage(stage), layers, layers)

    def _write_tables(self) -> None:
        for name in self.source.tables:
            self.writer.add(name, self.checkpoint.tensor(name))
            self.checkpoint.release()

    def _finish(self, forms: Sequence[Form], best: Form, kept: bool) -> Report:
        """Everything but the tensors; then the folder becomes visible."""
        recipe = self.recipe if kept else self.recipe.plain
        config = folder_config(self.checkpoint, recipe, self.dense)
        self.writer.add_json("config.json", config)
        with self.writer.failures():
            self.source.tokenizer.save(self.writer.folder)
        report = Report(
            requested=self.recipe,
            kept=kept,
            source=self.checkpoint.path.name,
            source_sha256=self.fingerprint,
            text=self.source.text,
            result=best.beside(forms[0]),
            rotation=rotation(forms),
            seconds=self.seconds,
            peak_rss_bytes=self.peak,
        )
        self.writer.add_json(REPORT_FILE, report.to_json())
        self.writer.commit()
        return report


def taken_layer(checkpoint: Checkpoint, config: ModelConfig, index: int) -> LayerTensors:
    """As `read_layer`; the mapped pages, 390 MB of an 8B model, are given back."""
    tensors = read_layer(checkpoint, config, index)
    checkpoint.release()
    return tensors


def blank_layer(config: ModelConfig, recipe: Recipe) -> QuantizedLayer:
    """A layer of this recipe without data."""
    with torch.device("meta"):
        tensors = {name: torch.empty(shape) for name, shape in layer_shapes(config).items()}
        return QuantizedLayer.round(tensors, recipe.format, recipe.int8)
