"""GSM8K exact match of several verifiers on the same questions, greedy.

    python benchmarks/gsm8k.py ARM ARM... --data gsm8k_test_300.jsonl [--limit 150]
        [--max-tokens 1024] [--sequences 4] [--drafter ngram] [--head bf16] [--json FILE]

ARM is MODEL+VERIFIER as for `quasar evaluate`. Questions go zero-shot into the chat template, with
an instruction to put the answer into a box. The answer is the number in the last box, for lack of
one the last number; it is right if it equals the last number of the file's solution. An answer that
--max-tokens cuts is judged all the same, and counted. Each arm is compared with the first one,
question by question: the difference of the accuracies with its 95 % interval (paired bootstrap over
questions), and how many questions only one of them has right. `--head` is that of all arms but the
first. Drafts change the speed alone.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np

from quasar.bench.output import check_writable, write_json
from quasar.bench.statistics import Rate, paired_difference
from quasar.bench.suites import read_prompts
from quasar.cli.evaluate import open_models, split_name
from quasar.cli.parts import options, terminal
from quasar.cli.parts.models import (
    check_length,
    check_precision,
    encode_prompt,
    load_verifier,
    use_raw,
)
from quasar.engine.engine import Engine
from quasar.engine.scheduler import Limits
from quasar.errors import QuasarError
from quasar.loading import Model, make_backend
from quasar.types import Completion, SamplingParams
from quasar.verification.verifier import Verifier

BOX = r"\boxed{"
INSTRUCTION = f"\n\nPlease reason step by step, and put your final answer within {BOX}}}."
"""The form that the model cards of Qwen2.5 ask for."""

NUMBER = re.compile(
    r"""(?P<minus>(?<![\w)\]}.%])[-\N{MINUS SIGN}])?  # after a term it subtracts
        \$?(?P<digits>
            [0-9]{1,3}(?:,[0-9]{3})+(?![0-9])(?:\.[0-9]+)?
            | [0-9]+(?:\.[0-9]+)?
            | \.[0-9]+
        )""",
    re.VERBOSE,
)


@dataclass(frozen=True, slots=True)
class Question:
    text: str
    answer: Decimal


def numbers(text: str) -> list[Decimal]:
    """All numbers in a text: `$1,234.50.` is 1234.5; `7 - 3` and `7-3` are 7 and 3."""
    found = NUMBER.finditer(text)
    pairs = [(Decimal(one["digits"].replace(",", "")), one["minus"]) for one in found]
    return [-value if minus else value for value, minus in pairs]


def given_answer(text: str) -> Decimal | None:
    """The number in the last box, or the last number, if there is one."""
    _, box, after = text.rpartition(BOX)
    if box and (boxed := numbers(after)):
        return boxed[0]
    found = numbers(text)
    return found[-1] if found else None


def read_questions(path: Path, limit: int | None) -> list[Question]:
    """The first questions of a GSM8K file. Refuses one without a numeric answer by its number."""
    prompts = read_prompts(path)
    lines = [line for line in path.read_text(encoding="utf-8-sig").split("\n") if line.strip()]
    found = []
    for prompt, line in list(zip(prompts, lines, strict=True))[:limit]:
        solution = json.loads(line).get("answer")
        known = numbers(solution) if isinstance(solution, str) else []
        if not known:
            raise QuasarError(f"{path}: question {prompt.id} has no answer with a number")
        found.append(Question(prompt.text, known[-1]))
    return found


def complete(
    engine: Engine, prompts: Sequence[list[int]], max_tokens: int, name: str
) -> list[Completion]:
    """Greedy answers, as many side by side as the engine's limits allow."""
    params = SamplingParams(max_tokens=max_tokens)
    requests = [engine.submit(prompt, params) for prompt in prompts]
    with terminal.progress_bar() as progress:
        for done, request in enumerate(requests, 1):
            for _ in engine.stream(request):
                pass  # each step serves all that run
            progress(name, done, len(requests))
    return [request.completion for request in requests]


