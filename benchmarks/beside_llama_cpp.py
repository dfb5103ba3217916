"""Our passes beside llama.cpp's, in alternating turns of one run; prints ratios.

    python benchmarks/beside_llama_cpp.py MODEL --peer-python PYTHON --peer-model FILE.gguf
        [--kind pass|prefill] [--rows N] [--verifier w8a8] [--rounds N]

PYTHON is an interpreter that has llama-cpp-python. Each round starts a process for either side, so
neither side's spinning threads disturb the other; the figure is the median of the rounds' ratios.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def milliseconds(command):
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--peer-python", required=True)
    parser.add_argument("--peer-model", required=True)
    parser.add_argument("--kind", choices=("pass", "prefill"), default="pass")
    parser.add_argument("--rows", type=int, default=6)
    parser.add_argument("--verifier", default="w8a8")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
    common = [args.kind, str(args.rows), str(args.threads)]
    peer = [args.peer_python, str(HERE / "llama_cpp_passes.py"), args.peer_model, *common]
    ours = [sys.executable, str(HERE / "our_passes.py"), args.model, *common, args.verifier]
    pairs = [(milliseconds(peer), milliseconds(ours)) for _ in range(args.rounds)]
    ratios = [theirs / mine for theirs, mine in pairs]
    for (theirs, mine), ratio in zip(pairs, ratios, strict=True):
        print(f"llama.cpp {theirs:.2f} ms, {args.verifier} {mine:.2f} ms, ratio {ratio:.2f}")
    result = {"kind": args.kind, "rows": args.rows, "ratio": statistics.median(ratios)}
    print(json.dumps(result | {"low": min(ratios), "high": max(ratios)}))


main()
