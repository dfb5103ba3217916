"""The limit of a pass, and that timing passes leaves the cache as it was."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import tiny
from quasar.bench import passes
from quasar.bench.passes import Timing, fill, fitting, measure, pass_work, run_peaks
from quasar.checkpoints import open_checkpoint
from quasar.errors import UsageError
from quasar.kernels.base import Peaks
from quasar.kernels.reference import ReferenceBackend
from quasar.verification.verifier import load_verifier

PEAKS = Peaks(read_bandwidth_gbps=40.0, int8_gmacs=600.0, bf16_gmacs=300.0)


@pytest.fixture(autouse=True)
def one_thread():
    """Rows this small are slower with more."""
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def verifier(tmp_path_factory):
    folder = tiny.write_quantized(tmp_path_factory.mktemp("m"), "llama")
    return load_verifier(open_checkpoint(folder), "w8a8", "bf16", ReferenceBackend())


def test_work_of_a_pass_is_counted(verifier):
    """hidden 48, inner 80, 4 heads of 12 with 2 for K and V, 2 layers, 97 tokens of vocabulary."""
    layer = (48 + 2 * 24) * 48 + 48 * 48 + 2 * 80 * 48 + 48 * 80
    head = 97 * 48
    work = pass_work(verifier, rows=3, context=10)
    attention = 2 * 48 * 2 * (11 + 12 + 13)
    assert work.multiply_adds == {"w8a8": 3 * 2 * layer, "bf16": 3 * head + attention}
    cache = 10 * 2 * 2 * 24 * 2
    assert work.read_bytes == 2 * layer + 2 * head + cache


def test_limit_is_the_larger_of_reading_and_multiplying():
    reading = passes.Work(40 * 10**9, {"w8a8": 10**9, "bf16": 0})
    assert reading.limit(PEAKS) == pytest.approx(1.0)
    four_bits = passes.Work(10, {"w4a8": 300 * 10**9})
    assert four_bits.limit(PEAKS) == passes.Work(10, {"w8a8": 300 * 10**9}).limit(PEAKS)
    multiplying = passes.Work(10, {"w8a8": 300 * 10**9, "bf16": 300 * 10**9})
    assert multiplying.limit(PEAKS) == pytest.approx(1.5)


def test_measured_passes_leave_the_context_as_it_was(verifier):
    setting = fill("w8a8", verifier, list(range(20)), 8)
    before = [layer.tensor.clone() for layer in setting.cache.layers]
    assert setting.time(setting.batch([5, 6, 7])) > 0
    assert setting.sequence.length == 20
    block = verifier.backend.block_size
    assert block == 32
    for layer, kept in zip(setting.cache.layers, before, strict=True):
        slots = layer.tensor.view(-1, 2, 2, block, 12)[:, :, :, :20]
        assert torch.equal(slots, kept.view(-1, 2, 2, block, 12)[:, :, :, :20])


def test_every_setting_is_reported(verifier, monkeypatch):
    monkeypatch.setattr(passes, "ROWS", (1, 3))
    monkeypatch.setattr(passes, "PEAK_SECONDS", 0.001)
    seen = []
    found = measure(
        {"w8a8": verifier}, list(range(90)), 2, (16, 64), lambda *step: seen.append(step)
    )
    assert [(e["verifier"], e["context"], e["rows"]) for e in found.passes] == [
        ("w8a8", context, rows) for context in (16, 64) for rows in (1, 3)
    ]
    for entry in found.passes:
        share = entry["limit_milliseconds"] / entry["milliseconds"]
        assert entry["share_of_limit"] == pytest.approx(share) and share > 0
    (prefill,) = found.prefill
    assert prefill["tokens"] == 90 and prefill["tokens_per_second"] > 0
    assert found.peaks.read_bandwidth_gbps > 0
    assert seen[-1][0] == seen[-1][1]


def test_contexts_that_the_model_cannot_hold_are_cut(verifier):
    assert verifier.config.context_length == 512
    assert fitting(verifier, (128, 2048)) == [128, 480]
    assert fitting(verifier, (2048, 4096)) == [480]


def test_a_context_too_short_to_time_is_refused(tmp_path):
    folder = tiny.write_folder(tmp_path, "llama", max_position_embeddings=32)
    short = load_verifier(open_checkpoint(folder), "bf16", "bf16", ReferenceBackend())
    with pytest.raises(UsageError, match="too short"):
        fitting(short, (128,))


def test_a_pass_is_judged_by_the_bandwidth_beside_it(verifier):
    """Twice the bandwidth and half the time is the same share; medians, not extremes, count."""
    setting = fill("w8a8", verifier, list(range(16)), 2)
    limit = pass_work(verifier, 1, 16).limit(PEAKS)
    fast = replace(PEAKS, read_bandwidth_gbps=80.0)
    assert pass_work(verifier, 1, 16).limit(fast) < limit
    setting.passes[1] = [Timing(limit / 0.8, 40.0), Timing(limit / 0.8, 40.0), Timing(1.0, 40.0)]
    (entry,) = passes._pass_entries(setting, PEAKS)
    assert entry["share_of_limit"] == pytest.approx(0.8)
    assert entry["milliseconds"] == pytest.approx(limit / 0.8 * 1e3)
    found = run_peaks([Peaks(1, 5, 2), Peaks(3, 4, 1)], [setting])
    assert found == Peaks(40.0, 5, 2)
