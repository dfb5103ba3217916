"""Time of a pass over a tree of drafts, over that of a chain with as many nodes.

    python benchmarks/trees.py MODEL [--verifier w8a8] [--nodes 8 64] [--contexts 128 2048]

A pass has the last accepted token and the nodes, all with logits; packing the batch is part of it.
Chain and trees take turns and who begins rotates; the ratio is taken within a round.
"""

import argparse
import json
import random
import statistics
import time

from quasar.bench.samples import text_tokens
from quasar.engine.batch import pack
from quasar.engine.engine import Engine
from quasar.loading import load_model
from quasar.types import Draft, SamplingParams


def shapes(nodes):
    """Drafts of one size: a chain, a binary tree, a star and a random tree."""
    tokens, generator = tuple(range(100, 100 + nodes)), random.Random(nodes)
    return {
        "chain": Draft.chain(tokens),
        "binary": Draft(tokens, tuple((node - 2) // 2 for node in range(nodes))),
        "star": Draft(tokens, (-1,) * nodes),
        "random": Draft(tokens, tuple(generator.randrange(-1, node) for node in range(nodes))),
    }


def milliseconds(engine, sequence, draft):
    """One pass that verifies a draft; nothing is kept, so the next overwrites it."""
    sequence.draft = draft
    start = time.perf_counter()
    work = pack([(sequence, 1)])
    engine.verifier.verify(work.batch, engine.cache, work.logit_rows)
    return 1e3 * (time.perf_counter() - start)


def compare(engine, sequence, nodes, rounds):
    """Median pass times, and ratios to the chain with their quartiles."""
    drafts = shapes(nodes)
    names, times = list(drafts), []
    for turn in range(rounds + 2):
        first = turn % len(names)
        order = names[first:] + names[:first]
        times.append({name: milliseconds(engine, sequence, drafts[name]) for name in order})
    times = times[2:]
    found = {}
    for name in names:
        ratios = [time_[name] / time_["chain"] for time_ in times]
        low, median, high = statistics.quantiles(ratios, n=4)
        found[name] = {
            "milliseconds": statistics.median(time_[name] for time_ in times),
            "ratio_to_chain": {"median": median, "low": low, "high": high},
        }
    return found


def prepared(loaded, text, context):
    """An engine and a sequence that has `context` tokens in the cache and decodes."""
    engine = Engine(loaded.verifier, loaded.tokenizer, "none", cache_tokens=context + 256)
    params = SamplingParams(max_tokens=200, ignore_eos=True)
    sequence = engine.submit(text[:context], params)
    while sequence.prefilling:
        engine.step()
    return engine, sequence


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--verifier", default="w8a8")
    parser.add_argument("--nodes", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--contexts", type=int, nargs="+", default=[128, 2048])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    loaded = load_model(args.model, args.verifier, threads=args.threads)
    text = text_tokens(loaded.tokenizer, max(args.contexts))
    results = []
    for context in args.contexts:
        engine, sequence = prepared(loaded, text, context)
        for nodes in args.nodes:
            found = compare(engine, sequence, nodes, args.rounds)
            results.append({"context": context, "nodes": nodes, "shapes": found})
            for name, figures in [] if args.json else found.items():
                ratio = figures["ratio_to_chain"]
                print(
                    f"context {context:5}, {nodes:2} nodes, {name:6}: "
                    f"{figures['milliseconds']:7.2f} ms, {ratio['median']:.3f} times the chain, "
                    f"quartiles [{ratio['low']:.3f}, {ratio['high']:.3f}]"
                )
    if args.json:
        print(json.dumps({"model": args.model, "verifier": args.verifier, "passes": results}))


main()
