"""Share of a pass that is spent outside the native kernels: Python, torch and the binding.

    python benchmarks/dispatch.py MODEL [--rows 6] [--context 128] [--verifier w8a8]

Each native function is wrapped in a timer and a pass is timed as a whole. The timers' own cost
falls on the outside, so the share is an upper bound.
"""

import argparse
import json
import statistics
import time

from quasar.kernels.base import RaggedBatch
from quasar.loading import load_model

NATIVE_CALLS = ("_norm_linear", "_norm_gated", "_linear_add", "_attend")
"""The attributes of CpuBackend that hold the native functions of a pass."""


class Timer:
    """Adds up the seconds spent in the native functions of a backend."""

    def __init__(self, backend):
        self.seconds = 0.0
        for name in NATIVE_CALLS:
            setattr(backend, name, self.timed(getattr(backend, name)))

    def timed(self, function):
        def call(*args):
            start = time.perf_counter()
            function(*args)
            self.seconds += time.perf_counter() - start

        return call


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--rows", type=int, default=6)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--verifier", default="w8a8")
    args = parser.parse_args()
    verifier = load_model(args.model, args.verifier).verifier
    timer = Timer(verifier.backend)
    cache = verifier.new_cache(args.context + args.rows)
    sequence = cache.open(args.context + args.rows)
    context = RaggedBatch.chunk(list(range(100, 100 + args.context)), 0, sequence)
    verifier.verify(context, cache)
    cache.keep(sequence, range(args.context))
    shares, passes = [], []
    for _ in range(100):
        timer.seconds = 0.0
        tokens = list(range(200, 200 + args.rows))
        batch = RaggedBatch.chunk(tokens, sequence.length, sequence)
        start = time.perf_counter()
        verifier.verify(batch, cache)
        seconds = time.perf_counter() - start
        passes.append(seconds)
        shares.append((seconds - timer.seconds) / seconds)
    print(
        json.dumps(
            {
                "rows": args.rows,
                "pass_milliseconds": statistics.median(passes) * 1e3,
                "share_outside_kernels": statistics.median(shares),
            }
        )
    )


main()
