"""Matrix products of two precisions by turns, with random weights from memory: ratios of one run.

products.py [--tier avx512] [--threads 2] [--rounds 25] [--rows 1,2,4,6,8,16] [--group-size 32]

The linears of a few layers of Qwen2.5-0.5B, and its head. With one thread CPU time is taken, which
other processes disturb less.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable

import torch

from quasar.kernels import TIERS
from quasar.kernels.base import Buffer, Int4Weight, Int8Weight, LinearWeight, PackedLinear
from quasar.kernels.cpu import CpuBackend, probe

HIDDEN, INNER, QKV, VOCABULARY = 896, 4864, 1152, 151936
LAYERS, EPS = 8, 1e-5


def int8_weight(rows: int, columns: int) -> LinearWeight:
    codes = torch.randint(-127, 128, (rows, columns), dtype=torch.int8)
    return Int8Weight(codes, torch.rand(rows) * 1e-3)


def int4_weight(rows: int, columns: int, group_size: int) -> LinearWeight:
    groups = (rows, columns // group_size)
    codes = torch.randint(0, 16, (rows, columns), dtype=torch.uint8)
    scale = torch.randint(16, 32, groups) * 2.0**-14
    return Int4Weight(codes, scale, torch.randint(6, 10, groups, dtype=torch.uint8))


class Model:
    """Linears of one precision, and what they write to."""

    def __init__(self, backend: CpuBackend, make: Callable[[int, int], LinearWeight], rows: int):
        self.backend = backend
        self.layers = [self._layer(make) for _ in range(LAYERS)]
        self.head_linear = backend.pack(make(VOCABULARY, HIDDEN))
        self.norm = Buffer.of(torch.ones(1, HIDDEN))
        self.x, self.attention = (Buffer.of(torch.randn(rows, HIDDEN)) for _ in range(2))
        self.qkv, self.inner = Buffer.empty(rows, QKV), Buffer.empty(rows, INNER)
        self.logits = Buffer.empty(rows, VOCABULARY)

    def _layer(self, make: Callable[[int, int], LinearWeight]) -> tuple[PackedLinear, ...]:
        pack = self.backend.pack
        gated = self.backend.pack_gated(make(INNER, HIDDEN), make(INNER, HIDDEN))
        return pack(make(QKV, HIDDEN)), pack(make(HIDDEN, HIDDEN)), gated, pack(make(HIDDEN, INNER))

    def linears(self, rows: int) -> None:
        backend = self.backend
        self.x.tensor.normal_()
        for qkv, o, gate_up, down in self.layers:
            backend.norm_linear(rows, self.x, self.norm, EPS, qkv, self.qkv)
            backend.linear_add(rows, self.attention, o, self.x)
            backend.norm_gated(rows, self.x, self.norm, EPS, gate_up, self.inner)
            backend.linear_add(rows, self.inner, down, self.x)

    def head(self, rows: int) -> None:
        self.backend.norm_linear(rows, self.x, self.norm, EPS, self.head_linear, self.logits)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tier", default=TIERS[-1])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--rows", default="1,2,4,6,8,16")
    parser.add_argument("--group-size", type=int, default=32)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    backend = probe(args.tier, args.threads)
    assert isinstance(backend, CpuBackend), backend
    torch.set_num_threads(1)
    counts = [int(count) for count in args.rows.split(",")]
    w8a8 = Model(backend, int8_weight, max(counts))
    w4a8 = Model(backend, lambda n, k: int4_weight(n, k, args.group_size), max(counts))
    clock = time.thread_time if args.threads == 1 else time.perf_counter
    seconds: dict[tuple[str, int, str], list[float]] = defaultdict(list)
    for _ in range(args.rounds):
        for rows in counts:
            for part in ("linears", "head"):
                for name, model in (("w8a8", w8a8), ("w4a8", w4a8)):
                    start = clock()
                    getattr(model, part)(rows)
                    seconds[part, rows, name].append(clock() - start)
    print("part     rows   w8a8 ms   w4a8 ms   ratio (medians)")
    for part in ("linears", "head"):
        for rows in counts:
            wide, narrow = seconds[part, rows, "w8a8"], seconds[part, rows, "w4a8"]
            ratio = statistics.median(b / a for a, b in zip(wide, narrow, strict=True))
            times = (1e3 * statistics.median(found) for found in (wide, narrow))
            print(f"{part:8} {rows:4} " + "".join(f"{ms:10.2f}" for ms in times) + f"{ratio:8.3f}")


if __name__ == "__main__":
    main()
