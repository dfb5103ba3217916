"""Times one of our passes in a process of its own: the counterpart of llama_cpp_passes.py.

our_passes.py MODEL pass|prefill ROWS THREADS VERIFIER
"""

import json
import statistics
import sys
import time

import torch

from quasar.kernels.base import RaggedBatch
from quasar.loading import load_model

CONTEXT = 128


def main():
    model, kind, rows, threads, precision = sys.argv[1:]
    verifier = load_model(model, precision, threads=int(threads)).verifier
    cache = verifier.new_cache(1024)
    sequence = cache.open(1024)

    def run(tokens, keep, last_only):
        batch = RaggedBatch.chunk(tokens, sequence.length, sequence)
        wanted = torch.tensor([len(tokens) - 1]) if last_only else None
        start = time.perf_counter()
        verifier.verify(batch, cache, wanted)
        seconds = time.perf_counter() - start
        cache.keep(sequence, range(keep))
        return seconds * 1e3

    count = int(rows)
    if kind == "prefill":
        tokens = [100 + i for i in range(count)]
        print(json.dumps(min(run(tokens, 0, True) for _ in range(3))))
        return
    run(list(range(100, 100 + CONTEXT)), CONTEXT, True)
    times = [run(list(range(200, 200 + count)), 0, False) for _ in range(15)]
    print(json.dumps(statistics.median(times)))


main()
