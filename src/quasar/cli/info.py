"""What a model file holds and what it would need, without reading its weights."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quasar.cli.parts import options, terminal
from quasar.cli.parts.terminal import megabytes
from quasar.errors import CheckpointError
from quasar.figures import json_text

if TYPE_CHECKING:
    from quasar.checkpoints.base import Checkpoint
    from quasar.loading import Model
    from quasar.models.config import ModelConfig

SUMMARY = "show what a model holds and the memory it needs"
BYTES_A_WEIGHT = {"bf16": 2, "w8a8": 1}
SCALE_BYTES = 4
"""Each row of an INT8 weight has one fp32 scale."""


def configure(parser: argparse.ArgumentParser) -> None:
    options.add_model(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    from quasar.loading import Model

    content = describe(Model.open(args.model, args.revision, args.offline))
    print(json_text(content) if args.json else page(content))
    return 0


def describe(model: Model) -> dict[str, Any]:
    config, checkpoint, tokenizer = model.config, model.checkpoint, model.tokenizer
    kv_bytes = 2 * 2 * config.layers * config.kv_heads * config.head_dim * 1000
    return {
        "model": model.name,
        "path": str(checkpoint.path),
        "format": checkpoint.format,
        "family": config.family,
        "parameters": config.parameters,
        "layers": config.layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "heads": config.heads,
        "kv_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "vocabulary": config.vocab_size,
        "context": config.context_length,
        "tied_embeddings": config.tied_embeddings,
        "tokenizer": {
            "tokens": tokenizer.vocab_size,
            "end_ids": sorted(tokenizer.eos_ids),
            "chat_template": tokenizer.has_chat_template,
        },
        "quantization": quantization(checkpoint),
        "files": files(checkpoint),
        "verifiers": {
            name: {"weight_bytes": weight_bytes(config, name)} for name in model.precisions
        },
        "kv_bytes_per_1000_tokens": kv_bytes,
    }


def quantization(checkpoint: Checkpoint) -> dict[str, Any]:
    """What is quantised how, and what a quantised folder says it was made from."""
    if checkpoint.quantization is None:
        return {"scheme": None}
    return {
        "scheme": "w8a8",
        "weights": "int8, a scale a row",
        "activations": "int8, a scale a token",
        "kept_in_bf16": ["embedding", "norms", *checkpoint.quantization.get("ignore", [])],
        "source": source(checkpoint.path / "quantization_report.json"),
    }


def source(report: Path) -> dict[str, str] | None:
    """Name and checksum of the model that a folder was quantised from, if its report card says."""
    from quasar.files import read_json

    if not report.exists():
        return None
    found = read_json(report).get("source")
    if found is None:
        return None
    if not isinstance(found, dict) or not all(isinstance(text, str) for text in found.values()):
        raise CheckpointError(f"{report}: source is not an object of texts")
    return found


def files(checkpoint: Checkpoint) -> dict[str, int]:
    """Sizes in bytes of the model's files."""
    if checkpoint.path.is_file():
        return {checkpoint.path.name: checkpoint.path.stat().st_size}
    found = sorted(file for file in checkpoint.path.iterdir() if file.is_file())
    return {file.name: file.stat().st_size for file in found}


def weight_bytes(config: ModelConfig, precision: str) -> int:
    """Memory of the packed linears with a head of the same precision, and of the BF16 embedding."""
    width, kv_width = config.heads * config.head_dim, config.kv_heads * config.head_dim
    hidden, inner = config.hidden_size, config.intermediate_size
    shapes = [(width + 2 * kv_width, hidden), (hidden, width), (2 * inner, hidden), (hidden, inner)]
    shapes = shapes * config.layers + [(config.vocab_size, hidden)]
    scales = SCALE_BYTES if precision == "w8a8" else 0
    packed = sum(rows * (columns * BYTES_A_WEIGHT[precision] + scales) for rows, columns in shapes)
    norms = 4 * hidden * (2 * config.layers + 1)
    return packed + norms + 2 * config.vocab_size * hidden


def page(content: dict[str, Any]) -> str:
    """The same for people."""
    kv_bytes = content["kv_bytes_per_1000_tokens"]
    memory = [
        (f"memory, {name}", f"{megabytes(needs['weight_bytes'])} of weights")
        for name, needs in content["verifiers"].items()
    ]
    files = [(f"file {name}", megabytes(size)) for name, size in content["files"].items()]
    plain = [
        (name.replace("_", " "), _shown(value))
        for name, value in content.items()
        if name not in ("files", "verifiers", "kv_bytes_per_1000_tokens")
    ]
    cache = ("memory, cache", f"{megabytes(kv_bytes)} for 1,000 tokens")
    return terminal.listing([*plain, *files, *memory, cache])


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name}: {_shown(item)}" for name, item in value.items())
    if isinstance(value, list):
        return ", ".join(map(_shown, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return "none"
    return f"{value:,}" if isinstance(value, int) else str(value)
