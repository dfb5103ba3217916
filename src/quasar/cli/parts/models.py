"""From options to a model and an engine. Imports torch: sub-commands import this inside `run`."""

from __future__ import annotations

import argparse

# Before torch, whose own import of NumPy swallows a Ctrl-C.
import numpy  # noqa: F401

from quasar.cli.parts.terminal import note, progress_bar
from quasar.engine.engine import Engine
from quasar.errors import UsageError
from quasar.kernels.base import Backend
from quasar.loading import Model, make_backend
from quasar.verification.verifier import PRECISIONS, Verifier


def check_precision(name: str | None, option: str) -> None:
    """Refuse an unknown name before a model is opened; None stands for a default."""
    if name is not None and name not in PRECISIONS:
        raise UsageError(f"{option} {name} is unknown; it is one of {', '.join(PRECISIONS)}")


def check_held(model: Model, verifier: str | None) -> None:
    """Refuse before weights are loaded a verifier that the model cannot be; None: its default."""
    if verifier is not None and verifier not in model.precisions:
        held = ", ".join(model.precisions)
        raise UsageError(f"{model.name} can only be verified by {held}, not by {verifier}")


def load_verifier(model: Model, precision: str, backend: Backend, head: str | None) -> Verifier:
    """Load with a progress bar: the first use of a model may have to quantise it."""
    with progress_bar() as progress:
        return model.load(precision, backend, head, progress)


def load_engine(model: Model, args: argparse.Namespace, tokens: int) -> Engine:
    """An engine whose cache holds one request of `tokens`, prompt and answer, and its drafts."""
    precision = args.verifier or model.default_verifier
    verifier = load_verifier(model, precision, make_backend(args.threads), args.head)
    slots = min(tokens, model.config.context_length) + args.draft_tokens
    return Engine(verifier, model.tokenizer, args.drafter, args.draft_tokens, slots)


def use_raw(model: Model, raw: bool) -> bool:
    """Whether prompts go in as they are: on request, or for lack of a chat template (said so)."""
    if not raw and not model.tokenizer.has_chat_template:
        note(f"{model.name} has no chat template: prompts are used as they are")
        return True
    return raw


def encode_prompt(model: Model, text: str, raw: bool) -> list[int]:
    """Token ids of one user turn in the chat template, or of the text itself."""
    if raw:
        return model.tokenizer.encode(text, add_special_tokens=True)
    return encode_chat(model, [{"role": "user", "content": text}])


def encode_chat(model: Model, messages: list[dict[str, str]]) -> list[int]:
    """Token ids of a conversation. A template that renders nothing is refused."""
    tokens = model.tokenizer.chat(messages)
    if not tokens:
        raise UsageError(f"the chat template of {model.name} renders nothing: 0 tokens")
    return tokens


def check_length(model: Model, tokens: int) -> None:
    """Refuse before the weights are loaded what the context cannot hold."""
    context = model.config.context_length
    if tokens >= context:
        raise UsageError(f"the prompt has {tokens} tokens, the model's context holds {context}")
