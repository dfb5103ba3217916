"""What a model file holds and what it would need, without reading its weights."""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quasar.cli.parts import options, terminal
from quasar.cli.parts.terminal import megabytes
from quasar.drafting import DEFAULT_DRAFT_TOKENS
from quasar.errors import CheckpointError
from quasar.figures import json_text

if TYPE_CHECKING:
    from quasar.checkpoints.base import Checkpoint
    from quasar.checkpoints.compressed import CompressedCheckpoint
    from quasar.loading import Model
    from quasar.models.config import ModelConfig

SUMMARY = "show what a model holds and the memory it needs"
PARTS = ("program", "layers", "head", "embedding", "cache", "working", "loading", "peak")
"""Of a footprint, in the order of the page."""


def configure(parser: argparse.ArgumentParser) -> None:
    options.add_model(parser)
    options.add_context(parser, "tokens that the memory is told for")
    options.add_machine(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    from quasar.loading import Model, thread_count

    threads = thread_count(args.threads)
    model = Model.open(args.model, args.revision, args.offline)
    context = min(args.context, model.config.context_length)
    content = describe(model, context, threads)
    print(json_text(content) if args.json else page(content))
    return 0


def describe(model: Model, context: int, threads: int) -> dict[str, Any]:
    from quasar.engine.footprint import slot_bytes

    config, checkpoint, tokenizer = model.config, model.checkpoint, model.tokenizer
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
        "quantization": quantization(checkpoint, config),
        "files": files(checkpoint),
        "kv_bytes_per_1000_tokens": 1000 * config.layers * slot_bytes(config),
        "memory_context": context,
        "verifiers": memory(model, context, threads),
    }


def memory(model: Model, context: int, threads: int) -> dict[str, dict[str, int]]:
    """Bytes by verifier: all packed weights, then each part, the peak last."""
    from quasar.engine.footprint import footprint
    from quasar.memory import resident_memory, trim_heap

    trim_heap()
    program = resident_memory()
    found = {}
    for name in model.precisions:
        needs = footprint(
            model.config,
            name,
            program=program,
            # A quantised folder, also the one that is made on first use, holds BF16.
            mapped=name != "bf16" or used_in_place(model.checkpoint),
            cache_tokens=context,
            draft_tokens=DEFAULT_DRAFT_TOKENS,
            threads=threads,
            int8=int8_groups(model) if name == "w4a8" else (),
        )
        weights = needs.layers + needs.head + needs.embedding
        parts = {f"{part}_bytes": getattr(needs, part) for part in PARTS}
        found[name] = {"weight_bytes": weights, **parts}
    return found


def int8_groups(model: Model) -> list[str]:
    """Groups that a W4A8 verifier has in 8 bits: as stored, or as they would be."""
    from quasar.checkpoints.compressed import CompressedCheckpoint
    from quasar.quantization.pipeline import QuantizeOptions

    checkpoint, config = model.checkpoint, model.config
    if checkpoint.precision == "bf16":
        return list(QuantizeOptions("w4a8").recipe(config).int8)
    assert isinstance(checkpoint, CompressedCheckpoint)
    stored = linears(checkpoint, config)
    return [group for group, count in stored.items() if count.get("w8a8")]


def used_in_place(checkpoint: Checkpoint) -> bool:
    """Whether the file holds BF16 that is mapped; anything else is converted to a copy."""
    stored = checkpoint.config.get("torch_dtype", checkpoint.config.get("dtype"))
    return checkpoint.format == "safetensors" and stored in (None, "bfloat16")


def quantization(checkpoint: Checkpoint, config: ModelConfig) -> dict[str, Any]:
    """What is quantised how, and what a quantised folder says it was made from."""
    from quasar.checkpoints.compressed import CompressedCheckpoint

    if not isinstance(checkpoint, CompressedCheckpoint):
        return {"scheme": None}
    scheme = checkpoint.scheme
    size = scheme.group_size
    scale = "a scale" if scheme.symmetric else "a scale and a zero point"
    return {
        "scheme": scheme.name,
        "weights": f"{'int8' if scheme.name == 'w8a8' else 'int4'}, {scale} "
        + (f"for {size} inputs" if size else "a row")
        + (", some int8" if scheme.int8 else ""),
        "group_size": size,
        "activations": "16 bits" if scheme.name == "w4a16" else "int8, a scale a token",
        "used_as": f"{checkpoint.precision} weights"
        + (", dequantised when read" if scheme.name == "w4a16" else ""),
        "linears": linears(checkpoint, config),
        "rotated_inputs": f"down_proj, blocks of {checkpoint.down_rotation}"
        if checkpoint.down_rotation
        else None,
        "kept_in_bf16": ["embedding", "norms", *scheme.ignore],
        "source": source(checkpoint.path / "quantization_report.json"),
    }


def linears(checkpoint: CompressedCheckpoint, config: ModelConfig) -> dict[str, dict[str, int]]:
    """By group of linears that share their input: how many are stored in which form."""
    from quasar.models.tensors import GROUPS, layer_prefix

    modules = {part: whole for whole, parts in config.layout.fused.items() for part in parts}
    found: dict[str, Counter[str]] = {group: Counter() for group in GROUPS}
    for group, names in GROUPS.items():
        for index in range(config.layers):
            for name in names:
                module = layer_prefix(index) + modules.get(name, name)
                found[group][checkpoint.precision_of(module)] += 1
    return {group: dict(count) for group, count in found.items()}


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


def page(content: dict[str, Any]) -> str:
    """The same for people."""
    kv_bytes = content["kv_bytes_per_1000_tokens"]
    files = [(f"file {name}", megabytes(size)) for name, size in content["files"].items()]
    apart = ("files", "verifiers", "kv_bytes_per_1000_tokens", "memory_context", "quantization")
    facts = {name: value for name, value in content.items() if name not in apart}
    facts |= content["quantization"]
    plain = [(name.replace("_", " "), _shown(value)) for name, value in facts.items()]
    cache = ("cache", f"{megabytes(kv_bytes)} for 1,000 tokens")
    listing = terminal.listing([*plain, *files, cache])
    return f"{listing}\n\n{memory_table(content)}"


def memory_table(content: dict[str, Any]) -> str:
    """The memory of each verifier by part, and what is reached at most."""
    verifiers = content["verifiers"]
    rows = [
        [part, *(megabytes(needs[f"{part}_bytes"]) for needs in verifiers.values())]
        for part in PARTS
    ]
    title = f"memory for {content['memory_context']:,} tokens"
    return terminal.table([title, *verifiers], rows)


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
