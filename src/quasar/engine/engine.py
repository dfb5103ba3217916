"""The one loop: draft, verify, accept, keep. Plain decoding is the drafter that proposes nothing.

The engine knows token ids, not prompts: templates are applied before, and text is a by-product.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as List

import torch

from quasar.drafting import DEFAULT_DRAFT_TOKENS, make_drafter
from quasar.engine.batch import Slice, depths, pack
from quasar.engine.scheduler import Scheduler
from quasar.engine.sequence import Sequence, TextStream
from quasar.errors import QuasarError, UsageError
from quasar.kernels.base import Buffer
from quasar.text.tokenizer import Tokenizer
from quasar.types import Completion, Draft, Progress, SamplingParams, Verdict
from quasar.verification.acceptance import accept
from quasar.verification.sampling import NOT_FINITE, Sampler
from quasar.verification.verifier import Verifier

MAX_ROWS = 512
"""Rows of a pass at most: a prompt is taken in chunks of this size."""


class Engine:
    """Generates for any number of requests at a time with one verifier."""

    def __init__(
        self,
        verifier: Verifier,
        tokenizer: Tokenizer | None,
        drafter: str = "ngram",
        draft_tokens: int = DEFAULT_DRAFT_TOKENS,
        cache_tokens: int | None = None,
        max_rows: int = MAX_ROWS,
    ) -> None:
        make_drafter(drafter, draft_tokens)
        self.verifier = verifier
        self.tokenizer = tokenizer
        self.drafter = drafter
        self.draft_tokens = draft_tokens
        if cache_tokens is None:
            cache_tokens = verifier.config.context_length + draft_tokens
        if cache_tokens < 1:
            raise UsageError(f"cache_tokens={cache_tokens} is out of range: at least 1")
        self.cache = verifier.new_cache(cache_tokens)
        self.scheduler = Scheduler(self.cache, max(max_rows, 1 + draft_tokens))
        self._next_id = 0

    def submit(self, prompt: List[int], params: SamplingParams) -> Sequence:
        """Queue a request. Raises UsageError when it can never be served."""
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
        sequence = self._sequence(prompt, params, min(params.max_tokens, context - len(prompt)))
        if sequence.slots_needed > self.cache.capacity:
            raise UsageError(
                f"the request needs {sequence.slots_needed} cache slots, the engine was made with "
                f"{self.cache.capacity}: lower max_tokens or shorten the prompt"
            )
        self.scheduler.add(sequence)
        return sequence

    def _sequence(self, prompt: List[int], params: SamplingParams, limit: int) -> Sequence:
        tokenizer = self.tokenizer
        self._next_id += 1
        return Sequence(
            self._next_id,
            prompt,
            params,
            limit,
            make_drafter(self.drafter, self.draft_tokens),
            Sampler(self.verifier.backend, params),
            None if tokenizer is None else TextStream(tokenizer, params.stop),
            frozenset() if tokenizer is None else tokenizer.eos_ids,
        )

    def step(self) -> list[Progress]:
        """One pass over all running requests; what it added to each that it completed a step of."""
        selected = self.scheduler.select()
        if not selected:
            return []
        for sequence, _ in selected:
            decoding = not sequence.prefilling
            sequence.draft = sequence.drafter.propose(sequence.draft_limit) if decoding else Draft()
        try:
            work = pack(selected)
            logits = self.verifier.verify(work.batch, self.cache, work.logit_rows).logits
            return self._accept(work.slices, logits)
        except BaseException:
            # Their state is unknown; the other requests go on.
            for sequence, _ in selected:
                self.cancel(sequence)
            raise

    def _accept(self, slices: list[Slice], logits: Buffer) -> list[Progress]:
        greedy = self._greedy_tokens(slices, logits)
        progress = []
        for part in slices:
            sequence = part.sequence
            assert sequence.cache is not None
            kept = part.rows - len(sequence.draft)
            if part.logits < 0:
                self.cache.keep(sequence.cache, range(kept))
                continue
            verdict = self._judge(part, logits, greedy)
            accepted = (kept + node for node in verdict.path)
            self.cache.keep(sequence.cache, [*range(kept), *accepted])
            progress.append(sequence.commit(verdict))
            if sequence.finish_reason is not None:
                self.scheduler.remove(sequence)
        return progress

    def _greedy_tokens(self, slices: list[Slice], logits: Buffer) -> list[int]:
        """Row-wise argmax of all rows, if any request wants it."""
        scored = [part for part in slices if part.logits >= 0]
        if not any(part.sequence.sampler.greedy for part in scored):
            return []
        rows = sum(1 + len(part.sequence.draft) for part in scored)
        chosen = self.verifier.backend.argmax(rows, logits)
        if not torch.isfinite(logits.tensor[torch.arange(rows), torch.tensor(chosen)]).all():
            raise QuasarError(NOT_FINITE)
        return chosen

    def _judge(self, part: Slice, logits: Buffer, greedy: list[int]) -> Verdict:
        sequence, first = part.sequence, part.logits
        if sequence.sampler.greedy:
            return accept(sequence.draft, lambda row: greedy[first + row])
        start = len(sequence.tokens)
        steps = depths(sequence.draft)
        return accept(
            sequence.draft,
            lambda row: sequence.sampler.draw(logits, first + row, start + steps[row]),
        )

    def stream(self, sequence: Sequence) -> Iterator[Progress]:
        """Run until a submitted request ends: its progress. Closing the iterator cancels it.

        Several streams may be read in any order: a step that one of them makes serves them all.
        """
        completion, tokens, text = sequence.completion, 0, 0
        try:
            while True:
                ended = sequence.finish_reason
                new, more = tuple(completion.tokens[tokens:]), completion.text[text:]
                tokens, text = tokens + len(new), text + len(more)
                if new or ended is not None:
                    yield Progress(sequence.request_id, new, more, ended)
                if ended is not None:
                    return
                if sequence.finish_reason is None and len(completion.tokens) == tokens:
                    self.step()
        finally:
            self.cancel(sequence)

    def complete(self, prompts: List[List[int]], params: SamplingParams) -> list[Completion]:
        """Generate for several requests side by side."""
        sequences: list[Sequence] = []
        try:
            for prompt in prompts:
                sequences.append(self.submit(prompt, params))
            while any(sequence.finish_reason is None for sequence in sequences):
                self.step()
        finally:
            for sequence in sequences:
                self.cancel(sequence)
        return [sequence.completion for sequence in sequences]

    def cancel(self, sequence: Sequence) -> None:
        """End a request now and free its blocks; nothing happens if it has ended."""
        if sequence.finish_reason is None:
            sequence.cancel()
            self.scheduler.remove(sequence)
