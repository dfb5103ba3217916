"""How faithful verifiers are to a reference, over a text or over the reference's own answers."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quasar.cli.parts import options, terminal
from quasar.drafting import DEFAULT_DRAFT_TOKENS
from quasar.errors import QuasarError, UsageError
from quasar.types import SamplingParams

if TYPE_CHECKING:
    from quasar.bench.fidelity import Passage
    from quasar.loading import Model
    from quasar.verification.verifier import Verifier

SUMMARY = "measure how faithful verifiers are to a reference"
WINDOW_TOKENS = 512
ANSWER_TOKENS = 128


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "reference", metavar="REFERENCE", help="MODEL+VERIFIER, such as m.gguf+bf16"
    )
    parser.add_argument("candidates", metavar="CANDIDATE", nargs="+", help="MODEL+VERIFIER")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--text", type=Path, metavar="FILE", help="predict this text, in windows")
    source.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="predict the reference's greedy answers to these",
    )
    parser.add_argument(
        "--limit", type=options.positive, metavar="N", help="windows or prompts at most"
    )
    parser.add_argument(
        "--max-tokens",
        type=options.positive,
        metavar="N",
        help=f"tokens a window (default: {WINDOW_TOKENS}) or an answer (default: {ANSWER_TOKENS})",
    )
    parser.add_argument(
        "--head",
        metavar="PRECISION",
        help="precision of the candidates' output layer (default: each verifier's own)",
    )
    options.add_machine(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    names = [args.reference, *args.candidates]
    parts = [split_name(name) for name in names]

    from quasar.bench.fidelity import compare
    from quasar.cli.parts.models import check_held, check_precision, load_verifier
    from quasar.loading import Model, make_backend

    for _, precision in parts:
        check_precision(precision, "verifier")
    check_precision(args.head, "--head")
    models = {path: Model.open(path) for path, _ in parts}
    for model in models.values():
        check_vocabulary(models[parts[0][0]], model)
    for path, precision in parts:
        check_held(models[path], precision)
    backend = make_backend(args.threads)
    heads = [None] + [args.head] * len(args.candidates)
    reference, *candidates = [
        load_verifier(models[path], precision, backend, head)
        for (path, precision), head in zip(parts, heads, strict=True)
    ]
    passages = read_passages(args, models[parts[0][0]], reference)
    with terminal.progress_bar() as progress:
        found = compare(
            reference, candidates, passages, lambda done, total: progress("passages", done, total)
        )
    entries = [
        {"name": name} | fidelity.figures()
        for name, fidelity in zip(args.candidates, found, strict=True)
    ]
    content = {"reference": args.reference, "candidates": entries}
    print(json.dumps(content, ensure_ascii=False) if args.json else page(content))
    return 0


def split_name(name: str) -> tuple[str, str]:
    """`MODEL+VERIFIER` -> its two parts."""
    model, plus, verifier = name.rpartition("+")
    if not (model and plus and verifier):
        raise UsageError(f"{name!r} is not of the form MODEL+VERIFIER")
    return model, verifier


def check_vocabulary(reference: Model, candidate: Model) -> None:
    """Token ids must mean the same to both."""
    if (
        candidate.config.vocab_size != reference.config.vocab_size
        or candidate.tokenizer.pieces != reference.tokenizer.pieces
    ):
        raise UsageError(f"{candidate.name} and {reference.name} have different vocabularies")


def read_passages(args: argparse.Namespace, model: Model, reference: Verifier) -> list[Passage]:
    if args.text is not None:
        return text_passages(model, args.text, args.max_tokens or WINDOW_TOKENS, args.limit)
    return answer_passages(
        model, reference, args.prompts, args.max_tokens or ANSWER_TOKENS, args.limit
    )


def text_passages(model: Model, path: Path, size: int, limit: int | None) -> list[Passage]:
    """Windows of a text, each after the tokens that the model wants before any text."""
    from quasar.bench.fidelity import windows

    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise QuasarError(f"{path}: not UTF-8: {error.reason}") from error
    context = model.config.context_length
    if size > context:
        raise UsageError(f"--max-tokens {size}: the model's context holds {context}")
    tokens = model.tokenizer.encode(text, add_special_tokens=False)
    prefix = model.tokenizer.encode("", add_special_tokens=True)
    found = windows(tokens, prefix, size)[:limit]
    if not found:
        raise QuasarError(f"{path}: too short to predict anything in it")
    return found


def answer_passages(
    model: Model, reference: Verifier, path: Path, max_tokens: int, limit: int | None
) -> list[Passage]:
    """Each prompt with the reference's greedy answer; only the answer is predicted."""
    from quasar.bench.fidelity import Passage
    from quasar.bench.suites import read_prompts, round_robin
    from quasar.cli.bench import encode
    from quasar.cli.parts.models import use_raw

    prompts = round_robin(read_prompts(path), limit)
    tasks = encode(model, prompts, use_raw(model, False))
    answers = reference_answers(model, reference, [task.tokens for task in tasks], max_tokens)
    return [
        Passage([*task.tokens, *answer], len(task.tokens))
        for task, answer in zip(tasks, answers, strict=True)
    ]


def reference_answers(
    model: Model, reference: Verifier, prompts: Sequence[list[int]], max_tokens: int
) -> list[list[int]]:
    """Greedy answers, drafted by n-gram: drafts change the speed alone."""
    from quasar.engine.engine import Engine

    params = SamplingParams(max_tokens=max_tokens)
    slots = min(max(map(len, prompts)) + max_tokens, model.config.context_length)
    engine = Engine(reference, model.tokenizer, cache_tokens=slots + DEFAULT_DRAFT_TOKENS)
    answers = []
    with terminal.progress_bar() as progress:
        for done, prompt in enumerate(prompts, 1):
            answers.append(engine.complete([prompt], params)[0].tokens)
            progress("answers", done, len(prompts))
    return answers


def page(content: dict[str, Any]) -> str:
    """The same for people."""
    headers = ("candidate", "tokens", "perplexity", "reference", "KL", "top-1", "clear top-1")
    rows = [
        (
            entry["name"],
            str(entry["tokens"]),
            f"{entry['perplexity']:.3f}",
            f"{entry['reference_perplexity']:.3f}",
            f"{entry['kl']:.5f}",
            f"{entry['top1']:.2%}",
            "-" if (clear := entry["top1_without_near_ties"]) is None else f"{clear:.2%}",
        )
        for entry in content["candidates"]
    ]
    return f"reference: {content['reference']}\n" + terminal.table(headers, rows)
