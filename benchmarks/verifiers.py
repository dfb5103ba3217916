"""Times passes of several verifiers in turns; ratios to the first.

    python benchmarks/verifiers.py MODEL+VERIFIER[/HEAD]... [--rows 6] [--context 128]
    python benchmarks/verifiers.py W8A8-FOLDER+w8a8 W4A8-FOLDER+w4a8/w4a8 W4A8-FOLDER+w4a8

In each round every verifier makes one pass that brings its weights back and one that is timed, with
the logits of all rows; who begins rotates. Ratios are taken within a round.
"""

import argparse
import json
import statistics

from quasar.bench.passes import fill
from quasar.bench.samples import text_tokens
from quasar.loading import load_model


def parse(name):
    """MODEL+VERIFIER/HEAD -> model, verifier, head; the model may be a path with both signs."""
    model, _, rest = name.rpartition("+")
    verifier, _, head = rest.partition("/")
    if not model:
        raise SystemExit(f"{name} is not MODEL+VERIFIER or MODEL+VERIFIER/HEAD")
    return model, verifier, head or None


def quartiles(values):
    low, middle, high = statistics.quantiles(values, n=4)
    return {"median": middle, "low": low, "high": high}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("verifiers", nargs="+", metavar="MODEL+VERIFIER[/HEAD]")
    parser.add_argument("--rows", type=int, default=6)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    settings = []
    for name in args.verifiers:
        model, verifier, head = parse(name)
        loaded = load_model(model, verifier, head, args.threads)
        tokens = text_tokens(loaded.tokenizer, args.context)
        settings.append(fill(name, loaded.verifier, tokens, args.rows))
    seconds = [[] for _ in settings]
    bandwidths = []
    for turn in range(args.rounds):
        bandwidths.append(settings[0].verifier.backend.measure_bandwidth())
        for place in range(len(settings)):
            index = (turn + place) % len(settings)
            setting = settings[index]
            batch = setting.batch(tokens[: args.rows])
            setting.time(batch)
            seconds[index].append(setting.time(batch))
    found = [
        {
            "name": setting.name,
            "milliseconds": quartiles([1e3 * x for x in times]),
            "ratio_to_first": quartiles([x / y for x, y in zip(times, seconds[0], strict=True)]),
        }
        for setting, times in zip(settings, seconds, strict=True)
    ]
    bandwidth = quartiles(bandwidths)
    if args.json:
        print(json.dumps({"rows": args.rows, "read_bandwidth_gbps": bandwidth, "verifiers": found}))
        return
    print(f"{args.rows} rows, bandwidth {bandwidth['low']:.0f} to {bandwidth['high']:.0f} GB/s")
    for entry in found:
        time, ratio = entry["milliseconds"], entry["ratio_to_first"]
        print(
            f"{entry['name']}: {time['median']:.2f} ms, {ratio['median']:.3f} of the first "
            f"[{ratio['low']:.3f}, {ratio['high']:.3f}]"
        )


main()
