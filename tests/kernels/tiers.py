"""The native tiers that run on this machine, for tests that every one of them must pass."""

from quasar.kernels import TIERS
from quasar.kernels.cpu import CpuBackend, probe


def _runs(tier: str) -> bool:
    made = probe(tier, 1)
    return isinstance(made, CpuBackend) and made.isa == tier


TIERS_HERE = [tier for tier in TIERS if _runs(tier)]


def native(tier: str, threads: int) -> CpuBackend:
    made = probe(tier, threads)
    assert isinstance(made, CpuBackend), made
    return made
