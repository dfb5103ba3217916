"""The nouns of the whole program. Start reading here.

One generation step is: a drafter makes a `Draft`, the verifier computes logits for its nodes in one
pass, the acceptance rule turns them into a `Verdict`, and the engine keeps what was accepted.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from quasar.errors import QuasarError, UsageError

FinishReason = Literal["stop", "length", "cancelled", "error"]

MAX_DRAFT_NODES = 64
"""A node's ancestors are one 64-bit word."""

_INT64_MAX = 2**63 - 1
_MIN_TEMPERATURE = 1e-4
"""Far below it a logit over the temperature leaves fp32; 0 asks for the likeliest token."""


def _is_count(value: object, least: int) -> bool:
    return type(value) is int and least <= value <= _INT64_MAX


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens proposed after the last accepted token, as a tree.

    `parents[i] < i` is the index of node i's parent, -1 for a child of the last accepted token.
    Siblings carry different tokens. A chain is the case `parents == (-1, 0, 1, ...)`.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()

    @classmethod
    def chain(cls, tokens: tuple[int, ...]) -> Draft:
        return cls(tokens, tuple(range(-1, len(tokens) - 1)))

    @property
    def is_chain(self) -> bool:
        return all(parent == node - 1 for node, parent in enumerate(self.parents))

    def __len__(self) -> int:
        return len(self.tokens)

    def check(self, budget: int, vocabulary: int) -> None:
        """Raises QuasarError unless this is a tree of at most `budget` nodes with known tokens."""
        nodes = len(self.tokens)
        if nodes > min(budget, MAX_DRAFT_NODES) or len(self.parents) != nodes:
            raise QuasarError(
                f"a draft of {nodes} tokens and {len(self.parents)} parents, {budget} wanted"
            )
        if not all(-1 <= parent < node for node, parent in enumerate(self.parents)):
            raise QuasarError("a drafted node comes before its parent")
        if not all(0 <= token < vocabulary for token in self.tokens):
            raise QuasarError(f"a drafted token lies outside 0..{vocabulary - 1}")
        if len(set(zip(self.parents, self.tokens, strict=True))) != nodes:
            raise QuasarError("two drafted siblings carry the same token")


@dataclass(frozen=True, slots=True)
class Verdict:
    """What acceptance decided: `path` are the accepted nodes, root to leaf.

    `tokens` are the emitted tokens: the accepted ones, then one of the verifier's own.
    """

    tokens: tuple[int, ...]
    path: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request is sampled and when it ends. Refuses values that make no sense."""

    temperature: float = 0.0
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    max_tokens: int = 128
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        temperature = self.temperature
        checks = {
            "temperature": temperature == 0.0 or _MIN_TEMPERATURE <= temperature <= 100.0,
            "top_k": _is_count(self.top_k, 0),
            "top_p": 0.0 < self.top_p <= 1.0,
            "min_p": 0.0 <= self.min_p <= 1.0,
            "seed": _is_count(self.seed, 0),
            "max_tokens": _is_count(self.max_tokens, 1),
            "stop": not isinstance(self.stop, str)
            and all(isinstance(text, str) and text for text in self.stop),
        }
        for name, valid in checks.items():
            if not valid:
                raise UsageError(f"{name}={getattr(self, name)!r} is out of range")


@dataclass(slots=True)
class GenerationStats:
    """Counters and clocks of one request. All configurations are measured by these alone."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    """From the first token to the last."""
    verify_passes: int = 0
    """Passes after the prefill, those without a draft included."""
    drafted_passes: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0

    @property
    def decode_tokens_per_second(self) -> float:
        tokens = self.completion_tokens - 1
        return tokens / self.decode_seconds if tokens > 0 and self.decode_seconds > 0 else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens emitted after the prefill's token per pass after the prefill."""
        return (self.completion_tokens - 1) / self.verify_passes if self.verify_passes else 0.0

    @property
    def mean_acceptance_length_drafted(self) -> float:
        """As vLLM counts it: 1 + accepted tokens per pass that carried a draft."""
        return 1.0 + self.accepted_tokens / self.drafted_passes if self.drafted_passes else 0.0

    @property
    def draft_acceptance_rate(self) -> float:
        return self.accepted_tokens / self.draft_tokens if self.draft_tokens else 0.0


@dataclass(frozen=True, slots=True)
class Progress:
    """What one engine step added to one request."""

    request_id: int
    tokens: tuple[int, ...]
    text: str
    """New text, safe to show: no broken UTF-8, nothing that might become a stop string."""
    finish_reason: FinishReason | None = None


@dataclass(slots=True)
class Completion:
    """A finished request."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason = "length"
    stats: GenerationStats = field(default_factory=GenerationStats)
    error: Exception | None = None
    """Why it ended with the reason `error`."""
