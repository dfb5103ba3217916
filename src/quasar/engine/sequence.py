"""One request on its way: its tokens, its drafter, its cache, its text, its clock."""

from __future__ import annotations

import time
from collections.abc import Sequence as Tokens

from quasar.cache import SequenceCache
from quasar.drafting.base import Drafter
from quasar.text.detokenizer import Detokenizer
from quasar.text.stop import StopMatcher
from quasar.text.tokenizer import Tokenizer
from quasar.types import Completion, Draft, FinishReason, Progress, SamplingParams, Verdict
from quasar.verification.sampling import Sampler


class TextStream:
    """Emitted tokens in, showable text out, up to the first stop string."""

    def __init__(self, tokenizer: Tokenizer, stops: tuple[str, ...]) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._matcher = StopMatcher(stops)

    def push(self, token: int) -> str:
        return self._matcher.push(self._detokenizer.push(token))

    @property
    def stopped(self) -> bool:
        return self._matcher.stopped

    def flush(self) -> str:
        """What was held back, once no token follows."""
        return self._matcher.push(self._detokenizer.flush()) + self._matcher.flush()


class Sequence:
    """A request and everything that belongs to it alone."""

    def __init__(
        self,
        request_id: int,
        prompt: Tokens[int],
        params: SamplingParams,
        limit: int,
        drafter: Drafter,
        sampler: Sampler,
        text: TextStream | None,
        eos_ids: frozenset[int],
    ) -> None:
        self.request_id = request_id
        self.tokens = list(prompt)
        self.params = params
        self.limit = limit
        """Tokens to emit at most: max_tokens, or what the context leaves."""
        self.drafter = drafter
        self.sampler = sampler
        self.text = text
        self.eos_ids = frozenset() if params.ignore_eos else eos_ids
        self.cache: SequenceCache | None = None
        self.draft = Draft()
        self.completion = Completion()
        self.completion.stats.prompt_tokens = len(self.tokens)
        self.finish_reason: FinishReason | None = None
        self._start = self._first = time.perf_counter()
        drafter.observe(self.tokens)

    @property
    def cached(self) -> int:
        return 0 if self.cache is None else self.cache.length

    @property
    def pending(self) -> int:
        """Tokens whose K and V are not yet cached: the rest of the prompt, or the newest token."""
        return len(self.tokens) - self.cached

    @property
    def prefilling(self) -> bool:
        return not self.completion.tokens

    @property
    def slots_needed(self) -> int:
        """Cache slots that this request can ever use, rejected drafts included.

        The last token is never cached, and `draft_limit` keeps drafts within what may be emitted.
        """
        return self.completion.stats.prompt_tokens + self.limit - 1

    @property
    def draft_limit(self) -> int:
        """A longer draft could only be cut: each step emits one token more than it accepts."""
        return min(self.drafter.draft_tokens, self.limit - len(self.completion.tokens) - 1)

    def start_clock(self) -> None:
        self._start = time.perf_counter()

    def commit(self, verdict: Verdict) -> Progress:
        """Take over the emitted tokens up to the first that ends the request."""
        stats = self.completion.stats
        first = self.prefilling
        text, taken = "", 0
        for token in verdict.tokens:
            text += self._take(token)
            taken += 1
            if self.finish_reason is not None:
                break
        now = time.perf_counter()
        if first:
            self._first = now
            stats.prefill_seconds = now - self._start
        else:
            stats.verify_passes += 1
            stats.drafted_passes += bool(self.draft)
            stats.draft_tokens += len(self.draft)
            stats.accepted_tokens += min(taken, len(verdict.path))
            stats.decode_seconds = now - self._first
        new = verdict.tokens[:taken]
        if self.finish_reason is not None:
            text += self._finish()
        else:
            self.drafter.observe(new)
        self.completion.text += text
        return Progress(self.request_id, new, text, self.finish_reason)

    def _take(self, token: int) -> str:
        self.tokens.append(token)
        self.completion.tokens.append(token)
        self.completion.stats.completion_tokens += 1
        if token in self.eos_ids:
            self.finish_reason = "stop"
            return ""
        text = "" if self.text is None else self.text.push(token)
        if self.text is not None and self.text.stopped:
            self.finish_reason = "stop"
        elif len(self.completion.tokens) == self.limit:
            self.finish_reason = "length"
        return text

    def _finish(self) -> str:
        assert self.finish_reason is not None
        self.completion.finish_reason = self.finish_reason
        return "" if self.text is None else self.text.flush()

    def cancel(self) -> None:
        self.finish_reason = "cancelled"
        self.completion.text += self._finish()

    def fail(self, error: Exception) -> Progress:
        """End with what was emitted so far; held-back text is not trusted any more."""
        self.finish_reason = self.completion.finish_reason = "error"
        self.completion.error = error
        return Progress(self.request_id, (), "", "error")
