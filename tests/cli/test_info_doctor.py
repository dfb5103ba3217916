"""`quasar info` and `quasar doctor`."""

from __future__ import annotations

import json
import shutil

import pytest

import tiny
from byte_tokenizer import VOCABULARY, write_tokenizer
from quasar.bench import machine, passes


def test_info_of_a_model(quasar, model):
    content = quasar("info", model, "--json").json
    tensors = tiny.random_tensors(tiny.LLAMA | {"vocab_size": 258})
    assert content["family"] == "llama" and content["context"] == 512
    assert content["parameters"] == sum(tensor.numel() for tensor in tensors.values())
    assert content["quantization"] == {"scheme": None}
    assert content["files"]["model.safetensors"] == (model / "model.safetensors").stat().st_size
    assert content["tokenizer"] == {"tokens": 258, "end_ids": [257], "chat_template": True}
    assert set(content["verifiers"]) == {"bf16", "w8a8"}
    assert content["kv_bytes_per_1000_tokens"] == 1000 * 2 * 2 * 2 * 24


def test_info_estimates_what_loading_takes(quasar, model, quantized):
    from quasar.loading import load_model

    for folder, name in ((model, "bf16"), (quantized, "w8a8")):
        decoder = load_model(str(folder), name).verifier.decoder
        estimate = quasar("info", folder, "--json").json["verifiers"][name]["weight_bytes"]
        norms = 4 * 48 * (2 * len(decoder.layers) + 1)
        taken = decoder.pass_bytes() + decoder.embedding.nbytes + norms
        # Packed layouts pad to whole blocks, or leave scales apart: much in a model this small.
        assert 0.9 * estimate <= taken <= 1.35 * estimate


def test_info_of_a_quantized_folder(quasar, quantized):
    content = quasar("info", quantized, "--json").json
    assert content["quantization"]["scheme"] == "w8a8"
    assert content["quantization"]["kept_in_bf16"] == ["embedding", "norms", "lm_head"]
    assert content["quantization"]["source"] is None
    assert list(content["verifiers"]) == ["w8a8"]
    assert content["quantization"]["rotated_inputs"] is None


def test_info_says_what_a_verifier_rotates(quasar, quantized, tmp_path):
    folder = shutil.copytree(quantized, tmp_path / "copy")
    config = json.loads((folder / "config.json").read_text())
    config["quasar"] = {"rotated_inputs": {"mlp.down_proj": 16}}
    (folder / "config.json").write_text(json.dumps(config))
    content = quasar("info", folder, "--json").json
    assert content["quantization"]["rotated_inputs"] == "down_proj, blocks of 16"


def test_info_reads_no_weights(quasar, model, monkeypatch):
    from quasar.checkpoints import hf

    def refuse(self, name):
        raise AssertionError(f"{name} was read")

    monkeypatch.setattr(hf.SafetensorsCheckpoint, "tensor", refuse)
    result = quasar("info", model)
    assert result.code == 0 and "llama" in result.out and "memory for 512 tokens" in result.out


def test_info_adds_the_memory_up(quasar, model):
    content = quasar("info", model, "--context", 100, "--threads", 1, "--json").json
    assert content["memory_context"] == 100
    for needs in content["verifiers"].values():
        parts = ("program", "layers", "head", "embedding", "cache", "working")
        serving = sum(needs[f"{part}_bytes"] for part in parts)
        loading = needs["program_bytes"] + needs["loading_bytes"]
        assert needs["peak_bytes"] == max(serving, loading)
    more = quasar("info", model, "--json").json
    assert more["memory_context"] == 512
    assert (
        more["verifiers"]["bf16"]["working_bytes"] > content["verifiers"]["bf16"]["working_bytes"]
    )
    refused = quasar("info", model, "--threads", 10**6)
    assert refused.code == 2 and "--threads" in refused.error


def test_doctor_alone(quasar, monkeypatch):
    monkeypatch.setattr(passes, "PEAK_SECONDS", 0.001)
    content = quasar("doctor", "--threads", 1, "--json").json
    assert content.keys() >= {
        "isa",
        "threads",
        "kernels",
        "read_bandwidth_gbps",
        "int8_gmacs",
        "bf16_gmacs",
        "versions",
    }
    assert content["threads"] == 1 and content["read_bandwidth_gbps"] > 0
    assert any("omp" in path for path in content["openmp_runtimes"])
    assert "passes" not in content


