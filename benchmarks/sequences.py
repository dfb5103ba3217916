"""Tokens a second of several sequences in one pass, over those of one sequence.

    python benchmarks/sequences.py MODEL [--verifier w8a8] [--drafter none] [--sequences 1 2 4 8]

Each round decodes with every number of sequences, who begins rotates. The clock runs while all of
them decode: prompts are cached before, and no sequence ends. The ratio is taken within a round.
"""

import argparse
import json
import statistics
import time

from quasar.bench.samples import text_tokens
from quasar.engine.engine import Engine
from quasar.loading import load_model
from quasar.types import SamplingParams

PROMPT_TOKENS = 64


class Outside:
    """Seconds spent in `Verifier.verify`, so that the rest of a step is known."""

    def __init__(self, verifier):
        self.seconds, self._verify = 0.0, verifier.verify
        verifier.verify = self.timed

    def timed(self, *args):
        start = time.perf_counter()
        found = self._verify(*args)
        self.seconds += time.perf_counter() - start
        return found


def decode(engine, prompts, tokens, verifying):
    """Tokens a second and steps, all prompts decoding side by side; share outside the verifier."""
    params = SamplingParams(max_tokens=10 * tokens, ignore_eos=True)
    requests = [engine.submit(prompt, params) for prompt in prompts]
    while any(request.prefilling for request in requests):
        engine.step()
    verifying.seconds, emitted, steps = 0.0, 0, 0
    start = time.perf_counter()
    while emitted < tokens * len(requests):
        emitted += sum(len(progress.tokens) for progress in engine.step())
        steps += 1
    seconds = time.perf_counter() - start
    for request in requests:
        engine.cancel(request.request_id)
    return {
        "tokens_per_second": emitted / seconds,
        "step_milliseconds": 1e3 * seconds / steps,
        "share_outside_verifier": 1 - verifying.seconds / seconds,
    }


def summary(rounds):
    """Median and range of each figure over the rounds."""
    return {
        name: {"median": statistics.median(values), "low": min(values), "high": max(values)}
        for name in rounds[0]
        for values in [[round_[name] for round_ in rounds]]
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--verifier", default="w8a8")
    parser.add_argument("--drafter", default="none")
    parser.add_argument("--draft-tokens", type=int, default=5)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--tokens", type=int, default=32, help="a sequence and round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    loaded = load_model(args.model, args.verifier, threads=args.threads)
    counts = sorted({1, *args.sequences})
    slots = max(counts) * (PROMPT_TOKENS + 10 * args.tokens + loaded.verifier.backend.block_size)
    engine = Engine(loaded.verifier, loaded.tokenizer, args.drafter, args.draft_tokens, slots)
    text = text_tokens(loaded.tokenizer, PROMPT_TOKENS * max(counts))
    prompts = [text[i : i + PROMPT_TOKENS] for i in range(0, len(text), PROMPT_TOKENS)]
    verifying = Outside(loaded.verifier)
    found = {count: [] for count in counts}
    for turn in range(args.rounds + 1):
        first = turn % len(counts)
        figures = {
            count: decode(engine, prompts[:count], args.tokens, verifying)
            for count in counts[first:] + counts[:first]
        }
        for count in counts if turn else []:  # the first round warms up
            rate = figures[count]["tokens_per_second"] / figures[1]["tokens_per_second"]
            found[count].append(figures[count] | {"ratio_to_one": rate})
    result = {count: summary(rounds) for count, rounds in found.items()}
    if args.json:
        print(json.dumps({"model": args.model, "drafter": args.drafter, "sequences": result}))
        return
    for count, figures in result.items():
        ratio = figures["ratio_to_one"]
        print(
            f"{count:2} sequences: {figures['tokens_per_second']['median']:7.1f} tokens/s, "
            f"{ratio['median']:.2f} times one [{ratio['low']:.2f}, {ratio['high']:.2f}], "
            f"step {figures['step_milliseconds']['median']:.2f} ms, "
            f"{figures['share_outside_verifier']['median']:.1%} of it outside the verifier"
        )


main()
