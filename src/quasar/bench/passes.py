"""How long a verification pass takes, and how long it would take at the machine's limit.

A pass of M rows after C cached tokens reads B bytes (all packed weights with the head, and K and V
of C tokens) and multiplies A_p times in each precision p. With the bandwidth W and the multiply
rates R_p, all measured in the same run (that of W4A8 is INT8's),

    limit = max(B / W, sum over p of A_p / R_p).

A_p counts the linears and the head for all M rows, each in its own precision; the two products of
attention, over the C + i + 1 tokens that row i sees, count as BF16, as K and V are stored. The
embedding's M rows and the activations are left out: they make the limit only smaller. A share above
1 means that weights were found in a cache that the bandwidth does not know.

The machine's neighbours move its bandwidth from second to second, and a virtual machine's cores
share one memory link or have two, as the host places them (37 and 65 GB/s were seen in one minute).
So every pass has its own W, read just before it; all row counts, contexts and verifiers take turns
in each round; medians of the rounds count. The multiply rates are the best of the run.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from quasar.cache import KVCache, SequenceCache
from quasar.errors import UsageError
from quasar.kernels.base import Peaks, RaggedBatch
from quasar.verification.verifier import Verifier

ROWS = (1, 2, 4, 6, 8, 12, 16, 24, 32)
CONTEXTS = (128, 2048)
PREFILL_TOKENS = 512
ROUNDS = 15
PREFILL_ROUNDS = 3
PEAK_SECONDS = 0.25
"""Per kind of peak and time it is taken."""


@dataclass(frozen=True, slots=True)
class Work:
    """What one pass must read and multiply at least."""

    read_bytes: int
    multiply_adds: Mapping[str, int]
    """By precision."""

    def limit(self, peaks: Peaks) -> float:
        """Seconds."""
        rates = {"bf16": peaks.bf16_gmacs}  # all others multiply INT8
        multiplying = sum(
            count / rates.get(name, peaks.int8_gmacs) for name, count in self.multiply_adds.items()
        )
        return max(self.read_bytes / peaks.read_bandwidth_gbps, multiplying) * 1e-9


def pass_work(verifier: Verifier, rows: int, context: int) -> Work:
    """The work of verifying `rows` tokens after `context` cached ones, all rows with logits."""
    decoder, config = verifier.decoder, verifier.config
    width, kv_width = config.heads * config.head_dim, config.kv_heads * config.head_dim
    multiply_adds: Counter[str] = Counter()
    for linear in [decoder.head, *(one for layer in decoder.layers for one in layer.linears)]:
        multiply_adds[linear.precision] += rows * linear.out_features * linear.in_features
    seen = sum(context + row + 1 for row in range(rows))
    multiply_adds["bf16"] += 2 * config.layers * width * seen
    cache_bytes = 2 * 2 * config.layers * kv_width * context
    return Work(decoder.pass_bytes() + cache_bytes, multiply_adds)


@dataclass(frozen=True, slots=True)
class Timing:
    """One pass, and the read bandwidth (10^9 bytes a second) just before it."""

    seconds: float
    bandwidth: float


@dataclass(slots=True)
class Setting:
    """A verifier with a filled cache, ready to pass over the same slots again and again."""

    name: str
    verifier: Verifier
    cache: KVCache
    sequence: SequenceCache
    context: int
    passes: dict[int, list[Timing]] = field(default_factory=dict)
    """By number of rows."""

    def time(self, batch: RaggedBatch) -> float:
        """Seconds of one pass. Its rows are not kept, so the next pass overwrites them."""
        start = time.perf_counter()
        self.verifier.verify(batch, self.cache)
        return time.perf_counter() - start

    def batch(self, tokens: Sequence[int]) -> RaggedBatch:
        return RaggedBatch.chunk(list(tokens), self.context, self.sequence)


def fill(name: str, verifier: Verifier, tokens: Sequence[int], room: int) -> Setting:
    """Prefill `tokens` and leave room for `room` more."""
    cache = verifier.new_cache(len(tokens) + room)
    sequence = cache.open(len(tokens) + room)
    prefill(verifier, cache, sequence, tokens)
    return Setting(name, verifier, cache, sequence, len(tokens))


def prefill(
    verifier: Verifier, cache: KVCache, sequence: SequenceCache, tokens: Sequence[int]
) -> None:
    """Cache `tokens` from the sequence's start on, with the logits of each chunk's last row."""
    sequence.length = 0
    for start in range(0, len(tokens), PREFILL_TOKENS):
        chunk = list(tokens[start : start + PREFILL_TOKENS])
        batch = RaggedBatch.chunk(chunk, start, sequence)
        verifier.verify(batch, cache, torch.tensor([len(chunk) - 1]))
        cache.keep(sequence, range(len(chunk)))


@dataclass(frozen=True, slots=True)
class Measurement:
    """Peaks, and the entries of `passes` and `prefill` in the JSON of `quasar doctor`."""

    peaks: Peaks
    passes: list[dict[str, float | str]]
    prefill: list[dict[str, float | str]]


def measure(
    verifiers: Mapping[str, Verifier],
    tokens: Sequence[int],
    rounds: int,
    contexts: Sequence[int],
    watch: Callable[[int, int], None] = lambda done, total: None,
) -> Measurement:
    """Time passes and prefill of each verifier over `tokens`, as many as the longest context."""
    backend = next(iter(verifiers.values())).backend
    total = rounds + PREFILL_ROUNDS
    prompt = tokens[:PREFILL_TOKENS]
    peaks = [backend.measure_peaks(PEAK_SECONDS)]
    settings = [
        fill(name, verifier, tokens[:context], max(ROWS))
        for name, verifier in verifiers.items()
        for context in fitting(verifier, contexts)
    ]
    for turn in range(rounds):
        for setting in settings:
            _round(setting, tokens)
        watch(turn + 1, total)
    peaks.append(backend.measure_peaks(PEAK_SECONDS))
    prefills = {name: fill(name, verifier, prompt, 0) for name, verifier in verifiers.items()}
    speeds: dict[str, list[float]] = {name: [] for name in prefills}
    for turn in range(PREFILL_ROUNDS):
        for name, setting in prefills.items():
            speeds[name].append(len(prompt) / _prefill_seconds(setting, prompt))
        watch(rounds + turn + 1, total)
    found = run_peaks([*peaks, backend.measure_peaks(PEAK_SECONDS)], settings)
    return Measurement(
        found,
        [entry for setting in settings for entry in _pass_entries(setting, found)],
        [
            {
                "verifier": name,
                "tokens": len(prompt),
                "tokens_per_second": statistics.median(values),
            }
            for name, values in speeds.items()
        ],
    )


def fitting(verifier: Verifier, contexts: Sequence[int]) -> list[int]:
    """The contexts that the model can hold together with a pass' rows; those it cannot are cut."""
    longest = verifier.config.context_length - max(ROWS)
    if longest < 1:
        raise UsageError(
            f"a context of {verifier.config.context_length} tokens is too short to time"
        )
    return sorted({min(context, longest) for context in contexts})


