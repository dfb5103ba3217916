"""`quasar quantize`: a model in, a W8A8 or W4A8 folder with its report card out."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quasar.cli.parts import options, terminal
from quasar.errors import UsageError
from quasar.figures import json_text

if TYPE_CHECKING:
    from quasar.quantization.estimate import Estimate
    from quasar.quantization.report import Report

SUMMARY = "write the W8A8 or W4A8 form of a model"
BUILTIN = "builtin"


def configure(parser: argparse.ArgumentParser) -> None:
    options.add_model(parser)
    parser.add_argument("out", metavar="OUT", type=Path, help="folder to write, new or empty")
    parser.add_argument("--scheme", default="w8a8", help="w8a8 (default) or w4a8")
    parser.add_argument(
        "--smooth",
        default="search",
        help="search (default): the best scales found for each group of linears; smoothquant; none",
    )
    parser.add_argument(
        "--weights",
        metavar="METHOD",
        help="how weights are rounded: rtn (to nearest), clip (ranges of least error) or gptq "
        "(errors made up for by later channels); default: rtn for w8a8, gptq for w4a8",
    )
    parser.add_argument(
        "--group-size",
        type=options.positive,
        metavar="N",
        help="input channels that share a scale, for w4a8: 32 (default), 64 or 128",
    )
    parser.add_argument(
        "--int8",
        metavar="GROUPS",
        help="linears that keep 8 bits in w4a8: some of qkv,o,gate_up,down, or none (default: qkv, "
        "where it is at most a sixth of the weights, with --smooth search)",
    )
    parser.add_argument(
        "--calib",
        default=BUILTIN,
        metavar="FILE",
        help="UTF-8 text to calibrate on; its last quarter is held out to measure on "
        "(default: builtin, the package's own text)",
    )
    parser.add_argument(
        "--hadamard",
        choices=("on", "off"),
        help="whether our verifier rotates the inputs of down_proj before it rounds them, which "
        "spreads their outliers; other engines read W8A8 folders either way and do not rotate "
        "(default: on with --smooth search)",
    )
    parser.add_argument(
        "--rotate",
        action="store_true",
        help="quantise a rotated form of the model too, and keep it if it predicts the held-out "
        "text better; takes twice the time and disk",
    )
    parser.add_argument("--head", default="bf16", help="precision of the stored head: bf16")
    parser.add_argument(
        "--shard-size",
        type=options.size,
        metavar="SIZE",
        help="largest file of weights, such as 500MB or 2GiB (default: 4GiB)",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="measure one layer, tell time, memory and sizes, and write nothing",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    if args.head != "bf16":
        raise UsageError(
            f"--head {args.head}: the head is stored in BF16 and quantised when a model is "
            "loaded; give --head to generate or evaluate"
        )
    from quasar.checkpoints.shards import SHARD_BYTES
    from quasar.loading import open_model
    from quasar.quantization.estimate import estimate
    from quasar.quantization.pipeline import QuantizeOptions, quantize

    file = None if args.calib == BUILTIN else Path(args.calib)
    recipe = QuantizeOptions(
        args.scheme,
        args.smooth,
        args.weights,
        args.group_size,
        None if args.hadamard is None else args.hadamard == "on",
        file,
        args.shard_size or SHARD_BYTES,
        args.rotate,
        int8_groups(args.int8),
    )
    with terminal.progress_bar() as progress:
        checkpoint = open_model(args.model, args.revision, args.offline)
        if args.dry_run:
            found = estimate(checkpoint, args.out, recipe, progress)
        else:
            report = quantize(checkpoint, args.out, recipe, progress)
    if args.dry_run:
        print(json_text(found.to_json()) if args.json else estimate_page(found))
    else:
        print(json_text(report.to_json()) if args.json else page(report))
    return 0


def int8_groups(text: str | None) -> tuple[str, ...] | None:
    if text is None:
        return None
    return () if text == "none" else tuple(text.split(","))


def estimate_page(found: Estimate) -> str:
    """The estimate for people."""
    facts = [
        ("time", f"about {terminal.duration(found.seconds)}"),
        ("peak memory", f"about {terminal.megabytes(found.peak_rss_bytes)}"),
        ("disk", f"{terminal.megabytes(found.space_bytes)} while it runs"),
        ("free", terminal.megabytes(found.free_bytes)),
        ("output", terminal.megabytes(sum(found.shard_bytes))),
    ]
    files = [(f"file {n}", terminal.megabytes(x)) for n, x in enumerate(found.shard_bytes, 1)]
    return terminal.listing([*facts, *files])


def page(report: Report) -> str:
    """The report card for people."""
    result, summary, name = report.result, report.summary(), report.requested.name
    arms = {"bf16": result.bf16, "round-to-nearest": result.rtn}
    if report.requested != report.requested.plain:
        arms[name] = result.recipe
    if report.rotation is not None:
        arms[name] = report.rotation.unrotated
        arms[f"{name}, rotated"] = report.rotation.rotated
        name += ", rotated" if report.rotation.better else ""
    arms[f"{name}, INT8 head"] = result.int8_head
    rows = [
        (name, f"{arm.kl:.5f}", f"{arm.top1:.2%}", f"{arm.perplexity:.3f}")
        for name, arm in arms.items()
    ]
    facts = terminal.listing(
        [
            ("kept", f"{report.recipe.scheme}, smoothing: {report.recipe.smooth}{form(report)}"),
            ("left in BF16", ", ".join(report.ignored()) or "nothing"),
            ("time", f"{summary['seconds']:.1f} s"),
            ("peak memory", terminal.megabytes(report.peak_rss_bytes)),
        ]
    )
    models = terminal.table(("held-out text", "KL", "top-1", "perplexity"), rows)
    return f"{models}\n{linears(report)}\n{facts}"


def form(report: Report) -> str:
    """What became of the rotation, if one was asked for."""
    if report.rotation is None:
        return ""
    return ", rotated" if report.rotated else ", not rotated"


def linears(report: Report) -> str:
    """Errors of the linears, the mean and the worst over layers; the report has every one."""
    kinds: dict[str, list[dict[str, Any]]] = {}
    for entry in report.linears():
        kinds.setdefault(entry["name"].split(".", 3)[3], []).append(entry)
    rows = []
    for kind, entries in kinds.items():
        smoothed = sum(entry["smoothing"] != "none" for entry in entries)
        row = [kind, f"{smoothed} of {len(entries)}"]
        for key in ("relative_error", "relative_error_rtn"):
            errors = [entry[key] for entry in entries]
            row.append(f"{sum(errors) / len(errors):.2%} (at most {max(errors):.2%})")
        rows.append(tuple(row))
    return terminal.table(("linear", "smoothed", "relative error", "round-to-nearest"), rows)
