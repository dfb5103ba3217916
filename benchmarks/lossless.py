"""Random company for a real model: how often do tokens or bits differ from a solo plain run?

    python benchmarks/lossless.py MODEL [--verifiers w8a8] [--minutes 5] [--seed 0] [--json]

A case is 1 to 8 requests that join and leave at random steps of one engine, each with a prompt,
temperature and drafter of its own (none, n-gram, random chains and trees, trees that hide the
truth, liars; up to 64 nodes), under random limits of rows, chunks and sequences. Each answer is
compared with a solo, plain, unchunked run: its tokens, and the logits that decided them, bit by
bit. Exit code 1 if any differs.
"""

import argparse
import json
import random
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from adversaries import DRAFTERS, Request, Service
from quasar.bench.samples import text_tokens
from quasar.engine.scheduler import Limits
from quasar.loading import Model, make_backend
from quasar.types import MAX_DRAFT_NODES, SamplingParams

CHUNKS = (1, 2, 7, 32, 64, 512)
LENGTHS = (1, 2, 9, 31, 64, 65, 130, 300)
TOKENS = (24, 80)
"""A draft is cut to what may still be emitted: 64 nodes need long answers."""


def random_case(draw, prompts):
    """Limits and the requests of one case."""
    chunk = draw.choice(CHUNKS)
    limits = Limits(
        rows=draw.choice((MAX_DRAFT_NODES + 2, 128, 512)),
        prompt_rows=chunk,
        shared_prompt_rows=min(chunk, draw.choice(CHUNKS)),
        sequences=draw.randint(1, 8),
    )
    requests = [
        Request(
            draw.choice(prompts),
            SamplingParams(
                max_tokens=draw.choice(TOKENS),
                temperature=draw.choice((0.0, 0.8)),
                seed=draw.randrange(2),
                ignore_eos=True,
            ),
            draw.choice(DRAFTERS),
            draw.choice((1, 5, 8, 20, MAX_DRAFT_NODES)),
            joins=draw.randrange(20),
            leaves=draw.choice((None, None, None, draw.randrange(60))),
            seed=draw.randrange(1000),
        )
        for _ in range(draw.randint(1, 8))
    ]
    return limits, requests


def kind(verifier, request):
    return f"{verifier} {request.params.temperature} {request.drafter}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--verifiers", default="w8a8", help="comma-separated")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    model, backend = Model.open(args.model), make_backend(args.threads)
    services = {name: Service(model.load(name, backend)) for name in args.verifiers.split(",")}
    text = text_tokens(model.tokenizer, sum(LENGTHS))
    prompts = [tuple(text[sum(LENGTHS[:i]) : sum(LENGTHS[: i + 1])]) for i in range(len(LENGTHS))]
    draw, end = random.Random(args.seed), time.monotonic() + 60 * args.minutes
    counts, requests_by, wrong_by = Counter(), Counter(), Counter()
    while time.monotonic() < end:
        name = draw.choice(list(services))
        limits, requests = random_case(draw, prompts)
        slots = draw.choice((400, 1000, 3000))
        wrong = services[name].mismatches(limits, slots, requests)
        counts.update(cases=1, requests=len(requests), mismatches=len(wrong))
        requests_by.update(kind(name, request) for request in requests)
        wrong_by.update(kind(name, request) for request in wrong)
        for request in wrong:
            print(f"differs: {name} {limits} {request}", file=sys.stderr)
    report = {
        "model": args.model,
        "isa": backend.isa,
        "seed": args.seed,
        **{key: counts[key] for key in ("cases", "requests", "mismatches")},
        "requests_by_kind": dict(sorted(requests_by.items())),
        "mismatches_by_kind": dict(wrong_by),
    }
    if args.json:
        print(json.dumps(report))
    else:
        for found, count in sorted(requests_by.items()):
            print(f"{found:28} {count:5} requests, {wrong_by[found]} differ")
        print("{cases} cases, {requests} requests, {mismatches} differ".format(**counts))
    return 1 if counts["mismatches"] else 0


sys.exit(main())
