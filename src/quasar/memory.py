"""The memory of this process: how much it took at most, and giving back what it has freed."""

from __future__ import annotations

import ctypes
import re
import resource
import sys
from pathlib import Path


def trim_heap() -> None:
    """Return freed memory to the system, where the C library can (glibc).

    Blocks freed by worker threads stay in the heaps of those threads otherwise: quantising
    Qwen2.5-Coder-0.5B took 1.58 GB at its peak without this, 1.07 GB with it.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def resident_memory() -> int:
    """Resident size of this process now, in bytes, mapped file pages included."""
    return _status("VmRSS") or peak_memory()


def _status(name: str) -> int | None:
    """A figure that Linux keeps of this process, in bytes."""
    try:
        found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None


def peak_memory() -> int:
    """Largest resident size of this process so far, in bytes, mapped file pages included."""
    # VmHWM belongs to this program; ru_maxrss survives exec, so it may be the parent's.
    found = _status("VmHWM")
    if found is not None:
        return found
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
