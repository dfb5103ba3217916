"""What people see: tables, notes, progress bars, and model text that cannot move the cursor."""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

ESCAPE_SEQUENCE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)")
"""CSI and OSC sequences of ECMA-48."""

CONTROLS = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
"""Characters that a terminal acts on; without its ESC an incomplete sequence is mere text."""

NUMBER = re.compile(r"-?[\d,]+(\.\d+)?%?|-")


def harmless(text: str) -> str:
    """Model text without control sequences: it cannot recolour, retitle or overwrite anything."""
    return ESCAPE_SEQUENCE.sub("", text).translate(CONTROLS)


def prepare_streams() -> None:
    """UTF-8 whatever the locale says; what is no UTF-8 is written as a JSON escape.

    A closed stream becomes the null device, so that no file that is opened later takes its number.
    """
    streams = (
        ("stdin", "r", "surrogateescape"),
        ("stdout", "w", "backslashreplace"),
        ("stderr", "w", "backslashreplace"),
    )
    for name, mode, errors in streams:
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  it stays open
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors=errors)


def release_output() -> None:
    """What Python still holds for a reader that left, or a full disk, must not fail at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def write_text(text: str) -> None:
    """Model text to standard output, at once, made harmless where that is a terminal."""
    sys.stdout.write(harmless(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def note(text: str) -> None:
    """Something to know that is not the command's result."""
    print(harmless(text), file=sys.stderr, flush=True)


def cell(value: object) -> str:
    """A name or figure on one line of a page, harmless."""
    return harmless(str(value)).translate({ord("\n"): " ", ord("\t"): " "})


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns: text to the left, columns of numbers to the right."""
    headers, rows = list(map(cell, headers)), [list(map(cell, row)) for row in rows]
    columns = list(zip(headers, *rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    right = [all(map(NUMBER.fullmatch, column[1:])) for column in columns]

    def line(cells: Sequence[str]) -> str:
        placed = zip(cells, widths, right, strict=True)
        padded = (text.rjust(n) if number else text.ljust(n) for text, n, number in placed)
        return "  ".join(padded).rstrip()

    return "\n".join([line(headers), line(["-" * width for width in widths]), *map(line, rows)])


def listing(pairs: Iterable[tuple[str, object]]) -> str:
    """One line a pair."""
    shown = [(cell(name), cell(value)) for name, value in pairs]
    width = max(len(name) for name, _ in shown)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in shown)


def megabytes(count: float) -> str:
    return f"{count / 1e6:,.0f} MB"


def duration(seconds: float) -> str:
    """Seconds, or minutes, or hours and minutes."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


@contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int], None]]:
    """A function (stage, done, total) that shows a bar a stage on standard error.

    Nothing is shown, nor loaded, before its first call.
    """
    bars = Bars()
    try:
        yield bars
    finally:
        bars.close()


class Bars:
    """Progress bars, the first of which opens the display."""

    def __init__(self) -> None:
        self._display: Progress | None = None
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, stage: str, done: int, total: int) -> None:
        display = self._display or self._open()
        if stage not in self._tasks:
            self._tasks[stage] = display.add_task(stage, total=total)
        display.update(self._tasks[stage], completed=done, total=total)

    def _open(self) -> Progress:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        text, bar = TextColumn("{task.description}"), BarColumn()
        columns = (text, bar, MofNCompleteColumn(), TimeRemainingColumn(elapsed_when_finished=True))
        self._display = Progress(*columns, console=Console(stderr=True))
        self._display.start()
        return self._display

    def close(self) -> None:
        if self._display is not None:
            self._display.stop()
