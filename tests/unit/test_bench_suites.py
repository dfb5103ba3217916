"""Question files: three layouts, malformed lines, the order of `--limit`."""

from __future__ import annotations

import json

import pytest

from quasar.bench.suites import Prompt, read_prompts, round_robin
from quasar.errors import QuasarError


def test_three_layouts(tmp_path):
    lines = [
        {"question_id": 81, "category": "writing", "turns": ["first", "second"]},
        {"question": "how many?", "answer": "3"},
        {"task_id": "HumanEval/0", "prompt": "def f():", "test": ""},
    ]
    file = tmp_path / "mixed.jsonl"
    file.write_text("\n\n".join(map(json.dumps, lines)))
    assert read_prompts(file) == [
        Prompt(81, "writing", "first"),
        Prompt(3, "mixed", "how many?"),
        Prompt("HumanEval/0", "mixed", "def f():"),
    ]


def test_a_byte_order_mark_is_not_part_of_the_first_line(tmp_path):
    file = tmp_path / "x.jsonl"
    file.write_text(json.dumps({"question": "fine"}), encoding="utf-8-sig")
    assert read_prompts(file)[0].text == "fine"


def test_line_separators_of_unicode_do_not_end_a_line(tmp_path):
    file = tmp_path / "x.jsonl"
    file.write_text(json.dumps({"question": "a\u2028b\x85c"}, ensure_ascii=False) + "\r\n")
    assert read_prompts(file)[0].text == "a\u2028b\x85c"


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "not JSON"),
        ("[" * 100000, "not JSON"),
        ("3", "not a JSON object"),
        ('{"answer": "x"}', "none of turns, question and prompt"),
        ('{"turns": []}', "turns is not a list"),
        ('{"turns": "text"}', "turns is not a list"),
        ('{"turns": [7]}', "empty or not text"),
        ('{"question": " "}', "empty or not text"),
        ('{"question": null}', "none of turns"),
        ('{"question": "\\ud800"}', "surrogate"),
        ('{"question": "x", "category": 3}', "category"),
        ('{"question": "x", "category": "\\ud800"}', "category holds half a surrogate"),
        ('{"question": "x", "question_id": "\\udfff"}', "id holds half a surrogate"),
        ('{"question": "x", "question_id": [1]}', "id"),
    ],
)
def test_a_malformed_line_is_named(line, why, tmp_path):
    file = tmp_path / "x.jsonl"
    file.write_text('{"question": "fine"}\n\n' + line + "\n")
    with pytest.raises(QuasarError, match=why) as failure:
        read_prompts(file)
    assert str(failure.value).startswith(f"{file}:3: ")


@pytest.mark.parametrize("content", [b"", b"\n \n", b"\xff\xfe", None])
def test_a_file_without_questions_is_refused(content, tmp_path):
    file = tmp_path / "x.jsonl"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(QuasarError, match=r"x\.jsonl: "):
        read_prompts(file)


def test_round_robin_takes_one_of_each_category_in_turn():
    prompts = [Prompt(i, category, "?") for i, category in enumerate("aaabbc")]
    assert [p.id for p in round_robin(prompts, None)] == [0, 3, 5, 1, 4, 2]
    assert [p.id for p in round_robin(prompts, 4)] == [0, 3, 5, 1]
    assert round_robin(prompts, 100) == round_robin(prompts, None)


def test_the_shared_files_are_read(shared_data):
    counts = {"spec_bench": 13, "gsm8k_test_300": 1, "humaneval_even": 1}
    for name, categories in counts.items():
        prompts = read_prompts(shared_data / f"{name}.jsonl")
        assert len({p.category for p in prompts}) == categories
        assert len({p.category for p in round_robin(prompts, 13)}) == categories
