"""Damaged model files by the thousand: each loads, or is refused with one clear error.

    python tests/fuzz/run.py --cases 100000

Case N of a format depends on its name and N alone, so `--format NAME --first N --cases 1` repeats
it. A fault is whatever is neither: another exception, a crash, a word on standard error, more than
`SECONDS` of processor time, or memory beyond twice the file and `SPARE_BYTES`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import resource
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
from formats import Format, make_formats

from quasar.checkpoints import open_checkpoint
from quasar.errors import CheckpointError, UsageError
from quasar.files import SPARE_BYTES
from quasar.models.families import parse_config
from quasar.models.tensors import check_model
from quasar.text import encoder
from quasar.text.tokenizer import load_tokenizer

os.environ["TOKENIZERS_PARALLELISM"] = "false"
encoder._CPU_SECONDS = 1.0  # hostile tokenizers use all that they may
SECONDS = 5.0
ADDRESS_SPACE = 1 << 30
"""What one case may map on top of what the process has; beyond it allocations fail."""
MESSAGES = [
    {"role": "user", "content": "the cat aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa! \u00e9\U0001f600"}
]


@dataclass(frozen=True)
class Fault:
    format: str
    case: int
    what: str


def load(model: Path, render: bool) -> None:
    """Open, check and read all that a model has, then use its tokenizer and chat template."""
    checkpoint = open_checkpoint(model)
    tokenizer = load_tokenizer(checkpoint)
    check_model(checkpoint, parse_config(checkpoint.config))
    for name in checkpoint.names():
        if name.endswith("_proj.weight"):
            checkpoint.linear(name.removesuffix(".weight"))
        else:
            checkpoint.tensor(name)
    checkpoint.fingerprint()
    ids = tokenizer.encode(MESSAGES[0]["content"], add_special_tokens=True)
    tokenizer.decode(ids)
    if render and tokenizer.has_chat_template:
        tokenizer.chat(MESSAGES)


def peak_memory(restart: bool = False) -> int:
    """The most resident bytes since the last restart."""
    if restart:
        Path("/proc/self/clear_refs").write_text("5")
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024


def judge(form: Format, size: int) -> tuple[str, str]:
    """(`loaded`, `refused` or `fault`; the error's text or what is wrong)."""
    before = peak_memory(restart=True)
    started, written = time.process_time(), os.fstat(2).st_size
    outcome, text = "loaded", ""
    try:
        load(form.model, form.renders)
    except (CheckpointError, UsageError) as error:
        outcome, text = "refused", str(error)
        if not text or "\n" in text or len(text) > 1100:
            return "fault", f"the message is not one clear line: {text[:300]!r}"
    except BaseException:
        return "fault", traceback.format_exc(limit=-4)
    seconds, peak = time.process_time() - started, peak_memory()
    if seconds > SECONDS:
        return "fault", f"{seconds:.1f} s of processor time ({outcome}: {text[:200]})"
    if peak - before > 2 * size + SPARE_BYTES:
        return "fault", f"{(peak - before) >> 20} MiB for a file of {size >> 10} KiB"
    if os.fstat(2).st_size != written:
        return "fault", f"wrote to standard error: {os.pread(2, 300, written)!r}"
    return outcome, text


def run_format(name: str, form: Format, cases: range, faults: list[Fault]) -> Counter[str]:
    """All cases of a format, in forks of this process: one that crashes is a fault like others."""
    outcomes: Counter[str] = Counter()
    case = cases.start
    while case < cases.stop:
        child, reading = fork_cases(name, form, range(case, cases.stop))
        with os.fdopen(reading) as results:
            for line in results:
                outcome, text = json.loads(line)
                outcomes[outcome] += 1
                if outcome == "fault":
                    faults.append(Fault(name, case, text))
                case += 1
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status != 0:
            outcomes["fault"] += 1
            faults.append(Fault(name, case, f"the process ended with {status}"))
            case += 1
    form.restore()
    return outcomes


def fork_cases(name: str, form: Format, cases: range) -> tuple[int, int]:
    """A child, and the pipe where it writes a line [outcome, text] for each case."""
    reading, writing = os.pipe()
    if child := os.fork():
        os.close(writing)
        return child, reading
    try:
        torch.set_num_threads(1)  # a fork has no team of threads, yet would wait for it
        os.close(reading)
        with os.fdopen(writing, "w") as results, limits():
            for case in cases:
                form.damage(random.Random(f"{name} {case}"))
                size = form.file.stat().st_size if form.file.is_file() else 0
                results.write(json.dumps(judge(form, size)) + "\n")
                results.flush()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


@contextmanager
def limits() -> Iterator[None]:
    """Standard error goes to a file, where words can be counted; the address space is bounded."""
    kept, old = os.dup(2), resource.getrlimit(resource.RLIMIT_AS)
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    with tempfile.TemporaryFile() as errors:
        os.dup2(errors.fileno(), 2)
        resource.setrlimit(resource.RLIMIT_AS, (mapped + ADDRESS_SPACE, old[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_AS, old)
            os.dup2(kept, 2)
            os.close(kept)


def fuzz(folder: Path, cases: int, first: int = 0, only: str | None = None) -> tuple[dict, list]:
    """`cases` in all, shared evenly by the formats: outcomes by format, and the faults."""
    formats = {n: f for n, f in make_formats(folder).items() if only in (None, n)}
    for form in formats.values():
        load(form.model, form.renders)
    faults: list[Fault] = []
    outcomes = {}
    shares = sum(form.share for form in formats.values())
    for name, form in formats.items():
        count = math.ceil(cases * form.share / shares)
        outcomes[name] = run_format(name, form, range(first, first + count), faults)
    return outcomes, faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--first", type=int, default=0, help="number of the first case of a format")
    parser.add_argument("--format", help="only this one")
    args = parser.parse_args()
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        outcomes, faults = fuzz(Path(folder), args.cases, args.first, args.format)
    for name, counts in outcomes.items():
        shown = ", ".join(f"{n} {counts[n]}" for n in ("loaded", "refused", "fault"))
        print(f"{name:20} {sum(counts.values()):6} cases: {shown}")
    for fault in faults[:40]:
        print(f"\n{fault.format} {fault.case}: {fault.what}")
    total = sum(sum(counts.values()) for counts in outcomes.values())
    print(f"\n{total} cases, {len(faults)} faults, {time.perf_counter() - started:.0f} s")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
