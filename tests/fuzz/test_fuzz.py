"""A few thousand damaged files of each kind, and headers that hypothesis makes up.

`run.py` beside this file takes any number of cases.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import run
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quasar.checkpoints.gguf_file import GgufFile
from quasar.checkpoints.hf import read_header
from quasar.checkpoints.mapping import MappedFile
from quasar.errors import CheckpointError
from quasar.files import SPARE_BYTES, parse_object
from quasar.models.families import parse_config

CASES = 1500


def test_damaged_files_load_or_are_refused(tmp_path: Path) -> None:
    outcomes, faults = run.fuzz(tmp_path, CASES)
    assert not faults, faults[:3]
    assert sum(sum(counts.values()) for counts in outcomes.values()) >= CASES
    for name, counts in outcomes.items():
        assert counts["loaded"] and counts["refused"], name


def raises_key_error(*_: object) -> None:
    raise KeyError("a key")


def takes_memory(*_: object) -> None:
    torch.zeros(SPARE_BYTES + (32 << 20), dtype=torch.uint8).fill_(1)


def takes_more_than_there_is(*_: object) -> None:
    torch.empty(2 * run.ADDRESS_SPACE, dtype=torch.uint8)


def refuses_in_a_long_line(*_: object) -> None:
    class LongError(CheckpointError):
        def __str__(self) -> str:
            return "x" * 2000

    raise LongError


@pytest.mark.parametrize(
    ("load", "found"),
    [
        (raises_key_error, "KeyError: 'a key'"),
        (takes_memory, "MiB for a file of"),
        (takes_more_than_there_is, "memory"),
        (refuses_in_a_long_line, "not one clear line"),
        (lambda *_: sys.stderr.write("a word\n"), "standard error: b'a word"),
        (lambda *_: sys.exit(1), "SystemExit"),
    ],
    ids=["exception", "memory", "address space", "message", "word", "exit"],
)
def test_the_fuzzer_sees_faults(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    load: Callable[..., None],
    found: str,
) -> None:
    form = run.make_formats(tmp_path)["config"]
    monkeypatch.setattr(run, "load", load)
    monkeypatch.setattr(sys, "stderr", sys.__stderr__)
    with run.limits():
        outcome, text = run.judge(form, 1000)
    assert outcome == "fault" and found in text, text


def test_a_crash_is_a_fault_and_the_next_case_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = run.make_formats(tmp_path)["config"]
    monkeypatch.setattr(run, "load", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    faults: list[run.Fault] = []
    outcomes = run.run_format("config", form, range(5, 7), faults)
    assert outcomes == {"fault": 2}
    assert [(fault.case, fault.what) for fault in faults] == [
        (case, "the process ended with -9") for case in (5, 6)
    ]


def test_a_case_can_be_repeated(tmp_path: Path) -> None:
    form = run.make_formats(tmp_path)["safetensors"]
    damaged = []
    for _ in range(2):
        form.damage(run.random.Random("safetensors 7"))
        damaged.append(form.file.read_bytes())
    assert damaged[0] == damaged[1] != form.good


@given(st.binary(max_size=200))
@settings(max_examples=100)
def test_bytes_behind_the_magic_of_gguf(tmp_path_factory: Any, data: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "made-up.gguf"
    for head in (b"GGUF\3\0\0\0", b"GGUF\3\0\0\0" + bytes(8) + b"\1" + bytes(7)):
        path.write_bytes(head + data)
        with pytest.raises(CheckpointError, match=r"made-up\.gguf is truncated or malformed"):
            GgufFile(path)


numbers = st.integers() | st.sampled_from([0, 1, 4, 8, 2**40, 2**63, 2**64])
json_values = st.recursive(
    st.none() | st.booleans() | numbers | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=12,
)
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "I8", "F8_E4M3"]) | json_values,
        "shape": st.lists(numbers, max_size=4) | json_values,
        "data_offsets": st.lists(numbers, min_size=2, max_size=2) | json_values,
    }
)


@given(st.dictionaries(st.text(max_size=9), entries | json_values, max_size=4), st.binary())
@settings(max_examples=100)
def test_headers_of_safetensors(tmp_path_factory: Any, header: Any, data: bytes) -> None:
    """Whatever is accepted tiles the file."""
    path = tmp_path_factory.getbasetemp() / "made-up.safetensors"
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    try:
        found = read_header(MappedFile(path))
    except CheckpointError as error:
        assert "made-up.safetensors" in str(error)
    else:
        assert sum(entry.read().nbytes for entry in found.values()) == len(data)


sizes = st.fixed_dictionaries(
    {
        "model_type": st.sampled_from(["llama", "qwen2"]),
        **dict.fromkeys(("hidden_size", "intermediate_size", "vocab_size"), numbers),
        **dict.fromkeys(("num_hidden_layers", "num_attention_heads"), numbers),
        "max_position_embeddings": numbers,
    },
    optional=dict.fromkeys(
        ("head_dim", "rope_theta", "rms_norm_eps", "rope_scaling", "num_key_value_heads"),
        json_values,
    ),
)


@given(sizes | st.dictionaries(st.text(max_size=20), json_values))
@settings(max_examples=100)
def test_configs(config: Any) -> None:
    try:
        parsed = parse_config(parse_object(json.dumps(config).encode(), "config.json"))
    except CheckpointError as error:
        assert str(error)
    else:
        assert parsed.heads * parsed.head_dim > 0 and parsed.heads % parsed.kv_heads == 0