def _round(setting: Setting, tokens: Sequence[int]) -> None:
    """One pass of each row count, after one that brings this verifier's weights back."""
    setting.time(setting.batch(tokens[:1]))
    for rows in ROWS:
        batch = setting.batch(tokens[:rows])
        bandwidth = setting.verifier.backend.measure_bandwidth()
        setting.passes.setdefault(rows, []).append(Timing(setting.time(batch), bandwidth))


def _prefill_seconds(setting: Setting, prompt: Sequence[int]) -> float:
    start = time.perf_counter()
    prefill(setting.verifier, setting.cache, setting.sequence, prompt)
    return time.perf_counter() - start


def run_peaks(measured: Sequence[Peaks], settings: Sequence[Setting]) -> Peaks:
    """The run's peaks: the best multiply rates, and the median bandwidth beside the passes."""
    bandwidths = [
        timing.bandwidth
        for setting in settings
        for timings in setting.passes.values()
        for timing in timings
    ]
    return Peaks(
        statistics.median(bandwidths),
        max(peaks.int8_gmacs for peaks in measured),
        max(peaks.bf16_gmacs for peaks in measured),
    )


def _pass_entries(setting: Setting, peaks: Peaks) -> Iterator[dict[str, float | str]]:
    for rows, timings in setting.passes.items():
        work = pass_work(setting.verifier, rows, setting.context)
        share = statistics.median(
            work.limit(replace(peaks, read_bandwidth_gbps=t.bandwidth)) / t.seconds for t in timings
        )
        milliseconds = statistics.median(t.seconds for t in timings) * 1e3
        yield {
            "verifier": setting.name,
            "rows": rows,
            "context": setting.context,
            "milliseconds": milliseconds,
            "limit_milliseconds": share * milliseconds,
            "share_of_limit": share,
        }
