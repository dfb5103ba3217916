"""From answers to figures: totals a configuration, ratios with intervals, equality of outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

import numpy as np

from quasar.bench.runner import Answer, Configuration, Results
from quasar.bench.statistics import Interval, Rate, paired_ratio


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over the answers of one configuration. Rates are ratios of sums, no means of rates."""

    prompts: int
    prompt_tokens: int
    completion_tokens: int
    decoded_tokens: int
    """Those after each answer's first token, which belongs to the prefill."""
    prefill_seconds: float
    decode_seconds: float
    verify_passes: int
    drafted_passes: int
    draft_tokens: int
    accepted_tokens: int

    @classmethod
    def of(cls, answers: Sequence[Answer]) -> Totals:
        stats = [answer.completion.stats for answer in answers]
        return cls(
            len(stats),
            sum(s.prompt_tokens for s in stats),
            sum(s.completion_tokens for s in stats),
            sum(_decoded(answer) for answer in answers),
            sum(s.prefill_seconds for s in stats),
            sum(s.decode_seconds for s in stats),
            sum(s.verify_passes for s in stats),
            sum(s.drafted_passes for s in stats),
            sum(s.draft_tokens for s in stats),
            sum(s.accepted_tokens for s in stats),
        )

    def figures(self) -> dict[str, Any]:
        """The JSON fields that need this configuration alone; a rate of nothing is 0."""
        drafted = _rate(self.accepted_tokens, self.drafted_passes)
        return {
            "prompts": self.prompts,
            "completion_tokens": self.completion_tokens,
            "verify_passes": self.verify_passes,
            "decode_tokens_per_second": _rate(self.decoded_tokens, self.decode_seconds),
            "prefill_tokens_per_second": _rate(self.prompt_tokens, self.prefill_seconds),
            "mean_acceptance_length": _rate(self.decoded_tokens, self.verify_passes),
            "mean_acceptance_length_drafted": 1.0 + drafted if self.drafted_passes else 0.0,
            "draft_acceptance_rate": _rate(self.accepted_tokens, self.draft_tokens),
            "pass_milliseconds": 1e3 * _rate(self.decode_seconds, self.verify_passes),
        }


def _rate(gain: float, cost: float) -> float:
    return gain / cost if cost else 0.0


def _decoded(answer: Answer) -> int:
    return max(answer.completion.stats.completion_tokens - 1, 0)


def speed(answers: Sequence[Answer]) -> Rate:
    """Tokens after the first, by seconds after the first."""
    return _rates(answers, [answer.completion.stats.decode_seconds for answer in answers])


def acceptance(answers: Sequence[Answer]) -> Rate:
    """Tokens after the first, by passes after the first."""
    return _rates(answers, [answer.completion.stats.verify_passes for answer in answers])


def _rates(answers: Sequence[Answer], cost: Sequence[float]) -> Rate:
    gain = [_decoded(answer) for answer in answers]
    return Rate(np.array(gain, np.float64), np.array(cost, np.float64))


def configuration_reports(
    configurations: Sequence[Configuration], results: Results
) -> list[dict[str, Any]]:
    """One entry a configuration, the same figures for all prompts and for each category."""
    base = results[configurations[0].name]
    categories = list(dict.fromkeys(answer.task.prompt.category for answer in base))

    def only(answers: Sequence[Answer], category: str) -> list[Answer]:
        return [answer for answer in answers if answer.task.prompt.category == category]

    entries = []
    for configuration in configurations:
        answers = results[configuration.name]
        parts = {name: _figures(only(answers, name), only(base, name)) for name in categories}
        head = {
            "name": configuration.name,
            "verifier": configuration.verifier,
            "drafter": configuration.drafter,
        }
        entries.append(head | _figures(answers, base) | {"categories": parts})
    return entries


def _figures(answers: Sequence[Answer], base: Sequence[Answer]) -> dict[str, Any]:
    ratio = paired_ratio(speed(answers), speed(base))
    return Totals.of(answers).figures() | {"ratio_to_first": _interval(ratio)}


def _interval(ratio: Interval | None) -> dict[str, float] | None:
    return None if ratio is None else asdict(ratio)


def pair_reports(configurations: Sequence[Configuration], results: Results) -> list[dict[str, Any]]:
    """For each pair the ratios b / a of decode speed and of mean acceptance length."""
    pairs = []
    for a, b in combinations(configurations, 2):
        of_a, of_b = results[a.name], results[b.name]
        pairs.append(
            {
                "a": a.name,
                "b": b.name,
                "speed_ratio": _interval(paired_ratio(speed(of_b), speed(of_a))),
                "acceptance_ratio": _interval(paired_ratio(acceptance(of_b), acceptance(of_a))),
            }
        )
    return pairs


def equality_reports(
    configurations: Sequence[Configuration], results: Results
) -> list[dict[str, Any]]:
    """For each pair that shares a verifier: did it emit the same token ids for every prompt?"""
    reports = []
    for a, b in combinations(configurations, 2):
        if a.verifier != b.verifier:
            continue
        both = list(zip(results[a.name], results[b.name], strict=True))
        different = [
            x.task.prompt.id for x, y in both if x.completion.tokens != y.completion.tokens
        ]
        reports.append(
            {
                "a": a.name,
                "b": b.name,
                "equal": not different,
                "prompts": len(both),
                "different": different,
            }
        )
    return reports


def report(configurations: Sequence[Configuration], results: Results) -> dict[str, Any]:
    return {
        "configurations": configuration_reports(configurations, results),
        "pairs": pair_reports(configurations, results),
        "outputs_equal": equality_reports(configurations, results),
    }


def table_rows(entries: Sequence[dict[str, Any]]) -> list[list[str]]:
    """One row a configuration for people: speed, ratio with interval, acceptance, pass time."""
    rows = []
    for entry in entries:
        ratio = entry["ratio_to_first"]
        shown = "-" if ratio is None else "{mean:.2f}x [{low:.2f}, {high:.2f}]".format(**ratio)
        rows.append(
            [
                entry["name"],
                f"{entry['decode_tokens_per_second']:.1f}",
                shown,
                f"{entry['mean_acceptance_length']:.2f}",
                f"{entry['draft_acceptance_rate']:.0%}",
                f"{entry['pass_milliseconds']:.1f}",
                f"{entry['prefill_tokens_per_second']:.0f}",
            ]
        )
    return rows


TABLE_HEADERS = [
    "configuration",
    "tokens/s",
    "ratio",
    "acceptance",
    "accepted",
    "ms/pass",
    "prefill/s",
]


def category_rows(entries: Sequence[dict[str, Any]]) -> list[list[str]]:
    """One row a category: each configuration's speed-up over the first, and acceptance length."""
    rows = []
    for name, first in entries[0]["categories"].items():
        cells = []
        for entry in entries:
            part = entry["categories"][name]
            ratio = part["ratio_to_first"]
            shown = "-" if ratio is None else f"{ratio['mean']:.2f}x"
            cells.append(f"{shown} at {part['mean_acceptance_length']:.2f}")
        rows.append([name, str(first["prompts"]), *cells])
    return rows
