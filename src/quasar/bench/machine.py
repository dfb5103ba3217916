"""Facts about this machine and this process that a measurement must be read with."""

from __future__ import annotations

import platform
import re
from importlib import metadata
from pathlib import Path

from quasar import __version__

OPENMP = re.compile(r"/(lib(?:[gi]?omp|iomp5)\b[^/]*\.so[^/]*)$")
PACKAGES = ("torch", "numpy", "tokenizers", "gguf")


def openmp_runtimes() -> list[str]:
    """Paths of the OpenMP libraries mapped into this process; two of them fight over the cores."""
    paths = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    return sorted(path for path in paths if OPENMP.search(path))


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def memory_bytes() -> int:
    """Installed memory."""
    found = re.search(r"^MemTotal:\s*(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def versions() -> dict[str, str]:
    """Of Quasar, Python and the packages that compute."""
    installed = {distribution: metadata.version(distribution) for distribution in PACKAGES}
    return {"quasar": __version__, "python": platform.python_version(), **installed}
