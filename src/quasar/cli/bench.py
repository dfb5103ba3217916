"""Several configurations over the same prompts: speed, acceptance, equality."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quasar.cli.parts import options, terminal
from quasar.errors import UsageError
from quasar.types import SamplingParams

if TYPE_CHECKING:
    from quasar.bench.runner import Configuration, Results, Task
    from quasar.bench.suites import Prompt
    from quasar.engine.engine import Engine
    from quasar.kernels.base import Backend
    from quasar.loading import Model

SUMMARY = "compare verifiers and drafters on a file of prompts"
DEFAULT_CONFIGS = "bf16+none,bf16+ngram,w8a8+none,w8a8+ngram"


def configure(parser: argparse.ArgumentParser) -> None:
    options.add_model(parser)
    parser.add_argument(
        "--data",
        required=True,
        type=Path,
        metavar="FILE",
        help="Spec-Bench, GSM8K or HumanEval JSONL",
    )
    parser.add_argument(
        "--configs",
        metavar="V+D,...",
        help="VERIFIER+DRAFTER, by commas; ratios are to the first (default: "
        f"{DEFAULT_CONFIGS}; for a quantised folder its own verifier, with both drafters)",
    )
    parser.add_argument(
        "--limit", type=options.positive, metavar="N", help="prompts, round-robin over categories"
    )
    parser.add_argument("--max-tokens", type=options.MAX_TOKENS, default=128, metavar="N")
    parser.add_argument("--temperature", type=options.TEMPERATURE, default=0.0, metavar="T")
    parser.add_argument("--seed", type=options.SEED, default=0, metavar="S")
    options.add_draft_tokens(parser)
    options.add_head(parser)
    options.add_machine(parser)
    parser.add_argument("--raw", action="store_true", help="no chat template around the prompts")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with the figures")
    parser.add_argument(
        "--out-dir", type=Path, metavar="DIR", help="write answers, Spec-Bench JSONL"
    )


def run(args: argparse.Namespace) -> int:
    params = SamplingParams(
        temperature=args.temperature, seed=args.seed, max_tokens=args.max_tokens
    )

    from quasar.bench.report import report
    from quasar.bench.runner import parse_configurations
    from quasar.bench.suites import read_prompts, round_robin
    from quasar.cli.parts.models import check_held, check_precision, use_raw
    from quasar.loading import Model, make_backend

    configurations = parse_configurations(args.configs or DEFAULT_CONFIGS, args.draft_tokens)
    for configuration in configurations:
        check_precision(configuration.verifier, "--configs: verifier")
    check_precision(args.head, "--head")
    _check_outputs(args)
    prompts = round_robin(read_prompts(args.data), args.limit)
    model = Model.open(args.model, args.revision, args.offline)
    if args.configs is None and model.is_quantized:
        held = model.default_verifier
        configurations = parse_configurations(f"{held}+none,{held}+ngram", args.draft_tokens)
    for configuration in configurations:
        check_held(model, configuration.verifier)
    tasks = encode(model, prompts, use_raw(model, args.raw))
    backend = make_backend(args.threads)
    engines = make_engines(
        model, configurations, tasks, params, args.draft_tokens, args.head, backend
    )
    results = answer_all(engines, tasks, params)
    content = (
        describe(model, params, backend, args)
        | {"data": args.data.name, "skipped": len(prompts) - len(tasks)}
        | report(configurations, results)
    )
    _write(args, content, results)
    print(summary(content))
    return 0


def _check_outputs(args: argparse.Namespace) -> None:
    from quasar.bench.output import check_writable

    for option, path in (("--json", args.json), ("--html", args.html)):
        if path is not None:
            check_writable(option, path)
    if args.json and args.html and args.json.resolve() == args.html.resolve():
        raise UsageError(f"--json and --html name the same file {args.json}")
    if args.out_dir is not None:
        if args.out_dir.exists() and not args.out_dir.is_dir():
            raise UsageError(f"--out-dir {args.out_dir} is a file")
        args.out_dir.mkdir(parents=True, exist_ok=True)


def encode(model: Model, prompts: Sequence[Prompt], raw: bool) -> list[Task]:
    """Prompts as token ids. One that the context cannot hold is skipped and named."""
    from quasar.bench.runner import Task
    from quasar.cli.parts.models import encode_prompt

    tasks = [Task(prompt, encode_prompt(model, prompt.text, raw)) for prompt in prompts]
    context = model.config.context_length
    fitting = [task for task in tasks if len(task.tokens) < context]
    for task in tasks:
        if len(task.tokens) >= context:
            terminal.note(
                f"skipped question {task.prompt.id}: {len(task.tokens)} tokens, "
                f"the context holds {context}"
            )
    if not fitting:
        raise UsageError(f"no prompt fits the context of {context} tokens")
    return fitting


def make_engines(
    model: Model,
    configurations: Sequence[Configuration],
    tasks: Sequence[Task],
    params: SamplingParams,
    draft_tokens: int,
    head: str | None,
    backend: Backend,
) -> dict[str, Engine]:
    """One engine a configuration; each verifier is loaded once and shared."""
    from quasar.bench.runner import cache_tokens
    from quasar.cli.parts.models import load_verifier
    from quasar.engine.engine import Engine

    names = dict.fromkeys(configuration.verifier for configuration in configurations)
    verifiers = {name: load_verifier(model, name, backend, head) for name in names}
    slots = cache_tokens(tasks, params.max_tokens, draft_tokens, model.config.context_length)
    return {
        c.name: Engine(verifiers[c.verifier], model.tokenizer, c.drafter, draft_tokens, slots)
        for c in configurations
    }


def answer_all(
    engines: dict[str, Engine], tasks: Sequence[Task], params: SamplingParams
) -> Results:
    from quasar.bench.runner import run

    with terminal.progress_bar() as progress:
        return run(engines, tasks, params, lambda done, total: progress("answers", done, total))


def describe(
    model: Model, params: SamplingParams, backend: Backend, args: argparse.Namespace
) -> dict[str, Any]:
    """What the figures were measured with."""
    from quasar.bench.machine import cpu_name, versions

    chosen = asdict(params)
    return {
        "model": model.name,
        "isa": backend.isa,
        "threads": backend.threads,
        "cpu": cpu_name(),
        "versions": versions(),
        "draft_tokens": args.draft_tokens,
        "head": args.head,
        **{name: chosen[name] for name in ("max_tokens", "temperature", "seed")},
    }


def summary(content: dict[str, Any]) -> str:
    """The tables for people."""
    from quasar.bench.report import TABLE_HEADERS, category_rows, table_rows

    entries = content["configurations"]
    headers = ["speed-up at acceptance", "prompts", *(entry["name"] for entry in entries)]
    blocks = [terminal.table(TABLE_HEADERS, table_rows(entries)), ""]
    blocks += [terminal.table(headers, category_rows(entries)), ""]
    for pair in content["outputs_equal"]:
        verdict = "identical" if pair["equal"] else f"DIFFERENT for {len(pair['different'])}"
        blocks.append(f"{pair['a']} = {pair['b']}: {verdict}, {pair['prompts']} prompts")
    return "\n".join(blocks)


def _write(args: argparse.Namespace, content: dict[str, Any], results: Results) -> None:
    from quasar.bench.output import write_answers, write_atomically, write_json
    from quasar.bench.page import render

    if args.json is not None:
        write_json(args.json, content)
    if args.html is not None:
        write_atomically(args.html, render(content))
    if args.out_dir is not None:
        for name, answers in results.items():
            write_answers(args.out_dir, args.model, name, answers)
