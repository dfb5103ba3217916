"""The idea in two minutes: the embedded model, eight prompts, four configurations."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from quasar.cli.parts import options, terminal
from quasar.drafting import DEFAULT_DRAFT_TOKENS
from quasar.types import SamplingParams

if TYPE_CHECKING:
    from quasar.bench.fidelity import Fidelity
    from quasar.bench.runner import Results
    from quasar.engine.engine import Engine

SUMMARY = "compare verifiers and drafters on the embedded model, in two minutes"
MODEL = "smollm2-135m"
CONFIGS = "bf16+none,bf16+ngram,w8a8+none,w8a8+ngram"
MAX_TOKENS = 96

INTRODUCTION = f"""\
{MODEL} answers eight prompts. Each pass of the model verifies a draft of up to \
{DEFAULT_DRAFT_TOKENS} tokens.
  bf16, w8a8   the verifier: the model as it is, or with 8-bit weights and activations
  none, ngram  the drafter: nothing, or what followed when the last words stood here before"""


def configure(parser: argparse.ArgumentParser) -> None:
    options.add_machine(parser)


def run(args: argparse.Namespace) -> int:
    terminal.note(INTRODUCTION)

    from quasar.bench.report import report
    from quasar.bench.runner import parse_configurations
    from quasar.bench.samples import PROMPTS
    from quasar.cli.bench import answer_all, encode, make_engines, summary
    from quasar.loading import Model, make_backend

    params = SamplingParams(max_tokens=MAX_TOKENS)
    configurations = parse_configurations(CONFIGS, DEFAULT_DRAFT_TOKENS)
    model = Model.open(MODEL)
    tasks = encode(model, PROMPTS, raw=False)
    backend = make_backend(args.threads)
    draft = DEFAULT_DRAFT_TOKENS
    engines = make_engines(model, configurations, tasks, params, draft, None, backend)
    results = answer_all(engines, tasks, params)
    print(summary(report(configurations, results)))
    print(agreement_line(agreement(engines, results)))
    return 0


def agreement(engines: dict[str, Engine], results: Results) -> Fidelity:
    """Both verifiers read the answers of the plain BF16 model."""
    from quasar.bench.fidelity import Passage, compare

    passages = [
        Passage([*answer.task.tokens, *answer.completion.tokens], len(answer.task.tokens))
        for answer in results["bf16+none"]
    ]
    reference, candidate = engines["bf16+none"].verifier, engines["w8a8+none"].verifier
    return compare(reference, [candidate], passages)[0]


def agreement_line(fidelity: Fidelity) -> str:
    figures = fidelity.figures()
    clear = figures["top1_without_near_ties"]
    shown = "" if clear is None else f" ({clear:.1%} where bf16 is not nearly tied)"
    return (
        f"w8a8 prefers the token that bf16 prefers in {figures['top1']:.1%} of {fidelity.tokens} "
        f"positions{shown}; KL {figures['kl']:.4f}"
    )
