"""How faithful verifiers are to a reference, over a text or over the reference's own answers."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quasar.cli.parts import options, terminal
from quasar.drafting import DEFAULT_DRAFT_TOKENS
from quasar.errors import QuasarError, UsageError
from quasar.figures import json_text
from quasar.types import SamplingParams

if TYPE_CHECKING:
    from quasar.bench.fidelity import Fidelity, Passage
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
        type=options.MAX_TOKENS,
        metavar="N",
        help=f"tokens a window (default: {WINDOW_TOKENS}) or an answer (default: {ANSWER_TOKENS})",
    )
    parser.add_argument(
        "--head",
        metavar="PRECISION",
        help="precision of the candidates' output layer (default: each verifier's own)",
    )
    options.add_hub(parser)
    options.add_machine(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    parts = [split_name(name) for name in (args.reference, *args.candidates)]
    if args.revision is not None and len({path for path, _ in parts}) > 1:
        raise UsageError("--revision cannot say which MODEL it is of: write owner/name@revision")

    from quasar.cli.parts.models import check_precision, load_verifier
    from quasar.loading import make_backend

    check_precision(args.head, "--head")
    models = open_models(parts, args.revision, args.offline)
    model = models[parts[0][0]]
    passages = read_passages(args, model)
    check_contexts(args, model, models.values(), passages)
    backend = make_backend(args.threads)
    heads = [None] + [args.head] * len(args.candidates)
    reference, *candidates = [
        load_verifier(models[path], precision, backend, head)
        for (path, precision), head in zip(parts, heads, strict=True)
    ]
    if args.prompts is not None:
        passages = answered(model, reference, passages, args.max_tokens or ANSWER_TOKENS)
    entries = measure(args, reference, candidates, passages)
    content = {"reference": args.reference, "candidates": entries}
    print(json_text(content) if args.json else page(content))
    return 0


def split_name(name: str) -> tuple[str, str]:
    """`MODEL+VERIFIER` -> its two parts."""
    model, plus, verifier = name.rpartition("+")
    if not (model and plus and verifier):
        raise UsageError(f"{name!r} is not of the form MODEL+VERIFIER")
    return model, verifier


def open_models(
    parts: Sequence[tuple[str, str]], revision: str | None = None, offline: bool = False
) -> dict[str, Model]:
    """The models of (MODEL, VERIFIER) pairs by their names, found comparable and able to verify."""
    from quasar.cli.parts.models import check_held, check_precision
    from quasar.loading import Model

    for _, precision in parts:
        check_precision(precision, "verifier")
    models = {path: Model.open(path, revision, offline) for path, _ in parts}
    for other in models.values():
        check_vocabulary(models[parts[0][0]], other)
    for path, precision in parts:
        check_held(models[path], precision)
    return models


def check_vocabulary(reference: Model, candidate: Model) -> None:
    """Token ids must mean the same to both."""
    if (
        candidate.config.vocab_size != reference.config.vocab_size
        or candidate.tokenizer.pieces != reference.tokenizer.pieces
    ):
        raise UsageError(f"{candidate.name} and {reference.name} have different vocabularies")


def read_passages(args: argparse.Namespace, model: Model) -> list[Passage]:
    """Windows of the text, or the prompts, whose answers are still to come."""
    if args.text is not None:
        return text_passages(model, args.text, args.max_tokens or WINDOW_TOKENS, args.limit)
    return prompt_passages(model, args.prompts, args.limit)


def check_contexts(
    args: argparse.Namespace, model: Model, models: Iterable[Model], passages: Sequence[Passage]
) -> None:
    """Refuse before weights are loaded what one of the models cannot read."""
    longest = args.max_tokens or WINDOW_TOKENS
    if args.prompts is not None:
        prompt = max(len(passage.tokens) for passage in passages)
        answer = args.max_tokens or ANSWER_TOKENS
        longest = min(prompt + answer, model.config.context_length)
    for other in models:
        context = other.config.context_length
        if longest > context:
            raise UsageError(
                f"{other.name}: its context holds {context} tokens, passages may have {longest} "
                "(see --max-tokens)"
            )


def text_passages(model: Model, path: Path, size: int, limit: int | None) -> list[Passage]:
    """Windows of a text, each after the tokens that the model wants before any text."""
    from quasar.bench.fidelity import windows

    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise QuasarError(f"{path}: not UTF-8: {error.reason}") from error
    except OSError as error:
        raise QuasarError(f"--text {path}: {error.strerror}") from error
    tokens = model.tokenizer.encode(text, add_special_tokens=False)
    prefix = model.tokenizer.encode("", add_special_tokens=True)
    found = windows(tokens, prefix, size)[:limit]
    if not found:
        raise QuasarError(f"{path}: too short to predict anything in it")
    return found


def prompt_passages(model: Model, path: Path, limit: int | None) -> list[Passage]:
    """Each prompt; what is predicted begins after it."""
    from quasar.bench.fidelity import Passage
    from quasar.bench.suites import read_prompts, round_robin
    from quasar.cli.bench import encode
    from quasar.cli.parts.models import use_raw

    prompts = round_robin(read_prompts(path), limit)
    tasks = encode(model, prompts, use_raw(model, False))
    return [Passage(task.tokens, len(task.tokens)) for task in tasks]


def answered(
    model: Model, reference: Verifier, prompts: Sequence[Passage], max_tokens: int
) -> list[Passage]:
    """Each prompt with the reference's greedy answer; only the answer is predicted."""
    from quasar.bench.fidelity import Passage

    asked = [prompt.tokens for prompt in prompts]
    answers = reference_answers(model, reference, asked, max_tokens)
    return [
        Passage([*tokens, *answer], len(tokens))
        for tokens, answer in zip(asked, answers, strict=True)
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


def measure(
    args: argparse.Namespace,
    reference: Verifier,
    candidates: Sequence[Verifier],
    passages: Sequence[Passage],
) -> list[dict[str, Any]]:
    """One entry a candidate."""
    from quasar.bench.fidelity import compare

    with terminal.progress_bar() as progress:
        found = compare(
            reference, candidates, passages, lambda done, total: progress("passages", done, total)
        )
    for name, fidelity in zip(args.candidates, found, strict=True):
        check_finite(args.reference, name, fidelity)
    return [
        {"name": name} | fidelity.figures()
        for name, fidelity in zip(args.candidates, found, strict=True)
    ]


def check_finite(reference: str, candidate: str, fidelity: Fidelity) -> None:
    """Refuse figures that NaN or infinite logits have made meaningless."""
    if not math.isfinite(fidelity.reference_log_loss):
        raise QuasarError(f"{reference}: its logits are not finite")
    if not math.isfinite(fidelity.log_loss + fidelity.divergence):
        raise QuasarError(f"{candidate}: its logits are not finite")


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
