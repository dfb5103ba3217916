"""Benchmark questions: JSONL files in the layouts of Spec-Bench, GSM8K and HumanEval."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from quasar.errors import QuasarError


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question, answered in a single turn."""

    id: str | int
    category: str
    text: str


def read_prompts(path: Path) -> list[Prompt]:
    """All questions of a file. A malformed line is refused with its number.

    Spec-Bench lines (`question_id category turns`) are asked by their first turn; GSM8K lines have
    `question`, HumanEval lines `prompt`. A line without `category` is in one named as the file.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"not UTF-8: {error.reason}"
        raise QuasarError(f"{path}: {reason}") from error
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    prompts = [_prompt(f"{path}:{number}", number, line, path.stem) for number, line in numbered]
    if not prompts:
        raise QuasarError(f"{path}: no questions in it")
    return prompts


def _prompt(where: str, number: int, line: str, default_category: str) -> Prompt:
    try:
        item = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise QuasarError(f"{where}: not JSON: {error}") from error
    if not isinstance(item, dict):
        raise QuasarError(f"{where}: not a JSON object")
    name = item.get("question_id", item.get("task_id", number))
    category = item.get("category", default_category)
    if not isinstance(name, str | int):
        raise QuasarError(f"{where}: its id is neither text nor a whole number")
    if not isinstance(category, str) or not category:
        raise QuasarError(f"{where}: category is not text")
    _check_utf8(f"{where}: its id", str(name))
    _check_utf8(f"{where}: category", category)
    return Prompt(name, category, _question(where, item))


def _question(where: str, item: Mapping[str, Any]) -> str:
    if "turns" in item:
        turns = item["turns"]
        if not isinstance(turns, list) or not turns:
            raise QuasarError(f"{where}: turns is not a list of questions")
        found = turns[0]
    else:
        found = item.get("question", item.get("prompt"))
    if found is None:
        raise QuasarError(f"{where}: none of turns, question and prompt is there")
    if not isinstance(found, str) or not found.strip():
        raise QuasarError(f"{where}: the question is empty or not text")
    _check_utf8(f"{where}: the question", found)
    return found


def _check_utf8(what: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise QuasarError(f"{what} holds half a surrogate pair") from error


def round_robin(prompts: Sequence[Prompt], limit: int | None) -> list[Prompt]:
    """The first `limit` prompts (None: all), one of each category in turn, in the file's order."""
    queues: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        queues.setdefault(prompt.category, []).append(prompt)
    rounds = zip_longest(*queues.values())
    return [prompt for taken in rounds for prompt in taken if prompt is not None][:limit]