def make_engine(
    args: argparse.Namespace, model: Model, verifier: Verifier, prompts: Sequence[list[int]]
) -> Engine:
    """An engine whose cache holds `--sequences` of the longest requests."""
    block, context = verifier.backend.block_size, model.config.context_length
    longest = min(max(map(len, prompts)) + args.max_tokens, context)
    slots = args.sequences * -(-longest // block) * block
    limits = Limits(sequences=args.sequences)
    return Engine(verifier, model.tokenizer, args.drafter, args.draft_tokens, slots, limits)


@dataclass(frozen=True, slots=True)
class Result:
    """What one arm made of all questions."""

    name: str
    right: list[bool]
    cut: list[bool]
    completions: list[Completion]

    @classmethod
    def of(cls, name: str, questions: Sequence[Question], completions: list[Completion]) -> Result:
        pairs = list(zip(questions, completions, strict=True))
        right = [given_answer(completion.text) == question.answer for question, completion in pairs]
        cut = [completion.finish_reason == "length" for completion in completions]
        return cls(name, right, cut, completions)

    def figures(self, first: Result) -> dict[str, Any]:
        """The JSON fields: exact match, and how it compares with the first arm's."""
        pairs = list(zip(self.right, first.right, strict=True))
        difference = paired_difference(accuracy(self.right), accuracy(first.right))
        assert difference is not None, "there is a question"
        return {
            "name": self.name,
            "questions": len(self.right),
            "right": sum(self.right),
            "accuracy": sum(self.right) / len(self.right),
            "difference": [difference.mean, difference.low, difference.high],
            "only_first_right": sum(theirs > own for own, theirs in pairs),
            "only_this_right": sum(own > theirs for own, theirs in pairs),
            "cut": sum(self.cut),
            "tokens": sum(len(completion.tokens) for completion in self.completions),
        }

    def answers(self) -> list[dict[str, Any]]:
        """Each answer as the JSON file keeps it."""
        rows = zip(self.completions, self.right, self.cut, strict=True)
        return [
            {"text": made.text, "tokens": len(made.tokens), "right": right, "cut": cut}
            for made, right, cut in rows
        ]


def accuracy(right: Sequence[bool]) -> Rate:
    return Rate(np.array(right, np.float64), np.ones(len(right)))


def page(entries: Sequence[dict[str, Any]]) -> str:
    """The figures for people."""
    headers = ("arm", "right", "accuracy", "minus first", "95 %", "only first", "only this", "cut")
    rows = []
    for entry in entries:
        mean, low, high = entry["difference"]
        counts = (str(entry[key]) for key in ("only_first_right", "only_this_right", "cut"))
        share = f"{entry['accuracy']:.1%}"
        interval = f"[{low:+.1%}, {high:+.1%}]"
        rows.append((entry["name"], str(entry["right"]), share, f"{mean:+.1%}", interval, *counts))
    return f"{entries[0]['questions']} questions\n" + terminal.table(headers, rows)


def measure(args: argparse.Namespace, questions: Sequence[Question]) -> list[Result]:
    """All questions by each arm; one verifier is in memory at a time."""
    parts = [split_name(name) for name in args.arms]
    models, backend = open_models(parts), make_backend(args.threads)
    first = models[parts[0][0]]
    raw = use_raw(first, False)
    prompts = [encode_prompt(first, question.text + INSTRUCTION, raw) for question in questions]
    for model in models.values():
        check_length(model, max(map(len, prompts)))
    results = list[Result]()
    for name, (path, precision) in zip(args.arms, parts, strict=True):
        verifier = load_verifier(models[path], precision, backend, args.head if results else None)
        engine = make_engine(args, models[path], verifier, prompts)
        completions = complete(engine, prompts, args.max_tokens, name)
        results.append(Result.of(name, questions, completions))
        del verifier, engine
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("arms", metavar="ARM", nargs="+")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--limit", type=options.positive, default=150)
    parser.add_argument("--max-tokens", type=options.MAX_TOKENS, default=1024)
    parser.add_argument("--sequences", type=options.positive, default=4, help="side by side")
    parser.add_argument("--drafter", default=options.DEFAULT_DRAFTER)
    options.add_draft_tokens(parser)
    parser.add_argument("--head", help="of all but the first (default: each verifier's own)")
    options.add_machine(parser)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    options.check_drafter(args)
    check_precision(args.head, "--head")
    if args.json:
        check_writable("--json", args.json)
    results = measure(args, read_questions(args.data, args.limit))
    entries = [result.figures(results[0]) for result in results]
    if args.json:
        chosen = {key: getattr(args, key) for key in ("limit", "max_tokens", "head")}
        answers = [{"answers": result.answers()} for result in results]
        arms = [entry | own for entry, own in zip(entries, answers, strict=True)]
        write_json(args.json, chosen | {"data": args.data.name, "arms": arms})
    print(page(entries))


if __name__ == "__main__":
    main()
