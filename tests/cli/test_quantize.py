"""`quasar quantize`: the report it prints, the folder it writes, what it refuses."""

from __future__ import annotations

import json

import pytest

from quasar.quantization import calibrate


@pytest.fixture(autouse=True)
def short_texts(monkeypatch):
    monkeypatch.setattr(calibrate, "CALIBRATION_TOKENS", 600)
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
        (("--scheme", "w4a8"), ("--scheme w4a8", "not available in this version")),
        (("--scheme", "int3"), ("--scheme int3",)),
        (("--head", "w8a8"), ("--head w8a8", "generate or evaluate")),
        (("--calib", "absent.txt"), ("--calib absent.txt", "No such file")),
    ],
)
def test_refusals_come_first_and_in_one_line(quasar, model, tmp_path, arguments, words):
    result = quasar("quantize", model, tmp_path / "out", *arguments)
    assert result.code == 2 and result.out == ""
    assert result.err.startswith("quasar: error: ") and result.err.count("\n") == 1
    for word in words:
        assert word in result.err
    assert list(tmp_path.iterdir()) == []


def test_a_quantised_folder_is_refused(quasar, quantized, tmp_path):
    result = quasar("quantize", quantized, tmp_path / "out")
    assert result.code == 1 and "already quantised" in result.err


def test_an_occupied_folder_is_refused(quasar, model, tmp_path):
    (tmp_path / "file").write_text("")
    result = quasar("quantize", model, tmp_path)
    assert result.code == 2 and "already exists" in result.err
