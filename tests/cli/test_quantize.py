"""`quasar quantize`: the report it prints, the folder it writes, what it refuses."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest

import tiny
from byte_tokenizer import VOCABULARY, write_tokenizer
from quasar.quantization import calibrate


@pytest.fixture(autouse=True)
def short_texts(monkeypatch):
    monkeypatch.setattr(calibrate, "CALIBRATION_TOKENS", 600)
    monkeypatch.setattr(calibrate, "MOMENT_TOKENS", 900)
    monkeypatch.setattr(calibrate, "HELD_OUT_TOKENS", 200)


def test_a_quantised_folder_generates(quasar, model, tmp_path):
    result = quasar("quantize", model, tmp_path / "out", "--smooth", "none")
    assert result.code == 0
    for word in ("round-to-nearest", "bf16", "perplexity", "peak memory", "w8a8", "mlp.down_proj"):
        assert word in result.out
    assert "layers" in result.err and "measuring" in result.err
    answer = quasar("generate", tmp_path / "out", "-p", "hello", "--max-tokens", 3)
    assert answer.code == 0


def test_the_report_says_what_was_kept(quasar, model, tmp_path):
    """Random weights have no outliers to smooth, so either outcome is right, if it is told."""
    result = quasar("quantize", model, tmp_path / "out")
    report = json.loads((tmp_path / "out" / "quantization_report.json").read_text())
    smooth = report["summary"]["smooth"]
    assert result.code == 0 and f"smoothing: {smooth}" in result.out
    assert ("kept instead" in result.err) == (smooth == "none")
    assert report["summary"]["kl"] <= report["summary"]["kl_rtn"]


def test_own_calibration_text(quasar, model, tmp_path):
    file = tmp_path / "mine.txt"
    file.write_text("The quick brown fox is not so quick after all.\n" * 200)
    result = quasar("quantize", model, tmp_path / "out", "--calib", file)
    report = json.loads((tmp_path / "out" / "quantization_report.json").read_text())
    assert result.code == 0 and report["text"]["name"] == "mine.txt"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--smooth", "awq"), ("--smooth awq", "not available in this version")),
        (("--weights", "awq"), ("--weights awq", "not available in this version")),
        (("--group-size", "64"), ("--group-size", "w8a8")),
        (("--scheme", "w4a8"), ("--scheme w4a8: groups of 32", "48 inputs of self_attn.q_proj")),
        (("--scheme", "int3"), ("--scheme int3",)),
        (("--head", "w8a8"), ("--head w8a8", "generate or evaluate")),
        (("--calib", "absent.txt"), ("--calib absent.txt", "No such file")),
        (("--shard-size", "4 feet"), ("--shard-size", "'4 feet'", "4GiB")),
        (("--shard-size", "0"), ("--shard-size", "'0'")),
    ],
)
def test_refusals_come_first_and_in_one_line(quasar, model, tmp_path, arguments, words):
    result = quasar("quantize", model, tmp_path / "out", *arguments)
    assert result.code == 2 and result.out == ""
    assert result.err.startswith("quasar: error: ") and result.err.count("\n") == 1
    for word in words:
        assert word in result.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dry", [(), ("--dry-run",)])
@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"", "empty"),
        (b" \n\t\n", "empty"),
        (b"ab\0cd" * 500, "binary"),
        (b"\x89PNG\r\n" * 500, "not UTF-8 text"),
        (b"too short to learn from", "too short: a part has"),
    ],
)
def test_calibration_files_that_cannot_serve(quasar, model, tmp_path, content, named, dry):
    file = tmp_path / "mine.txt"
    file.write_bytes(content)
    result = quasar("quantize", model, tmp_path / "out", "--calib", file, *dry)
    assert result.code == 2 and f"--calib {file}" in result.error and named in result.error
    assert list(tmp_path.iterdir()) == [file]


@pytest.fixture(scope="module")
def grouped(tmp_path_factory):
    """A model of whole groups of 32."""
    folder = tmp_path_factory.mktemp("m") / "grouped"
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    tiny.write_folder(folder, "llama", vocab_size=VOCABULARY, **sizes)
    write_tokenizer(folder)
    return folder


def test_a_w4a8_folder_in_shards(quasar, grouped, tmp_path):
    """What is written is what info reads; each verifier but its own is refused by name."""
    out = tmp_path / "out"
    options = ("--scheme", "w4a8", "--shard-size", "20kB", "--smooth", "none", "--weights", "rtn")
    report = quasar("quantize", grouped, out, *options, "--json").json
    assert report["summary"]["scheme"] == "w4a8" and report["summary"]["group_size"] == 32
    assert report["head"] == "bf16"
    assert len(list(out.glob("model-*-of-*.safetensors"))) > 2
    found = quasar("info", out, "--json").json["quantization"]
    assert (found["scheme"], found["group_size"]) == ("w4a8", 32)
    assert found["weights"] == "int4, a scale and a zero point for 32 inputs"
    assert found["linears"] == {
        "qkv": {"w4a8": 6},
        "o": {"w4a8": 2},
        "gate_up": {"w4a8": 4},
        "down": {"w4a8": 2},
    }
    assert found["source"] == report["source"]
    for verifier in ("bf16", "w8a8"):
        refused = quasar("generate", out, "-p", "hello", "--verifier", verifier)
        assert refused.code == 2
        assert f"can only be verified by w4a8, not by {verifier}" in refused.error
    refused = quasar("quantize", out, tmp_path / "twice")
    assert refused.code == 1 and "already quantised: it holds w4a8 weights" in refused.error


def test_groups_in_int8(quasar, grouped, tmp_path):
    """The card, info and generate agree on a folder of both precisions."""
    out = tmp_path / "out"
    report = quasar("quantize", grouped, out, "--scheme", "w4a8", "--int8", "o,qkv", "--json").json
    assert report["int8"] == ["qkv", "o"]
    found = quasar("info", out, "--json").json["quantization"]
    assert found["weights"] == "int4, a scale and a zero point for 32 inputs, some int8"
    assert found["linears"] == {
        "qkv": {"w8a8": 6},
        "o": {"w8a8": 2},
        "gate_up": {"w4a8": 4},
        "down": {"w4a8": 2},
    }
    made = quasar("generate", out, "-p", "hello", "--max-tokens", "4", "--json").json
    assert made["verifier"] == "w4a8"  # for lack of any other
    refused = quasar("quantize", grouped, tmp_path / "no", "--scheme", "w4a8", "--int8", "qkv,v")
    assert refused.code == 2 and "--int8 'v' is none of qkv, o, gate_up, down" in refused.error
    none = quasar("quantize", grouped, tmp_path / "4", "--scheme", "w4a8", "--int8", "none")
    assert none.code == 0
    linears = quasar("info", tmp_path / "4", "--json").json["quantization"]["linears"]
    assert linears["qkv"] == {"w4a8": 6}


@pytest.mark.parametrize("options", [(), ("--scheme", "w4a8", "--shard-size", "20kB")])
def test_a_dry_run_tells_the_sizes_and_writes_nothing(quasar, grouped, tmp_path, options):
    told = quasar("quantize", grouped, tmp_path / "out", *options, "--dry-run", "--json").json
    assert told["seconds"] > 0 and told["peak_rss_bytes"] > 10_000_000
    assert told["free_bytes"] > told["space_bytes"] > sum(told["shard_bytes"])
    page = quasar("quantize", grouped, tmp_path / "out", *options, "--dry-run").out
    assert "peak memory" in page and f"file {len(told['shard_bytes'])}" in page
    assert list(tmp_path.iterdir()) == []
    quasar("quantize", grouped, tmp_path / "out", *options)
    written = sorted((tmp_path / "out").glob("*.safetensors"))
    assert [file.stat().st_size for file in written] == told["shard_bytes"]


def test_rotating(quasar, model, tmp_path):
    """Both forms are told; which one is better is up to the random weights."""
    result = quasar("quantize", model, tmp_path / "out", "--smooth", "none", "--rotate")
    assert result.code == 0 and "rotated layers" in result.err
    report = json.loads((tmp_path / "out" / "quantization_report.json").read_text())
    for form, name in (("unrotated", "none, rtn  "), ("rotated", "none, rtn, rotated")):
        line = next(line for line in result.out.splitlines() if line.startswith(name))
        assert f"{report['rotation'][form]['kl']:.5f}" in line
    kept = report["rotation"]["rotated"]["kl"] < report["rotation"]["unrotated"]["kl"]
    assert report["summary"]["rotate"] is kept
    assert (", rotated" if kept else ", not rotated") in result.out.split("kept")[-1]
    assert ("--rotate: KL" in result.err) != kept
    assert f"none, rtn{', rotated' if kept else ''}, INT8 head" in result.out
    assert quasar("generate", tmp_path / "out", "-p", "hello", "--max-tokens", 3).code == 0


@pytest.mark.parametrize("dry", [(), ("--dry-run",)])
def test_a_family_that_cannot_be_rotated(quasar, tmp_path, dry):
    folder = tiny.write_folder(tmp_path / "gemma", "gemma3_text", vocab_size=VOCABULARY)
    write_tokenizer(folder)
    result = quasar("quantize", folder, tmp_path / "out", "--rotate", *dry)
    assert result.code == 2 and "--rotate: gemma3 norms what its sublayers give" in result.error
    assert [path.name for path in tmp_path.iterdir()] == ["gemma"]


@pytest.mark.parametrize("dry", [(), ("--dry-run",)])
def test_places_that_cannot_be_written(quasar, model, tmp_path, dry, monkeypatch):
    (tmp_path / "file").write_text("")
    result = quasar("quantize", model, tmp_path / "file" / "out", *dry)
    assert result.code == 2 and "cannot write" in result.error
    result = quasar("quantize", model, tmp_path, *dry)
    assert result.code == 2 and "already exists" in result.error


def test_a_dry_run_asks_whether_the_place_can_be_written(quasar, model, tmp_path, monkeypatch):
    monkeypatch.setattr("os.access", lambda place, mode: place != tmp_path)
    result = quasar("quantize", model, tmp_path / "new" / "out", "--dry-run")
    assert result.code == 2 and "no folder that may be written to" in result.error


def test_a_killed_process_is_taken_over(quasar, model, tmp_path):
    """No handler runs on SIGKILL; what the next run finds is what was saved."""
    code = f"""
import os, signal
from pathlib import Path
from quasar.checkpoints import open_checkpoint
from quasar.quantization import calibrate
from quasar.quantization.pipeline import quantize
calibrate.CALIBRATION_TOKENS, calibrate.HELD_OUT_TOKENS = 600, 200
def progress(stage, done, total):
    if (stage, done) == ("layers", 1):
        os.kill(os.getpid(), signal.SIGKILL)
quantize(open_checkpoint(Path({str(model)!r})), Path({str(tmp_path / "out")!r}), progress=progress)
"""
    killed = subprocess.run([sys.executable, "-c", code], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert [path.name for path in tmp_path.iterdir()] == [".out.partial"]
    result = quasar("quantize", model, tmp_path / "out")
    assert result.code == 0 and "going on after layer 1 of 2" in result.err
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_quantised_folder_is_refused(quasar, quantized, tmp_path):
    result = quasar("quantize", quantized, tmp_path / "out")
    assert result.code == 1 and "already quantised" in result.err
