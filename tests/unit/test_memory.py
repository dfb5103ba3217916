"""What the report says about memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quasar.memory import peak_memory, trim_heap


def test_the_peak_keeps_what_was_freed():
    before = peak_memory()
    size = before + (64 << 20)
    block = torch.ones(size, dtype=torch.uint8)
    del block
    trim_heap()
    assert peak_memory() >= size


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_the_peak_is_that_of_the_kernel():
    lines = Path("/proc/self/status").read_text().splitlines()
    found = next(line for line in lines if line.startswith("VmHWM"))
    assert abs(peak_memory() / 1024 - int(found.split()[1])) < 20_000
