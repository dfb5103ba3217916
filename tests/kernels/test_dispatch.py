"""Which backend is chosen, what QUASAR_ISA does to it, and what is said about it."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from tiers import TIERS_HERE, native

from quasar.errors import UsageError
from quasar.kernels import TIERS, cpu, select
from quasar.kernels.arena import Arena, huge_bytes
from quasar.kernels.base import DenseWeight, Int8Weight

# What a tier needs beyond the one below it, in the words of /proc/cpuinfo.
FLAGS = {
    "scalar": set(),
    "avx2": {"avx2", "fma"},
    "avx512vnni": {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni"},
    "avx512": {"avx512_bf16"},
}
ROOT = Path(__file__).parents[2]

native_module = pytest.mark.skipif(cpu._native is None, reason="the native module is not built")


def cpu_flags() -> set[str]:
    info = Path("/proc/cpuinfo")
    if not info.exists():
        pytest.skip("no /proc/cpuinfo")
    lines = [line for line in info.read_text().splitlines() if line.startswith("flags")]
    return set(lines[0].split()) if lines else set()


def test_unknown_tier_is_a_usage_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUASAR_ISA", "avx1024")
    with pytest.raises(UsageError, match=r"avx1024.*scalar, avx2, avx512vnni, avx512"):
        select(1)


def test_reference_cap_declines_the_native_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUASAR_ISA", "reference")
    backend, declined = select(2)
    assert backend.isa == "reference" and backend.threads == 2
    assert "QUASAR_ISA=reference" in declined["cpu"] or "not built" in declined["cpu"]


def test_missing_module_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_native", None)
    monkeypatch.setattr(cpu, "_absence", "the native module is not built (test)", raising=False)
    backend, declined = select(1)
    assert backend.name == "reference"
    assert declined == {"cpu": "the native module is not built (test)"}


@native_module
def test_the_best_tier_is_chosen_and_a_cap_lowers_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QUASAR_ISA", raising=False)
    best = "scalar"
    if platform.machine() in ("x86_64", "AMD64"):
        flags = cpu_flags()
        for tier, needed in FLAGS.items():
            if not needed <= flags:
                break
            best = tier
    for cap in TIERS[1:]:
        expected = min(cap, best, key=TIERS.index)
        monkeypatch.setenv("QUASAR_ISA", cap)
        backend, declined = select(2)
        assert (backend.name, backend.isa, declined) == ("cpu", expected, {})


def symbols(*arguments: object) -> set[str]:
    nm = shutil.which("nm")
    if nm is None:
        pytest.skip("nm is not installed")
    listed = subprocess.run([nm, *map(str, arguments)], capture_output=True, text=True, check=True)
    return {line.split()[-1] for line in listed.stdout.splitlines()}


def test_a_tier_gives_the_linker_its_table_only() -> None:
    """A weak function of a tier might replace another file's and run where it must not."""
    objects = sorted(ROOT.glob("build/**/tier_*.cpp.o"))
    if not objects:
        pytest.skip("no build folder with the tiers' object files")
    for file in objects:
        tier = file.name.removeprefix("tier_").removesuffix(".cpp.o")
        assert symbols("--extern-only", "--defined-only", file) == {f"quasar_tier_{tier}"}, file


@native_module
def test_the_module_exports_nothing_of_a_tier() -> None:
    exported = symbols("-D", "--defined-only", cpu._native.__file__)
    assert "PyInit__native" in exported
    assert not [name for name in exported if re.search("quasar|tier", name)]


@pytest.mark.skipif(not TIERS_HERE, reason="no native tier runs here")
def test_weights_that_do_not_fit_are_refused() -> None:
    backend = native(TIERS_HERE[0], 1)
    codes, scale = torch.ones(4, 8, dtype=torch.int8), torch.ones(4)
    bad = {
        "scale must be": Int8Weight(codes, torch.ones(5)),
        "bias must be": Int8Weight(codes, scale, torch.ones(4, dtype=torch.float64)),
        "weight must be": DenseWeight(torch.ones(4, 8)),
        "be contiguous": DenseWeight(torch.ones(8, 4, dtype=torch.bfloat16).t()),
        "must be a matrix": DenseWeight(torch.ones(8, dtype=torch.bfloat16)),
    }
    for message, weight in bad.items():
        with pytest.raises(ValueError, match=message):
            backend.pack(weight)
    with pytest.raises(ValueError, match="share precision, shape"):
        backend.pack_gated(Int8Weight(codes, scale), Int8Weight(codes[:3], scale[:3]))


def test_huge_memory_is_aligned_zero_and_kept_alive() -> None:
    tensor = huge_bytes(3 << 20)
    assert tensor.data_ptr() % (2 << 20) == 0 and tensor.numel() == 3 << 20
    assert int(tensor.sum()) == 0
    tail = tensor[-5:]
    tail.fill_(7)
    del tensor
    assert tail.tolist() == [7] * 5


def test_arena_slices_are_aligned_and_disjoint() -> None:
    arena = Arena(chunk_bytes=1 << 12)
    sizes = (1, 64, 65, 4000, 10000, 3)
    slices = [arena.empty(size) for size in sizes]
    for value, piece in enumerate(slices):
        piece.fill_(value)
    for value, (piece, size) in enumerate(zip(slices, sizes, strict=True)):
        assert piece.data_ptr() % 64 == 0 and piece.numel() == size
        assert bool((piece == value).all())
