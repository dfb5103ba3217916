"""`quasar bench` from a file of questions to all of its outputs."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

CONFIGS = ("--configs", "bf16+none,bf16+ngram", "--threads", "1")
FIGURES = {
    "prompts",
    "completion_tokens",
    "verify_passes",
    "decode_tokens_per_second",
    "prefill_tokens_per_second",
    "mean_acceptance_length",
    "draft_acceptance_rate",
    "pass_milliseconds",
    "ratio_to_first",
}


def test_all_outputs(quasar, model, questions, tmp_path):
    report, page, answers = tmp_path / "r.json", tmp_path / "r.html", tmp_path / "answers"
    outputs = ("--json", report, "--html", page, "--out-dir", answers)
    result = quasar(
        "bench", model, "--data", questions, *CONFIGS, "--limit", 4, "--max-tokens", 24, *outputs
    )
    assert result.code == 0, result.err
    assert "bf16+none" in result.out and "identical, 4 prompts" in result.out
    content = json.loads(report.read_text())
    assert content.keys() >= {"model", "isa", "threads", "configurations", "outputs_equal"}
    assert [entry["name"] for entry in content["configurations"]] == ["bf16+none", "bf16+ngram"]
    for entry in content["configurations"]:
        assert entry.keys() >= FIGURES | {"name", "verifier", "drafter", "categories"}
        assert entry["prompts"] == 4
        assert entry["ratio_to_first"].keys() == {"mean", "low", "high"}
        assert {name: part["prompts"] for name, part in entry["categories"].items()} == {
            "a": 2,
            "b": 1,
            "c": 1,
        }
        assert all(part.keys() >= FIGURES for part in entry["categories"].values())
    (pair,) = content["outputs_equal"]
    assert pair["equal"] is True and (pair["a"], pair["b"]) == ("bf16+none", "bf16+ngram")
    assert content["skipped"] == 0
    assert "<svg" in page.read_text()
    check_answers(answers, content)


def check_answers(folder, content):
    texts = {}
    for entry in content["configurations"]:
        lines = (folder / f"{entry['name']}.jsonl").read_text().splitlines()
        found = [json.loads(line) for line in lines]
        assert [line["question_id"] for line in found] == [0, 2, 4, 1]
        (choices,) = zip(*(line["choices"] for line in found), strict=True)
        assert sum(c["decoding_steps"][0] for c in choices) == entry["verify_passes"]
        assert sum(c["new_tokens"][0] for c in choices) == entry["completion_tokens"]
        for choice in choices:
            assert sum(choice["accept_lengths"]) == choice["new_tokens"][0] - 1
        texts[entry["name"]] = [choice["turns"] for choice in choices]
    assert texts["bf16+none"] == texts["bf16+ngram"]


def test_equality_also_with_noise(quasar, model, questions, tmp_path):
    report = tmp_path / "r.json"
    noise = ("--temperature", "0.8", "--seed", "3", "--max-tokens", "24", "--raw")
    result = quasar("bench", model, "--data", questions, *CONFIGS, *noise, "--json", report)
    assert result.code == 0
    (pair,) = json.loads(report.read_text())["outputs_equal"]
    assert pair == {
        "a": "bf16+none",
        "b": "bf16+ngram",
        "equal": True,
        "prompts": 6,
        "different": [],
    }


def test_default_configurations_quantise_once(quasar, model, questions, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    report = tmp_path / "r.json"
    arguments = ("bench", model, "--data", questions, "--limit", 2, "--max-tokens", 8)
    first = quasar(*arguments, "--json", report, "--threads", 1)
    assert first.code == 0 and "quantising model to W8A8 once" in first.err
    content = json.loads(report.read_text())
    names = [entry["name"] for entry in content["configurations"]]
    assert names == ["bf16+none", "bf16+ngram", "w8a8+none", "w8a8+ngram"]
    assert [pair["equal"] for pair in content["outputs_equal"]] == [True, True]
    assert len(content["pairs"]) == 6
    again = quasar(*arguments, "--threads", 1)
    assert again.code == 0 and "quantising" not in again.err


def test_prompts_beyond_the_context_are_skipped_by_name(quasar, model, questions, tmp_path):
    with questions.open("a") as file:
        file.write(json.dumps({"question_id": "long", "turns": ["x" * 600]}) + "\n")
    report = tmp_path / "r.json"
    arguments = ("bench", model, "--data", questions, "--configs", "bf16+none", "--max-tokens", 2)
    result = quasar(*arguments, "--json", report)
    assert result.code == 0
    assert "skipped question long: 618 tokens" in result.err
    content = json.loads(report.read_text())
    assert content["skipped"] == 1 and content["configurations"][0]["prompts"] == 6


def test_a_file_of_nothing_but_long_prompts_is_refused(quasar, model, tmp_path):
    file = tmp_path / "long.jsonl"
    file.write_text(json.dumps({"question": "x" * 600}))
    result = quasar("bench", model, "--data", file, "--configs", "bf16+none")
    assert (result.code, result.out) == (2, "") and "no prompt fits" in result.err


@pytest.mark.parametrize(
    ("arguments", "code", "named"),
    [
        (("--limit", "0"), 2, "--limit"),
        (("--limit", "many"), 2, "--limit"),
        (("--max-tokens", "0"), 2, "--max-tokens"),
        (("--temperature", "nan"), 2, "--temperature"),
        (("--threads", "0"), 2, "--threads"),
        (("--draft-tokens", "1000"), 2, "--draft-tokens"),
        (("--configs", "bf16"), 2, "VERIFIER+DRAFTER"),
        (("--configs", "w3a3+none"), 2, "w3a3"),
        (("--configs", "bf16+oracle"), 2, "oracle"),
        (("--head", "w3a3"), 2, "--head w3a3"),
        (("--configs", "bf16+none,bf16+none"), 2, "twice"),
        (("--json", "absent/r.json"), 2, "absent"),
        (("--html", "/"), 2, "--html"),
        (("--json", "r", "--html", "./r"), 2, "--json and --html name the same file"),
        (("--out-dir", "FILE"), 2, "--out-dir"),
        (("--data", "FILE"), 1, "FILE:1: not JSON"),
        (("--data", "absent.jsonl"), 1, "absent.jsonl"),
    ],
    ids=lambda value: str(value),
)
def test_bad_options_are_refused_before_a_model_is_opened(
    arguments, code, named, quasar, questions, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "FILE").write_text("no json")
    result = quasar("bench", "no-such-model", "--data", questions, *arguments)
    assert (result.code, result.out) == (code, "")
    assert named in result.error


def test_a_quantized_folder_is_its_own_default(quasar, quantized, questions, tmp_path):
    file = tmp_path / "r.json"
    options = ("--limit", 1, "--max-tokens", 2, "--json", file)
    assert quasar("bench", quantized, "--data", questions, *options).code == 0
    found = json.loads(file.read_text())
    assert [entry["name"] for entry in found["configurations"]] == ["w8a8+none", "w8a8+ngram"]


def test_a_quantized_folder_refuses_bf16(quasar, quantized, questions):
    configs = ("--configs", "w8a8+none,bf16+none")
    result = quasar("bench", quantized, "--data", questions, *configs)
    assert (result.code, result.out) == (2, "") and "bf16" in result.error


def test_a_full_standard_output_loses_no_file(model, questions, tmp_path):
    report = tmp_path / "r.json"
    command = [sys.executable, "-m", "quasar", "bench", str(model), "--data", str(questions)]
    brief = ["--configs", "bf16+none", "--threads", "1", "--limit", "1", "--max-tokens", "2"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*command, *brief, "--json", str(report)], stdout=full, stderr=subprocess.PIPE
        )
    assert done.returncode == 1
    assert done.stderr.endswith(b"No space left on device\n") and b"Traceback" not in done.stderr
    assert json.loads(report.read_text())["configurations"][0]["prompts"] == 1
