"""Files that a benchmark leaves: JSON, Spec-Bench answers. Whole or not at all."""

from __future__ import annotations

import os
import re
import tempfile
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quasar.bench.runner import Answer
from quasar.errors import UsageError
from quasar.figures import json_text


def check_writable(option: str, path: Path) -> None:
    """Refuse before the work what could not be written after it."""
    if path.is_dir():
        raise UsageError(f"{option} {path}: is a folder, a file is wanted")
    folder = path.absolute().parent
    if not folder.is_dir():
        raise UsageError(f"{option} {path}: there is no folder {folder}")
    if not os.access(folder, os.W_OK):
        raise UsageError(f"{option} {path}: the folder is not writable")


def write_atomically(path: Path, text: str) -> None:
    """Write beside the target, sync, rename: an interruption leaves the old file or the new one.

    Bytes of a path that are no UTF-8 are written as JSON escapes.
    """
    descriptor, temporary = tempfile.mkstemp(dir=path.absolute().parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def write_json(path: Path, content: dict[str, Any]) -> None:
    write_atomically(path, json_text(content, indent=2) + "\n")


def write_answers(folder: Path, model: str, name: str, answers: Sequence[Answer]) -> None:
    """One configuration's answers as Spec-Bench JSONL, in a file named after it."""
    lines = [json_text(_spec_bench(f"{model}+{name}", answer)) for answer in answers]
    file = re.sub(r"[^\w.+:-]", "_", name)
    write_atomically(folder / f"{file}.jsonl", "\n".join(lines) + "\n")


def _spec_bench(model_id: str, answer: Answer) -> dict[str, Any]:
    completion, prompt = answer.completion, answer.task.prompt
    stats = completion.stats
    choice = {
        "index": 0,
        "turns": [completion.text],
        "decoding_steps": [stats.verify_passes],
        "new_tokens": [stats.completion_tokens],
        "wall_time": [stats.prefill_seconds + stats.decode_seconds],
        "accept_lengths": answer.accept_lengths,
    }
    return {
        "question_id": prompt.id,
        "category": prompt.category,
        "answer_id": uuid.uuid4().hex,
        "model_id": model_id,
        "choices": [choice],
        "tstamp": time.time(),
    }
