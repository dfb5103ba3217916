"""Fixtures shared by all tests: backends that run here, tiny models, the data folder."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import hypothesis
import pytest

sys.path.insert(0, str(Path(__file__).parent))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from quasar.kernels import TIERS, base, cpu, reference

# A shell that starts the tests in the background has interrupts ignored, children inherit it.
signal.signal(signal.SIGINT, signal.default_int_handler)
# A busy machine may stop any example for a while: time is no property of the code.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")
# Rows are computed one by one in the reference: teams of threads would only wait for each other.
torch.set_num_threads(1)


def runnable_backends() -> dict[str, base.Backend]:
    """One backend per tier that runs on this machine."""
    found: dict[str, base.Backend] = {"reference": reference.probe("reference", 1)}
    for tier in TIERS[1:]:
        made = cpu.probe(tier, 2)
        if not isinstance(made, str) and made.isa == tier:
            found[tier] = made
    return found


BACKENDS = runnable_backends()


@pytest.fixture(params=sorted(BACKENDS))
def backend(request: pytest.FixtureRequest) -> base.Backend:
    return BACKENDS[request.param]


@pytest.fixture
def shared_data() -> Path:
    folder = Path(__file__).parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("the shared data folder is absent")
    return folder
