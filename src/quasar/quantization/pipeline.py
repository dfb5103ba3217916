"""Checkpoint in, W8A8 checkpoint out: one layer in memory at a time, all or nothing.

A recipe can be worse than plain round-to-nearest (SmoothQuant is on some models), so both are
measured against BF16 on held-out text, and the better one is what the folder holds.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quasar.checkpoints.base import Checkpoint
from quasar.checkpoints.writer import CheckpointWriter
from quasar.errors import CheckpointError, UsageError
from quasar.memory import peak_memory, trim_heap
from quasar.models.families import parse_config
from quasar.models.layer import LayerTensors, head_chunks, read_layer
from quasar.models.tensors import EMBEDDING, FINAL_NORM, HEAD, check_model, head_rows, layer_prefix
from quasar.quantization.calibrate import SEQUENCE_TOKENS, calibration_text
from quasar.quantization.recipe import GROUP_SIZES, SMOOTHING, WEIGHTS, Recipe, default_recipe
from quasar.quantization.report import REPORT_FILE, Report
from quasar.quantization.trial import Trial, TrialResult, workers
from quasar.quantization.weights import QuantizedLayer
from quasar.text.tokenizer import load_tokenizer

log = logging.getLogger("quasar")

STORED_SCHEMES = ("w8a8",)

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
    calibration: Path | None = None
    """A UTF-8 text; None for the built-in one."""

    def __post_init__(self) -> None:
        for option, value, known in (
            ("--scheme", self.scheme, STORED_SCHEMES),
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

    @property
    def recipe(self) -> Recipe:
        return default_recipe(self.scheme, self.smooth, self.weights, self.group_size)


def quantize(
    checkpoint: Checkpoint,
    out: Path,
    options: QuantizeOptions | None = None,
    progress: ProgressCallback | None = None,
) -> Report:
    """Write the W8A8 form of `checkpoint` to the folder `out`, with its report card.

    Raises UsageError for options, a calibration file or a target folder that cannot be used, and
    CheckpointError for the model's faults. Whatever is raised, also by `progress`, leaves nothing
    behind.
    """
    run = _Run(checkpoint, options or QuantizeOptions(), progress or (lambda *_: None))
    with CheckpointWriter(out) as writer:
        result = run.write_recipe(writer)
        if result.recipe.kl <= result.rtn.kl:
            return run.finish(writer, result, kept=True)
    log.warning(
        "%s: KL %.5f on held-out text is worse than round-to-nearest's %.5f, which is kept instead",
        *(run.recipe.name, result.recipe.kl, result.rtn.kl),
    )
    with CheckpointWriter(out) as writer:
        run.write_plain(writer)
        return run.finish(writer, result, kept=False)


class _Run:
    """One checkpoint on its way to one folder."""

    def __init__(
        self, checkpoint: Checkpoint, options: QuantizeOptions, progress: ProgressCallback
    ) -> None:
        """Everything that can be refused about the input is refused here."""
        self.started = time.perf_counter()
        self.checkpoint, self.recipe, self.progress = checkpoint, options.recipe, progress
        if checkpoint.quantization is not None:
            raise CheckpointError(f"{checkpoint.path} is already quantised")
        self.config = parse_config(checkpoint.config)
        check_model(checkpoint, self.config)
        self.tokenizer = load_tokenizer(checkpoint)
        longest = min(SEQUENCE_TOKENS, self.config.context_length)
        self.text = calibration_text(self.tokenizer, options.calibration, longest)

    def write_recipe(self, writer: CheckpointWriter) -> TrialResult:
        """All tensors as the recipe makes them, and what that does to the model's predictions."""
        with workers() as pool:
            table = self.checkpoint.tensor(EMBEDDING)
            trial = Trial(self.config, self.recipe, self.text, table, pool)
            del table
            self._write(writer, "layers", trial.advance)
            norm = self.checkpoint.tensor(FINAL_NORM).float()
            head = head_rows(self.checkpoint, self.config)
            scale = None
            if self.recipe.smooth == "search" and not self.config.tied_embeddings:
                scale = trial.head_scale(norm, head)
            self._write_ends(writer, scale)
            result = trial.result(norm, head, scale, partial(self.progress, "measuring"))
        self._check_finite(result)
        return result

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

    def write_plain(self, writer: CheckpointWriter) -> None:
        """All tensors by round-to-nearest."""
        format = self.recipe.format
        self._write(writer, "round-to-nearest", lambda _, x: QuantizedLayer.round(x, format))
        self._write_ends(writer, None)

    def _write(
        self,
        writer: CheckpointWriter,
        stage: str,
        quantize_layer: Callable[[str, LayerTensors], QuantizedLayer],
    ) -> None:
        layers = self.config.layers
        for index in range(layers):
            self.progress(stage, index, layers)
            prefix = layer_prefix(index)
            layer = quantize_layer(prefix, read_layer(self.checkpoint, self.config, index))
            for name, tensor in layer.stored():
                writer.add(prefix + name, tensor)
            self.checkpoint.release()
            trim_heap()
        self.progress(stage, layers, layers)

    def _write_ends(self, writer: CheckpointWriter, scale: Tensor | None) -> None:
        """What is not a layer. `scale` [hidden], powers of two, moves from the norm to the head."""
        norm = self.checkpoint.tensor(FINAL_NORM)
        writer.add(EMBEDDING, self.checkpoint.tensor(EMBEDDING))
        writer.add(FINAL_NORM, norm if scale is None else (norm.float() / scale).bfloat16())
        # A tied head is the embedding and is not written twice.
        if not self.config.tied_embeddings:
            head = self.checkpoint.tensor(HEAD)
            writer.add(HEAD, head if scale is None else scaled_columns(head, scale))
        self.checkpoint.release()

    def finish(self, writer: CheckpointWriter, result: TrialResult, kept: bool) -> Report:
        """Everything but the tensors; then the folder becomes visible."""
        with writer.failures():
            self.tokenizer.save(writer.folder)
        report = Report(
            requested=self.recipe,
            kept=kept,
            source=self.checkpoint.path.name,
            source_sha256=self.checkpoint.fingerprint(),
            text=self.text,
            result=result,
            seconds=time.perf_counter() - self.started,
            peak_rss_bytes=peak_memory(),
        )
        writer.add_json("config.json", folder_config(self.checkpoint, report.ignored()))
        writer.add_json(REPORT_FILE, report.to_json())
        writer.commit()
        return report


def scaled_columns(rows: Tensor, scale: Tensor) -> Tensor:
    """rows [vocab, hidden] bf16 times scale [hidden], a chunk in fp32 at a time."""
    scaled = torch.empty_like(rows)
    for start, chunk in head_chunks(rows):
        scaled[start : start + len(chunk)] = chunk * scale
    return scaled


def folder_config(checkpoint: Checkpoint, ignored: Sequence[str] = ()) -> dict[str, Any]:
    """config.json of the quantised folder; `ignored` names the linears left in BF16.

    Only fields that every release of compressed-tensors accepts: its classes forbid unknown ones.
    """
    config = {key: value for key, value in checkpoint.config.items() if key != "auto_map"}
    # GGUF does not name the class; transformers calls it so for every family supported here.
    config.setdefault("architectures", [f"{config['model_type'].capitalize()}ForCausalLM"])
    symmetric = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**symmetric, "strategy": "channel", "dynamic": False},
        "input_activations": {**symmetric, "strategy": "token", "dynamic": True},
        "output_activations": None,
    }
    return config | {
        "torch_dtype": "bfloat16",
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "int-quantized",
            "quantization_status": "compressed",
            "ignore": ["lm_head", *ignored],
            "config_groups": {"group_0": group},
        },
    }