def test_doctor_says_why_the_native_kernels_are_not_used(quasar, monkeypatch):
    monkeypatch.setattr(passes, "PEAK_SECONDS", 0.001)
    monkeypatch.setenv("QUASAR_ISA", "reference")
    result = quasar("doctor", "--json")
    assert result.json["kernels"]["backend"] == "reference"
    assert result.json["kernels"]["declined"]["cpu"]
    assert "declined" in result.err
    monkeypatch.setenv("QUASAR_ISA", "mmx")
    refused = quasar("doctor")
    assert (refused.code, refused.out) == (2, "") and "QUASAR_ISA" in refused.err


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(passes, "PEAK_SECONDS", 0.001)
    monkeypatch.setattr(passes, "ROUNDS", 1)
    monkeypatch.setattr(passes, "CONTEXTS", (16, 64))


def test_doctor_times_what_the_model_can_be(quasar, quantized, quick):
    result = quasar("doctor", quantized, "--json")
    assert result.code == 0
    content = result.json
    assert {entry["verifier"] for entry in content["passes"]} == {"w8a8"}
    assert [(entry["context"], entry["rows"]) for entry in content["passes"]] == [
        (context, rows) for context in (16, 64) for rows in passes.ROWS
    ]
    assert content["prefill"][0]["verifier"] == "w8a8"
    assert json.loads(result.out) == content


def test_doctor_refuses_an_unknown_head(quasar):
    result = quasar("doctor", "m", "--head", "w9")
    assert (result.code, result.out) == (2, "") and "--head w9" in result.error


def test_doctor_page(quasar, quantized, quick):
    result = quasar("doctor", quantized)
    assert result.code == 0
    assert "share of limit" in result.out and "GMAC/s" in result.out


def test_openmp_runtimes_by_name():
    found = [
        path
        for path in (
            "/a/libgomp.so.1",
            "/a/libgomp-a34b3233.so.1.0.0",
            "/a/libomp.so",
            "/a/libiomp5.so",
            "/a/libcompiler.so",
            "/a/libgompx.so",
        )
        if machine.OPENMP.search(path)
    ]
    assert [path.split("/")[-1] for path in found] == [
        "libgomp.so.1",
        "libgomp-a34b3233.so.1.0.0",
        "libomp.so",
        "libiomp5.so",
    ]


@pytest.mark.parametrize("content", ["{bad", "[]", '{"source": [NaN]}', '{"source": {"name": 3}}'])
def test_info_names_a_malformed_report_card(content, quasar, tmp_path):
    folder = tmp_path / "q"
    tiny.write_quantized(folder, "llama", vocab_size=VOCABULARY)
    write_tokenizer(folder)
    (folder / "quantization_report.json").write_text(content)
    result = quasar("info", folder)
    assert (result.code, result.out) == (1, "") and "quantization_report.json" in result.error
    (folder / "quantization_report.json").write_text("{}")
    assert quasar("info", folder, "--json").json["quantization"]["source"] is None


def test_doctor_refuses_a_head_without_a_model(quasar):
    result = quasar("doctor", "--head", "w8a8")
    assert (result.code, result.out) == (2, "") and "MODEL" in result.error


@pytest.mark.parametrize(
    ("name", "code", "named"), [("", 2, "MODEL is empty"), ("~nosuchuser/x", 1, "~nosuchuser/x")]
)
def test_info_refuses_names_of_nothing(name, code, named, quasar):
    result = quasar("info", name)
    assert (result.code, result.out) == (code, "") and named in result.error


def test_control_characters_of_a_config_stay_out_of_the_message(quasar, tmp_path):
    tiny.write_folder(tmp_path, "llama")
    write_tokenizer(tmp_path)
    config = tiny.CONFIGS["llama"] | {"\x1b]0;title\x07key\x9b": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = quasar("info", tmp_path)
    assert result.code == 1 and r"'\x1b]0;title\x07key\x9b'=1 is not known" in result.error
