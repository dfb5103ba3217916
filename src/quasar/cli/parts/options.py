"""Options that several sub-commands share, and the values they take. Imports nothing heavy."""

from __future__ import annotations

import argparse
import sys

from quasar.drafting import DEFAULT_DRAFT_TOKENS, make_drafter
from quasar.errors import UsageError
from quasar.types import SamplingParams

DEFAULT_VERIFIER = "w8a8"
DEFAULT_DRAFTER = "ngram"


def positive(text: str) -> int:
    """An integer of at least 1."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return value


def add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a Hugging Face folder, a GGUF file, a folder of `quasar quantize`, a hub id, "
        "or smollm2-135m",
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
    parser.add_argument("--verifier", default=DEFAULT_VERIFIER, help="default: %(default)s")
    parser.add_argument("--drafter", default=DEFAULT_DRAFTER, help="default: %(default)s")
    add_draft_tokens(parser)
    add_head(parser)
    add_machine(parser)


def add_draft_tokens(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--draft-tokens",
        type=positive,
        default=DEFAULT_DRAFT_TOKENS,
        metavar="N",
        help="tokens proposed a pass at most (default: %(default)s)",
    )


def add_sampling(parser: argparse.ArgumentParser, max_tokens: int) -> None:
    """How tokens are drawn, and how many."""
    parser.add_argument("--max-tokens", type=int, default=max_tokens, metavar="N")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0: greedy")
    parser.add_argument("--top-k", type=int, default=0, metavar="N", help="0 keeps all tokens")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P")
    parser.add_argument("--min-p", type=float, default=0.0, metavar="P")
    parser.add_argument("--seed", type=int, default=0, metavar="S")
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="may be repeated"
    )


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """Raises UsageError for values that make no sense."""
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
    """Refuse an unknown drafter or an absurd draft before a model is loaded."""
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
