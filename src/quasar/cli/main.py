"""`quasar`: finds the sub-command's file, hands it the arguments, turns errors into exit codes.

A sub-command is a file beside this one with `SUMMARY`, `configure(parser)` and `run(args) -> int`.
Files import nothing heavy before `run`, so that help and usage errors are instant.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import pkgutil
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from quasar import __version__
from quasar.cli.parts import terminal
from quasar.errors import QuasarError, UsageError
from quasar.kernels import tier_cap

INTERRUPTED = 130

ALLOCATION = re.compile(
    r"(?:can't allocate|not enough) memory(?:: you tried to allocate \d+ bytes)?"
)
"""What torch says in a RuntimeError, between C++ file names, where Python has a MemoryError."""


class Parser(argparse.ArgumentParser):
    """An argument parser that fails in one line and takes no abbreviations."""

    def __init__(self, **options: object) -> None:
        super().__init__(**{"allow_abbrev": False, **options})  # type: ignore[arg-type]

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"quasar: error: {one_line(message)} (see {self.prog} --help)\n")


class Formatter(logging.Formatter):
    """Names of files and models reach the terminal without control characters."""

    def format(self, record: logging.LogRecord) -> str:
        return terminal.harmless(super().format(record))


def one_line(message: object) -> str:
    return " ".join(terminal.harmless(str(message)).split())


def commands() -> list[str]:
    """Names of all sub-commands: the files of this folder."""
    found = pkgutil.iter_modules([str(Path(__file__).parent)])
    return [module.name for module in found if not module.ispkg and module.name != "main"]


def make_parser(argv: Sequence[str]) -> Parser:
    """The parser; of the sub-commands only the one that `argv` names is imported, if it does."""
    parser = Parser(
        prog="quasar",
        description="Speculative decoding on CPUs: an INT8 form of the model verifies the drafts.",
    )
    parser.add_argument("--version", action="version", version=f"quasar {__version__}")
    choices = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    names = commands()
    wanted = {argv[0]} & set(names) if argv else set()
    for name in names:
        if wanted and name not in wanted:
            choices.add_parser(name)
            continue
        module = importlib.import_module(f"quasar.cli.{name}")
        child = choices.add_parser(name, help=module.SUMMARY, description=module.SUMMARY)
        module.configure(child)
        child.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line. Exit codes: 0, 1 (failed), 2 (usage), 130 (interrupted)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    closed = sys.stdout is None
    terminal.prepare_streams()
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Formatter("quasar: %(message)s"))
    log = logging.getLogger("quasar")
    log.addHandler(handler)
    try:
        if closed:
            raise QuasarError("standard output is closed")
        args = make_parser(arguments).parse_args(arguments)
        tier_cap()
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        terminal.release_output()
        return 1
    except KeyboardInterrupt:
        print("quasar: interrupted", file=sys.stderr)
        return INTERRUPTED
    except (QuasarError, OSError, MemoryError) as error:
        print(f"quasar: error: {one_line(error) or type(error).__name__}", file=sys.stderr)
        terminal.release_output()
        return 2 if isinstance(error, UsageError) else 1
    except RuntimeError as error:
        allocation = ALLOCATION.search(str(error))
        if allocation is None:
            raise
        print(f"quasar: error: {allocation[0]}", file=sys.stderr)
        return 1
    finally:
        log.removeHandler(handler)
