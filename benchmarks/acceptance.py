"""Acceptance lengths of verifiers for the same drafts along the same text.

    python benchmarks/acceptance.py REFERENCE CANDIDATE... --data spec_bench.jsonl [--limit 60]
        [--max-tokens 96] [--drafter ngram] [--draft-tokens 5] [--head bf16] [--json FILE]

REFERENCE and CANDIDATE are MODEL+VERIFIER as for `quasar evaluate`. The reference answers the
prompts greedily. Its steps along that text, each with the draft that was made there, are then
judged by every verifier: the context is the reference's text, the draft follows it in one pass, and
draft tokens are accepted while they equal the verifier's own argmax. A step's length is what it
accepts, and one. Steps start where the reference's did for all verifiers: were each to walk on by
its own lengths, they would soon be judged on different drafts. A draft may leave the text; a
candidate may follow it there, so its length can exceed the reference's.

Mean lengths are over all steps; those without a draft, of length 1, count. `drafted` leaves them
out. Intervals: 95 %, paired bootstrap over prompts.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quasar.bench.fidelity import CHUNK, Passage, Reader
from quasar.bench.output import check_writable, write_json
from quasar.bench.statistics import Interval, Rate, paired_ratio
from quasar.cli.evaluate import answered, open_models, prompt_passages, split_name
from quasar.cli.parts import options, terminal
from quasar.cli.parts.models import check_precision, load_verifier
from quasar.drafting import make_drafter
from quasar.drafting.base import Drafter
from quasar.errors import QuasarError, UsageError
from quasar.kernels.base import Buffer
from quasar.loading import Model, make_backend
from quasar.types import Draft
from quasar.verification.acceptance import accept
from quasar.verification.sampling import NOT_FINITE
from quasar.verification.verifier import Verifier

Lengths = list[list[int]]
"""Tokens of each step of each answer: those accepted, and one."""


@dataclass(frozen=True, slots=True)
class Step:
    """A draft that follows the first `start` tokens of a passage, all of them known."""

    start: int
    draft: Draft


def reference_steps(passage: Passage, drafter: Drafter) -> tuple[list[Step], list[int]]:
    """The steps in which the reference wrote an answer, and their lengths.

    Greedy decoding is lossless: the reference accepts a draft as far as it equals the text. The
    answer's first token comes from the prompt's pass. A draft is at most one token shorter than
    what is left of the answer, so that the lengths add up to it.
    """
    tokens, start = passage.tokens, passage.start + 1
    drafter.observe(tokens[:start])
    steps, lengths = list[Step](), list[int]()
    while start < len(tokens):
        draft = drafter.propose(len(tokens) - start - 1)
        if not draft.is_chain:
            raise UsageError(f"drafter {drafter.NAME} drafts trees: only chains are judged here")
        steps.append(Step(start, draft))
        lengths.append(len(accept(draft, tokens[start:].__getitem__).tokens))
        drafter.observe(tokens[start : start + lengths[-1]])
        start += lengths[-1]
    return steps, lengths


def judged_lengths(reader: Reader, passage: Passage, steps: Sequence[Step]) -> list[int]:
    """The length of each step by this verifier. A step without a draft needs no pass."""
    lengths, cached = list[int](), 0
    for step in steps:
        if not step.draft:
            lengths.append(1)
            continue
        choices = read_step(reader, passage, step, cached)
        lengths.append(len(accept(step.draft, choices.__getitem__).tokens))
        # The draft's own rows are dropped: where it left the text they are no context.
        cached = step.start
    return lengths


def read_step(reader: Reader, passage: Passage, step: Step, cached: int) -> list[int]:
    """The verifier's argmax after the known tokens and after each drafted one.

    The first `cached` tokens of the passage have been read.
    """
    known = passage.tokens[: step.start]
    while len(known) - cached > CHUNK:
        reader.read(known[cached : cached + CHUNK], cached, torch.tensor([CHUNK - 1]))
        cached += CHUNK
    new = [*known[cached:], *step.draft.tokens]
    rows = torch.arange(len(known) - cached - 1, len(new))
    logits = reader.read(new, cached, rows)
    if not logits.amax(dim=-1).isfinite().all():
        raise QuasarError(NOT_FINITE)
    return reader.verifier.backend.argmax(len(rows), Buffer.of(logits))


def judge(
    verifier: Verifier, passages: Sequence[Passage], steps: Sequence[Sequence[Step]], name: str
) -> Lengths:
    """The lengths of all steps by one verifier, which `name` calls on the progress bar."""
    reader = Reader.of(verifier, max(len(passage.tokens) for passage in passages))
    lengths: Lengths = []
    with terminal.progress_bar() as progress:
        for passage, own in zip(passages, steps, strict=True):
            lengths.append(judged_lengths(reader, passage, own))
            progress(name, len(lengths), len(passages))
    return lengths


def comparison(lengths: Lengths, reference: Lengths) -> dict[str, Any]:
    """Mean length, its ratio to the reference's, the share of steps with equal lengths.

    Raises QuasarError if there is no step at all.
    """
    tokens, base, steps = (
        np.array(list(map(count, side)), dtype=np.float64)
        for count, side in ((sum, lengths), (sum, reference), (len, lengths))
    )
    ratio = paired_ratio(Rate(tokens, steps), Rate(base, steps))
    if ratio is None:
        raise QuasarError("no step has a draft: there is nothing to judge")
    pairs = zip(chain(*lengths), chain(*reference), strict=True)
    return {
        "steps": int(steps.sum()),
        "mean_length": tokens.sum() / steps.sum(),
        "ratio": [ratio.mean, ratio.low, ratio.high],
        "equal": sum(own == theirs for own, theirs in pairs) / steps.sum(),
    }


def drafted(lengths: Lengths, steps: Sequence[Sequence[Step]]) -> Lengths:
    """The lengths of the steps that have a draft."""
    return [
        [length for length, step in zip(answer, own, strict=True) if step.draft]
        for answer, own in zip(lengths, steps, strict=True)
    ]


def report(
    name: str, lengths: Lengths, reference: Lengths, steps: Sequence[Sequence[Step]]
) -> dict[str, Any]:
    """One entry of the JSON file."""
    return {
        "name": name,
        "all": comparison(lengths, reference),
        "drafted": comparison(drafted(lengths, steps), drafted(reference, steps)),
        "lengths": lengths,
    }


def page(entries: Sequence[dict[str, Any]]) -> str:
    """The figures for people."""
    headers = ["verifier"]
    for name in ("all", "drafted"):
        headers += [f"{name}: steps", "length", "ratio to first", "equal"]
    rows = [[e["name"], *cells(e["all"]), *cells(e["drafted"])] for e in entries]
    return terminal.table(headers, rows)


def cells(figures: dict[str, Any]) -> list[str]:
    ratio = Interval(*figures["ratio"])
    return [
        str(figures["steps"]),
        f"{figures['mean_length']:.3f}",
        f"{ratio.mean:.4f} [{ratio.low:.4f}, {ratio.high:.4f}]",
        f"{figures['equal']:.2%}",
    ]


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One entry a verifier, the reference first."""
    names = [args.reference, *args.candidates]
    parts = [split_name(name) for name in names]
    models, backend = open_models(parts), make_backend(args.threads)
    model = models[parts[0][0]]
    reference = load_verifier(model, parts[0][1], backend, None)
    prompts = prompt_passages(model, args.data, args.limit)
    passages = answered(model, reference, prompts, args.max_tokens)
    check_contexts(models.values(), passages)
    walks = [
        reference_steps(passage, make_drafter(args.drafter, args.draft_tokens))
        for passage in passages
    ]
    steps = [own for own, _ in walks]
    entries = list[dict[str, Any]]()
    for name, (path, precision) in zip(names, parts, strict=True):
        verifier = (
            load_verifier(models[path], precision, backend, args.head) if entries else reference
        )
        lengths = judge(verifier, passages, steps, name)
        entries.append(report(name, lengths, [length for _, length in walks], steps))
    if entries[0]["all"]["equal"] < 1.0:
        raise QuasarError(f"{args.reference} judges its own text otherwise than it wrote it")
    return entries


def check_contexts(models: Iterable[Model], passages: Sequence[Passage]) -> None:
    longest = max(len(passage.tokens) for passage in passages)
    for model in models:
        if longest > model.config.context_length:
            raise UsageError(
                f"{model.name}: its context holds {model.config.context_length} tokens, an answer "
                f"ends after {longest}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("reference", metavar="REFERENCE")
    parser.add_argument("candidates", metavar="CANDIDATE", nargs="+")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--limit", type=options.positive, default=60)
    parser.add_argument("--max-tokens", type=options.MAX_TOKENS, default=96)
    parser.add_argument("--drafter", default=options.DEFAULT_DRAFTER)
    options.add_draft_tokens(parser)
    parser.add_argument("--head", help="of the candidates (default: each verifier's own)")
    options.add_machine(parser)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    options.check_drafter(args)
    check_precision(args.head, "--head")
    if args.json:
        check_writable("--json", args.json)
    entries = measure(args)
    if args.json:
        chosen = ("limit", "max_tokens", "drafter", "draft_tokens", "head")
        content = {name: getattr(args, name) for name in chosen}
        write_json(args.json, content | {"data": args.data.name, "verifiers": entries})
    print(page(entries))


if __name__ == "__main__":
    main()
