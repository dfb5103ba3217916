"""Options that several sub-commands share, and the values they take. Imports nothing heavy."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable

from quasar.drafting import DEFAULT_DRAFT_TOKENS, make_drafter
from quasar.errors import UsageError
from quasar.types import MAX_DRAFT_NODES, SamplingParams

DEFAULT_DRAFTER = "ngram"
DEFAULT_CONTEXT = 8192
"""Tokens of conversation kept at most: the cache for them is reserved at the start."""


def positive(text: str) -> int:
    """An integer of at least 1."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return value


def whole(least: int, most: int) -> Callable[[str], int]:
    """An option's type: integers in least..most."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number in {least}..{most}")
        return value

    return parse


def number(least: float, most: float, without_least: bool = False) -> Callable[[str], float]:
    """An option's type: numbers from `least` to `most`, `least` itself included or not."""
    allowed = f"{'above' if without_least else 'from'} {least:g} to {most:g}"

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = least - 1.0
        if not least <= value <= most or (without_least and value == least):
            raise argparse.ArgumentTypeError(f"{text!r} is not a number {allowed}")
        return value

    return parse


POWERS = "KMGT"


def size(text: str) -> int:
    """A number of bytes: `500MB` is decimal, `4GiB` binary."""
    found = re.fullmatch(r"(\d{1,15}(?:\.\d{1,3})?) ?(?:([KMGT]?)(I?)B)?", text.upper())
    value = 0
    if found:
        base, power = 1024 if found[3] else 1000, POWERS.find(found[2] or " ") + 1
        value = round(float(found[1]) * base**power)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 500MB or 4GiB")
    return value


def utf8(text: str) -> str:
    """Text whose bytes were UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise argparse.ArgumentTypeError(f"it is not UTF-8 (character {error.start})") from error
    return text


def stop_string(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("the text is empty")
    return utf8(text)


INT64_MAX = 2**63 - 1
MAX_TOKENS = whole(1, INT64_MAX)
SEED = whole(0, INT64_MAX)
TEMPERATURE = number(0.0, 100.0)


def add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a Hugging Face folder, a GGUF file, a folder of `quasar quantize`, a hub id "
        "(owner/name, owner/name:FILE.gguf), or smollm2-135m",
    )
    add_hub(parser)


def add_hub(parser: argparse.ArgumentParser) -> None:
    """Of a MODEL that is a hub id: which commit, and whether to ask the hub at all."""
    parser.add_argument(
        "--revision", metavar="NAME", help="branch, tag or commit of a hub id (default: main)"
    )
    parser.add_argument(
        "--offline", action="store_true", help="take hub ids from the cache, without any network"
    )


def add_context(parser: argparse.ArgumentParser, meaning: str) -> None:
    parser.add_argument(
        "--context",
        type=positive,
        default=DEFAULT_CONTEXT,
        metavar="N",
        help=f"{meaning} (default: %(default)s, or what the model holds)",
    )


def add_machine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--threads", type=positive, metavar="N", help="default: all CPUs")


def add_head(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--head",
        metavar="PRECISION",
        help="precision of the output layer (default: the verifier's)",
    )


def add_engine(parser: argparse.ArgumentParser) -> None:
    """Who verifies and who drafts."""
    parser.add_argument(
        "--verifier", help="w8a8, w4a8 or bf16 (default: what a quantised folder holds, else w8a8)"
    )
    parser.add_argument("--drafter", default=DEFAULT_DRAFTER, help="default: %(default)s")
    add_draft_tokens(parser)
    add_head(parser)
    add_machine(parser)


def add_draft_tokens(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--draft-tokens",
        type=whole(1, MAX_DRAFT_NODES),
        default=DEFAULT_DRAFT_TOKENS,
        metavar="N",
        help="tokens proposed a pass at most (default: %(default)s)",
    )


def add_sampling(parser: argparse.ArgumentParser, max_tokens: int) -> None:
    """How tokens are drawn, and how many."""
    add = parser.add_argument
    add("--max-tokens", type=MAX_TOKENS, default=max_tokens, metavar="N")
    add("--temperature", type=TEMPERATURE, default=0.0, metavar="T", help="0: greedy")
    add("--top-k", type=whole(0, INT64_MAX), default=0, metavar="N", help="0 keeps all tokens")
    add("--top-p", type=number(0.0, 1.0, without_least=True), default=1.0, metavar="P")
    add("--min-p", type=number(0.0, 1.0), default=0.0, metavar="P")
    add("--seed", type=SEED, default=0, metavar="S")
    add("--stop", type=stop_string, action="append", default=[], metavar="TEXT", help="repeatable")


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    return SamplingParams(
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        seed=args.seed,
        max_tokens=args.max_tokens,
        stop=tuple(args.stop),
    )


def check_drafter(args: argparse.Namespace) -> None:
    """Refuse an unknown drafter before a model is loaded."""
    make_drafter(args.drafter, args.draft_tokens)


def read_prompt(text: str) -> str:
    """The prompt that `-p` names: itself, or standard input for `-`."""
    if text == "-":
        try:
            text = sys.stdin.buffer.read().decode()
        except UnicodeDecodeError as error:
            raise UsageError(f"standard input is not UTF-8 (byte {error.start})") from error
    if not text.strip():
        raise UsageError("the prompt is empty")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"the prompt is not UTF-8 (character {error.start})") from error
    return text
