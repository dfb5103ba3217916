"""Runs every configuration over the same prompts, side by side, by the one engine loop.

Configurations take turns prompt by prompt, and who begins rotates, so that a drift of the machine
falls on all of them alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from quasar.bench.suites import Prompt
from quasar.drafting import make_drafter
from quasar.engine.engine import Engine
from quasar.errors import UsageError
from quasar.types import Completion, SamplingParams

WARM_UP_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Configuration:
    """A verifier and a drafter; `name` is what the user typed, such as `w8a8+ngram`."""

    name: str
    verifier: str
    drafter: str


def parse_configurations(text: str, draft_tokens: int) -> list[Configuration]:
    """`bf16+none,w8a8+ngram` -> its parts. Raises UsageError for anything else."""
    found = []
    for name in text.split(","):
        verifier, plus, drafter = name.strip().partition("+")
        if not (verifier and plus and drafter):
            raise UsageError(f"--configs: {name.strip()!r} is not of the form VERIFIER+DRAFTER")
        make_drafter(drafter, draft_tokens)
        found.append(Configuration(name.strip(), verifier, drafter))
    names = [configuration.name for configuration in found]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"--configs: {name} is given twice")
    return found


@dataclass(frozen=True, slots=True)
class Task:
    """A prompt as the model gets it."""

    prompt: Prompt
    tokens: list[int]


@dataclass(frozen=True, slots=True)
class Answer:
    """What one configuration made of one task."""

    task: Task
    completion: Completion
    accept_lengths: list[int]
    """Tokens emitted by each pass after the prefill."""


Results = dict[str, list[Answer]]
"""Answers by configuration name, each list in the order of the tasks."""


def run(
    engines: Mapping[str, Engine],
    tasks: Sequence[Task],
    params: SamplingParams,
    watch: Callable[[int, int], None] = lambda done, total: None,
) -> Results:
    """Every task by every engine, after one short warm-up each; `watch` counts answers."""
    brief = replace(params, max_tokens=min(params.max_tokens, WARM_UP_TOKENS))
    for engine in engines.values():
        answer(engine, tasks[0], brief)
    names = list(engines)
    results: Results = {name: [] for name in names}
    for turn, task in enumerate(tasks):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            results[name].append(answer(engines[name], task, params))
            watch(sum(map(len, results.values())), len(names) * len(tasks))
    return results


def answer(engine: Engine, task: Task, params: SamplingParams) -> Answer:
    request = engine.submit(task.tokens, params)
    steps = [len(progress.tokens) for progress in engine.stream(request)]
    return Answer(task, request.completion, steps[1:])


def cache_tokens(tasks: Sequence[Task], max_tokens: int, draft_tokens: int, context: int) -> int:
    """Slots that the largest task can need."""
    return max(min(len(task.tokens) + max_tokens, context) for task in tasks) + draft_tokens
