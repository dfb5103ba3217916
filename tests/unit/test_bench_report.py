"""From answers to figures, the page, the files."""

from __future__ import annotations

import json
import os
from html.parser import HTMLParser

import pytest

from quasar.bench.output import check_writable, write_answers, write_atomically
from quasar.bench.page import render
from quasar.bench.report import TABLE_HEADERS, category_rows, report, table_rows
from quasar.bench.runner import Answer, Configuration, Task, cache_tokens, parse_configurations
from quasar.bench.suites import Prompt
from quasar.errors import UsageError
from quasar.types import Completion, GenerationStats

PLAIN, DRAFTED = Configuration("v+none", "v", "none"), Configuration("v+ngram", "v", "ngram")
OTHER = Configuration("w+none", "w", "none")


def answer(id, category, tokens, seconds, lengths, drafted=0, text="text"):
    stats = GenerationStats(
        prompt_tokens=100,
        completion_tokens=len(tokens),
        prefill_seconds=2.0,
        decode_seconds=seconds,
        verify_passes=len(lengths),
        drafted_passes=len(lengths) if drafted else 0,
        draft_tokens=drafted,
        accepted_tokens=sum(lengths) - len(lengths),
    )
    completion = Completion(tokens, text, "length", stats)
    return Answer(Task(Prompt(id, category, "?"), [1] * 100), completion, lengths)


@pytest.fixture
def results():
    nine = list(range(9))
    return {
        "v+none": [answer(1, "a", nine, 4.0, [1] * 8), answer(2, "b", nine, 4.0, [1] * 8)],
        "v+ngram": [
            answer(1, "a", nine, 1.0, [4, 4], drafted=10),
            answer(2, "b", [*nine[:8], 99], 3.0, [2, 1, 3, 2], drafted=10),
        ],
        "w+none": [answer(1, "a", [5], 0.0, []), answer(2, "b", [5], 0.0, [])],
    }


def test_figures_are_ratios_of_sums(results):
    content = report([PLAIN, DRAFTED, OTHER], results)
    plain, drafted, other = content["configurations"]
    assert plain["decode_tokens_per_second"] == 16 / 8
    assert plain["ratio_to_first"] == {"mean": 1.0, "low": 1.0, "high": 1.0}
    assert drafted["prompts"] == 2 and drafted["completion_tokens"] == 18
    assert drafted["decode_tokens_per_second"] == 16 / 4
    assert drafted["prefill_tokens_per_second"] == 200 / 4
    assert drafted["mean_acceptance_length"] == 16 / 6
    assert drafted["mean_acceptance_length_drafted"] == 1 + 10 / 6
    assert drafted["draft_acceptance_rate"] == 10 / 20
    assert drafted["pass_milliseconds"] == pytest.approx(4000 / 6)
    assert drafted["ratio_to_first"]["mean"] == 2.0
    ratios = [part["ratio_to_first"]["mean"] for part in drafted["categories"].values()]
    assert ratios == [4.0, pytest.approx(4 / 3)]
    assert other["ratio_to_first"] is None and other["decode_tokens_per_second"] == 0.0
    assert json.loads(json.dumps(content)) == content


def test_equality_compares_token_ids_of_one_verifier(results):
    content = report([PLAIN, DRAFTED, OTHER], results)
    assert content["outputs_equal"] == [
        {"a": "v+none", "b": "v+ngram", "equal": False, "prompts": 2, "different": [2]}
    ]


def test_pairs_give_speed_and_acceptance(results):
    pair = report([PLAIN, DRAFTED], results)["pairs"][0]
    assert (pair["a"], pair["b"]) == ("v+none", "v+ngram")
    assert pair["speed_ratio"]["mean"] == 2.0
    assert pair["acceptance_ratio"]["mean"] == pytest.approx(16 / 6)


def test_table_has_a_row_a_category(results):
    rows = category_rows(report([PLAIN, DRAFTED], results)["configurations"])
    assert rows == [
        ["a", "1", "1.00x at 1.00", "4.00x at 4.00"],
        ["b", "1", "1.00x at 1.00", "1.33x at 2.00"],
    ]


def test_table_has_a_row_a_configuration(results):
    rows = table_rows(report([PLAIN, OTHER], results)["configurations"])
    assert [row[0] for row in rows] == ["v+none", "w+none"]
    assert all(len(row) == len(TABLE_HEADERS) for row in rows)
    assert rows[1][2] == "-"


class Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.script, self.inside = [], "", False
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.inside = tag == "script"

    def handle_endtag(self, tag):
        self.inside = False

    def handle_data(self, data):
        self.script += data if self.inside else ""


def test_page_escapes_everything(results):
    evil = "</script><img src=x onerror=alert(1)>"
    named = Configuration(evil, "v", evil)
    content = {
        "model": evil,
        "data": evil,
        "cpu": evil,
        "isa": "avx512",
        "threads": 2,
        "temperature": 0.0,
        "seed": 0,
        "max_tokens": 9,
        "draft_tokens": 5,
        "versions": {"quasar": evil},
        "skipped": 1,
    } | report([PLAIN, named, OTHER], results | {evil: results["v+ngram"]})
    page = Page(render(content))
    assert page.tags.count("script") == 1 and "img" not in page.tags
    assert json.loads(page.script) == content
    assert page.tags.count("rect") == 3


def test_answers_are_spec_bench_lines(results, tmp_path):
    write_answers(tmp_path, "model", "v/x+ngram", results["v+ngram"])
    (file,) = tmp_path.iterdir()
    assert file.name == "v_x+ngram.jsonl"
    line = json.loads(file.read_text().splitlines()[1])
    assert (line["question_id"], line["category"]) == (2, "b")
    assert line["model_id"] == "model+v/x+ngram" and line["answer_id"] and line["tstamp"] > 0
    assert line["choices"] == [
        {
            "index": 0,
            "turns": ["text"],
            "decoding_steps": [4],
            "new_tokens": [9],
            "wall_time": [5.0],
            "accept_lengths": [2, 1, 3, 2],
        }
    ]


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    file = tmp_path / "report.json"
    write_atomically(file, "old")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_atomically(file, "new")
    assert [f.name for f in tmp_path.iterdir()] == ["report.json"]
    assert file.read_text() == "old"


def test_unwritable_outputs_are_refused(tmp_path):
    check_writable("--json", tmp_path / "new.json")
    with pytest.raises(UsageError, match=r"--json .* is a folder"):
        check_writable("--json", tmp_path)
    with pytest.raises(UsageError, match="no folder"):
        check_writable("--json", tmp_path / "absent" / "x.json")


def test_configurations_are_parsed():
    assert parse_configurations("a+none, b:0.5+ngram", 5) == [
        Configuration("a+none", "a", "none"),
        Configuration("b:0.5+ngram", "b:0.5", "ngram"),
    ]


@pytest.mark.parametrize("text", ["", "a", "a+", "+none", "a+none,", "a+magic", "a+none,a+none"])
def test_malformed_configurations_are_refused(text):
    with pytest.raises(UsageError):
        parse_configurations(text, 5)


def test_the_cache_holds_the_largest_task():
    tasks = [Task(Prompt(i, "", ""), [0] * length) for i, length in enumerate((10, 90))]
    assert cache_tokens(tasks, 50, 5, 1000) == 145
    assert cache_tokens(tasks, 50, 5, 100) == 105
