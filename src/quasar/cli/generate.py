"""One prompt in, one answer out."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from quasar.cli.parts import options, terminal
from quasar.figures import json_text
from quasar.types import Completion, GenerationStats

if TYPE_CHECKING:
    from quasar.engine.engine import Engine
    from quasar.loading import Model

SUMMARY = "generate text from one prompt"


def configure(parser: argparse.ArgumentParser) -> None:
    options.add_model(parser)
    parser.add_argument("-p", "--prompt", required=True, metavar="TEXT", help="`-` reads stdin")
    options.add_engine(parser)
    options.add_sampling(parser, max_tokens=128)
    parser.add_argument("--raw", action="store_true", help="no chat template around the prompt")
    parser.add_argument("--json", action="store_true", help="print one JSON object, not the text")


def run(args: argparse.Namespace) -> int:
    params = options.sampling_params(args)
    options.check_drafter(args)
    text = options.read_prompt(args.prompt)

    from quasar.cli.parts.models import (
        check_held,
        check_length,
        check_precision,
        encode_prompt,
        load_engine,
        use_raw,
    )
    from quasar.loading import Model

    check_precision(args.verifier, "--verifier")
    check_precision(args.head, "--head")
    model = Model.open(args.model, args.revision, args.offline)
    check_held(model, args.verifier)
    prompt = encode_prompt(model, text, use_raw(model, args.raw))
    check_length(model, len(prompt))
    engine = load_engine(model, args, len(prompt) + params.max_tokens)
    request = engine.submit(prompt, params)
    completion = request.completion
    for step in engine.stream(request):
        if not args.json:
            terminal.write_text(step.text)
    if args.json:
        print(json_text(result(model, engine, completion, args)))
        return 0
    terminal.write_text("" if completion.text.endswith("\n") else "\n")
    terminal.note(statistics_line(completion.stats))
    return 0


def result(
    model: Model, engine: Engine, completion: Completion, args: argparse.Namespace
) -> dict[str, Any]:
    """The object that `--json` prints."""
    from quasar.memory import peak_memory

    stats, verifier = completion.stats, engine.verifier
    return {
        "model": model.name,
        "verifier": verifier.precision,
        "head": verifier.head_precision,
        "drafter": engine.drafter,
        "isa": verifier.backend.isa,
        "threads": verifier.backend.threads,
        "prompt_tokens": stats.prompt_tokens,
        "completion_tokens": stats.completion_tokens,
        "text": completion.text,
        "token_ids": completion.tokens,
        "finish_reason": completion.finish_reason,
        "seed": args.seed,
        "prefill_seconds": stats.prefill_seconds,
        "decode_seconds": stats.decode_seconds,
        "decode_tokens_per_second": stats.decode_tokens_per_second,
        "verify_passes": stats.verify_passes,
        "mean_acceptance_length": stats.mean_acceptance_length,
        "mean_acceptance_length_drafted": stats.mean_acceptance_length_drafted,
        "draft_tokens": stats.draft_tokens,
        "accepted_tokens": stats.accepted_tokens,
        "draft_acceptance_rate": stats.draft_acceptance_rate,
        "peak_rss_bytes": peak_memory(),
    }


def statistics_line(stats: GenerationStats) -> str:
    from quasar.memory import peak_memory

    prefill = stats.prompt_tokens / stats.prefill_seconds if stats.prefill_seconds else 0.0
    return (
        f"prompt {stats.prompt_tokens} tokens, {prefill:.1f} tokens/s"
        f" | answer {stats.completion_tokens} tokens, {stats.decode_tokens_per_second:.1f} tokens/s"
        f" | acceptance length {stats.mean_acceptance_length:.2f},"
        f" {stats.accepted_tokens} of {stats.draft_tokens} drafted tokens accepted"
        f" ({stats.draft_acceptance_rate:.0%}) | peak memory {peak_memory() / 1e6:,.0f} MB"
    )
