"""What this machine and this installation can do, and how near to that the kernels come."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from quasar.cli.parts import options, terminal
from quasar.errors import UsageError
from quasar.figures import json_text

if TYPE_CHECKING:
    from quasar.bench.passes import Measurement
    from quasar.kernels.base import Backend

SUMMARY = "check the installation; with a model, time its passes against the machine's limit"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL", help="a model to time")
    options.add_hub(parser)
    options.add_head(parser)
    options.add_machine(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    for option in ("head", "revision", "offline"):
        if args.model is None and getattr(args, option):
            raise UsageError(f"--{option} is for timing a model: give MODEL")

    from quasar.cli.parts.models import check_precision
    from quasar.loading import make_backend

    check_precision(args.head, "--head")
    backend = make_backend(args.threads)
    content = installation(backend)
    if args.model is None:
        from quasar.bench.passes import PEAK_SECONDS

        content |= asdict(backend.measure_peaks(PEAK_SECONDS))
    else:
        measurement = time_model(args, backend)
        content |= asdict(measurement.peaks) | {
            "model": args.model,
            "passes": measurement.passes,
            "prefill": measurement.prefill,
        }
    print(json_text(content) if args.json else page(content))
    return 0


def installation(backend: Backend) -> dict[str, Any]:
    from quasar.bench import machine
    from quasar.kernels import select

    _, declined = select(backend.threads)
    return {
        "isa": backend.isa,
        "threads": backend.threads,
        "kernels": {"backend": backend.name, "declined": declined},
        "cpu": machine.cpu_name(),
        "memory_bytes": machine.memory_bytes(),
        "openmp_runtimes": machine.openmp_runtimes(),
        "versions": machine.versions(),
    }


def time_model(args: argparse.Namespace, backend: Backend) -> Measurement:
    """Passes and prefill of every verifier that the model can be."""
    from quasar.bench.passes import CONTEXTS, ROUNDS, measure
    from quasar.bench.samples import text_tokens
    from quasar.cli.parts.models import load_verifier
    from quasar.loading import Model

    model = Model.open(args.model, args.revision, args.offline)
    verifiers = {name: load_verifier(model, name, backend, args.head) for name in model.precisions}
    tokens = text_tokens(model.tokenizer, max(CONTEXTS))
    with terminal.progress_bar() as progress:
        return measure(
            verifiers, tokens, ROUNDS, CONTEXTS, lambda done, total: progress("passes", done, total)
        )


def page(content: dict[str, Any]) -> str:
    """The same for people."""
    kernels, versions = content["kernels"], content["versions"]
    rows = [
        ("cpu", content["cpu"]),
        ("memory", f"{content['memory_bytes'] / 1e9:.1f} GB"),
        ("isa", content["isa"]),
        ("threads", str(content["threads"])),
        ("kernels", kernels["backend"]),
        *((f"  not {name}", reason) for name, reason in kernels["declined"].items()),
        *(("openmp", path) for path in content["openmp_runtimes"]),
        ("versions", ", ".join(f"{name} {version}" for name, version in versions.items())),
        ("read bandwidth", f"{content['read_bandwidth_gbps']:.1f} GB/s"),
        ("INT8", f"{content['int8_gmacs']:.0f} GMAC/s"),
        ("BF16", f"{content['bf16_gmacs']:.0f} GMAC/s"),
    ]
    blocks = [terminal.listing(rows)]
    if "passes" in content:
        blocks += [_passes_table(content["passes"]), _prefill_table(content["prefill"])]
    return "\n\n".join(blocks)


def _passes_table(passes: list[dict[str, Any]]) -> str:
    headers = ("verifier", "context", "rows", "ms", "limit ms", "share of limit")
    rows = [
        (
            entry["verifier"],
            str(entry["context"]),
            str(entry["rows"]),
            f"{entry['milliseconds']:.2f}",
            f"{entry['limit_milliseconds']:.2f}",
            f"{entry['share_of_limit']:.2f}",
        )
        for entry in passes
    ]
    return terminal.table(headers, rows)


def _prefill_table(prefill: list[dict[str, Any]]) -> str:
    rows = [
        (entry["verifier"], str(entry["tokens"]), f"{entry['tokens_per_second']:.0f}")
        for entry in prefill
    ]
    return terminal.table(("verifier", "prefill tokens", "tokens/s"), rows)
