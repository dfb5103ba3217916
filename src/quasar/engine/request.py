"""Runs one request to its end and hands back all of it: text, tokens and statistics."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from quasar.engine.engine import Engine
from quasar.types import Completion, Progress, SamplingParams


def follow(
    engine: Engine,
    prompt: Sequence[int],
    params: SamplingParams,
    watch: Callable[[Progress], None] = lambda progress: None,
    stopped: Callable[[], bool] = lambda: False,
) -> Completion:
    """Generate for one prompt; `watch` sees every step, `stopped` is asked before each."""
    request = engine.submit(list(prompt), params)
    try:
        while request.finish_reason is None and not stopped():
            for progress in engine.step():
                if progress.request_id == request.request_id:
                    watch(progress)
    finally:
        engine.cancel(request)
    return request.completion
