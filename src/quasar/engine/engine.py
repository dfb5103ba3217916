"""The one loop: draft, verify, accept, keep. Plain decoding is the drafter that proposes nothing.

The engine knows token ids, not prompts: templates are applied before, and text is a by-product.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as List

import numpy as np

from quasar.drafting import DEFAULT_DRAFT_TOKENS, make_drafter
from quasar.drafting.base import Drafter
from quasar.engine.batch import Slice, depths, pack
from quasar.engine.scheduler import Limits, Scheduler
from quasar.engine.sequence import Sequence, TextStream
from quasar.errors import QuasarError, UsageError
from quasar.kernels.base import Buffer
from quasar.text.tokenizer import Tokenizer
from quasar.types import Completion, Draft, Progress, SamplingParams, Verdict
from quasar.verification.acceptance import accept
from quasar.verification.sampling import NOT_FINITE, Sampler
from quasar.verification.verifier import Verifier


class Engine:
    """Generates for any number of requests at a time with one verifier.

    An engine belongs to one thread at a time.
    """

    def __init__(
        self,
        verifier: Verifier,
        tokenizer: Tokenizer | None,
        drafter: str = "ngram",
        draft_tokens: int = DEFAULT_DRAFT_TOKENS,
        cache_tokens: int | None = None,
        limits: Limits | None = None,
    ) -> None:
        """`cache_tokens` slots are shared by all requests; by default the model's whole context."""
        limits = limits or Limits()
        limits.check_drafts(make_drafter(drafter, draft_tokens).draft_tokens)
        self.verifier = verifier
        self.tokenizer = tokenizer
        self.drafter = drafter
        self.draft_tokens = draft_tokens
        if cache_tokens is None:
            cache_tokens = verifier.config.context_length
        if cache_tokens < 1:
            raise UsageError(f"cache_tokens={cache_tokens} is out of range: at least 1")
        block = verifier.backend.block_size
        # Whole blocks, so that the rotary tables reach as far as the slots do.
        self.cache = verifier.new_cache(-(-cache_tokens // block) * block)
        self.scheduler = Scheduler(self.cache, limits)
        self._next_id = 0

    def submit(
        self, prompt: List[int], params: SamplingParams, drafter: Drafter | None = None
    ) -> Sequence:
        """Queue a request, with a fresh drafter of its own or the engine's kind.

        Raises UsageError when it can never be served.
        """
        context, vocabulary = self.verifier.config.context_length, self.verifier.config.vocab_size
        if not prompt:
            raise UsageError("the prompt is empty")
        if not all(type(token) is int and 0 <= token < vocabulary for token in prompt):
            raise UsageError(f"the prompt has token ids outside 0..{vocabulary - 1}")
        if len(prompt) >= context:
            raise UsageError(
                f"the prompt has {len(prompt)} tokens, the model's context holds {context}"
            )
        if params.stop and self.tokenizer is None:
            raise UsageError("stop strings need a tokenizer")
        drafter = drafter or make_drafter(self.drafter, self.draft_tokens)
        self.scheduler.limits.check_drafts(drafter.draft_tokens)
        limit = min(params.max_tokens, context - len(prompt))
        sequence = self._sequence(prompt, params, limit, drafter)
        if sequence.slots_needed > self.cache.capacity:
            raise UsageError(
                f"the request needs {sequence.slots_needed} cache slots, the engine was made with "
                f"{self.cache.capacity}: lower max_tokens or shorten the prompt"
            )
        self.scheduler.add(sequence)
        return sequence

    def _sequence(
        self, prompt: List[int], params: SamplingParams, limit: int, drafter: Drafter
    ) -> Sequence:
        tokenizer = self.tokenizer
        self._next_id += 1
        return Sequence(
            self._next_id,
            prompt,
            params,
            limit,
            drafter,
            Sampler(self.verifier.backend, params),
            None if tokenizer is None else TextStream(tokenizer, params.stop),
            frozenset() if tokenizer is None else tokenizer.eos_ids,
        )

    def step(self) -> list[Progress]:
        """One pass over the running requests: what it added to each that it completed a step of.

        A request whose drafter, sampling or text fails ends alone, with the reason `error`; a pass
        that fails ends all requests that took part, whose state is unknown then. `stream` and
        `complete` raise the error of their requests.
        """
        selected = self.scheduler.select()
        progress = [self._fail(*failure) for failure in self._draft(selected)]
        selected = [part for part in selected if part[0].finish_reason is None]
        if not selected:
            return progress
        try:
            work = pack(selected)
            logits = self.verifier.verify(work.batch, self.cache, work.logit_rows).logits
            return progress + self._accept(work.slices, logits)
        except Exception as error:
            alive = [sequence for sequence, _ in selected if sequence.finish_reason is None]
            return progress + [self._fail(sequence, error) for sequence in alive]
        except BaseException:
            for sequence, _ in selected:
                self.cancel(sequence.request_id)
            raise

    def _draft(self, selected: List[tuple[Sequence, int]]) -> list[tuple[Sequence, Exception]]:
        """Ask the drafters of all that decode; returns whose failed and how."""
        failures = []
        vocabulary = self.verifier.config.vocab_size
        for sequence, _ in selected:
            sequence.draft = Draft()
            if sequence.prefilling:
                continue
            try:
                draft = sequence.drafter.propose(sequence.draft_limit)
                draft.check(sequence.draft_limit, vocabulary)
                sequence.draft = draft
            except Exception as error:
                failures.append((sequence, error))
        return failures

    def _fail(self, sequence: Sequence, error: Exception) -> Progress:
        self.scheduler.remove(sequence)
        return sequence.fail(error)

    def _accept(self, slices: list[Slice], logits: Buffer) -> list[Progress]:
        greedy = self._greedy_tokens(slices, logits)
        progress = []
        for part in slices:
            try:
                progress += self._take_over(part, logits, greedy)
            except Exception as error:
                progress.append(self._fail(part.sequence, error))
        return progress

    def _take_over(self, part: Slice, logits: Buffer, greedy: list[int | None]) -> list[Progress]:
        """Keep what was accepted of one sequence; nothing to report inside a prompt."""
        sequence = part.sequence
        assert sequence.cache is not None
        kept = part.rows - len(sequence.draft)
        if part.logits < 0:
            self.cache.keep(sequence.cache, range(kept))
            return []
        verdict = self._judge(part, logits, greedy)
        accepted = (kept + node for node in verdict.path)
        self.cache.keep(sequence.cache, [*range(kept), *accepted])
        progress = sequence.commit(verdict)
        if sequence.finish_reason is not None:
            self.scheduler.remove(sequence)
        return [progress]

    def _greedy_tokens(self, slices: list[Slice], logits: Buffer) -> list[int | None]:
        """Row-wise argmax of all rows, if any request wants it; None where it is not finite."""
        scored = [part for part in slices if part.logits >= 0]
        if not any(part.sequence.sampler.greedy for part in scored):
            return []
        rows = sum(1 + len(part.sequence.draft) for part in scored)
        chosen = self.verifier.backend.argmax(rows, logits)
        finite = np.isfinite(logits.tensor.numpy()[np.arange(rows), chosen])
        return [token if known else None for token, known in zip(chosen, finite, strict=True)]

    def _judge(self, part: Slice, logits: Buffer, greedy: list[int | None]) -> Verdict:
        sequence, first = part.sequence, part.logits
        if sequence.sampler.greedy:
            return accept(sequence.draft, lambda row: _finite(greedy[first + row]))
        start = len(sequence.tokens)
        steps = depths(sequence.draft)
        return accept(
            sequence.draft,
            lambda row: sequence.sampler.draw(logits, first + row, start + steps[row]),
        )

    def stream(self, sequence: Sequence) -> Iterator[Progress]:
        """Run until a submitted request ends: its progress. Closing the iterator cancels it.

        Several streams may be read in any order: a step that one of them makes serves them all.
        Raises the error of a request that failed, after what it had emitted.
        """
        completion, tokens, text = sequence.completion, 0, 0
        try:
            while True:
                ended = sequence.finish_reason
                new, more = tuple(completion.tokens[tokens:]), completion.text[text:]
                tokens, text = tokens + len(new), text + len(more)
                if new or ended is not None:
                    yield Progress(sequence.request_id, new, more, ended)
                if completion.error is not None:
                    raise completion.error
                if ended is not None:
                    return
                if sequence.finish_reason is None and len(completion.tokens) == tokens:
                    self.step()
        finally:
            self.cancel(sequence.request_id)

    def complete(self, prompts: List[List[int]], params: SamplingParams) -> list[Completion]:
        """Generate for several requests side by side. The first error ends them all."""
        sequences: list[Sequence] = []
        try:
            for prompt in prompts:
                sequences.append(self.submit(prompt, params))
            while any(sequence.finish_reason is None for sequence in sequences):
                self.step()
                for sequence in sequences:
                    if sequence.completion.error is not None:
                        raise sequence.completion.error
        finally:
            for sequence in sequences:
                self.cancel(sequence.request_id)
        return [sequence.completion for sequence in sequences]

    def cancel(self, request_id: int) -> bool:
        """End a request now and free its blocks. False if it has ended or was never there."""
        sequence = self.scheduler.requests.get(request_id)
        if sequence is None:
            return False
        self.scheduler.remove(sequence)
        sequence.cancel()
        return True


def _finite(token: int | None) -> int:
    if token is None:
        raise QuasarError(NOT_FINITE)
    return token
