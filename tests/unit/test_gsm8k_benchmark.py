"""benchmarks/gsm8k.py: answers in texts, the file, the counts of two arms."""

from __future__ import annotations

import json
import sys
from decimal import Decimal
from pathlib import Path

import pytest

from quasar.errors import QuasarError
from quasar.types import Completion

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from gsm8k import INSTRUCTION, Question, Result, given_answer, page, read_questions


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("She has 3 cats.\n#### 18", "18"),
        ("#### 18.", "18"),
        ("The total is $1,234.50.", "1234.5"),
        ("**$70,000**", "70000"),
        (r"\boxed{1,234,567}", "1234567"),
        ("#### 18.00 dollars", "18"),
        (r"he is \boxed{21} years old in 3 years.", "21"),
        (r"\boxed{7}, so \boxed{\$-8} at 9", "-8"),
        (r"\boxed{\text{18 dollars}}", "18"),
        (r"= 5, so \boxed{five}", "5"),
        ("it costs .5", "0.5"),
        ("= -3", "-3"),
        ("(\N{MINUS SIGN}$12)", "-12"),
        ("a loss of $-12", "-12"),
        ("10-7", "7"),
        ("10 - 7", "7"),
        ("- 7 apples", "7"),
        ("20%-15", "15"),
        ("1,2,3", "3"),
        ("12,34", "34"),
        ("100%", "100"),
        ("The answer is 5!\n\n", "5"),
    ],
)
def test_the_answer_in_a_text(text, value):
    assert given_answer(text) == Decimal(value)


@pytest.mark.parametrize("text", ["", "no number", "$,.-", "²"])
def test_no_number(text):
    assert given_answer(text) is None


def test_the_instruction_shows_the_box():
    assert INSTRUCTION.endswith(r"within \boxed{}.")
    assert given_answer(INSTRUCTION) is None


def write(path, *items):
    path.write_text("\n\n".join(json.dumps(item) for item in items) + "\n")
    return path


def test_questions_and_answers_stay_together(tmp_path):
    items = [
        {"question": f"q{i}", "answer": f"{i} + 1 = <<{i}+1>>\n#### 1,00{i}"} for i in range(4)
    ]
    path = write(tmp_path / "q.jsonl", *items)
    assert read_questions(path, 3) == [Question(f"q{i}", Decimal(1000 + i)) for i in range(3)]
    assert len(read_questions(path, None)) == 4


@pytest.mark.parametrize("answer", [{}, {"answer": 5}, {"answer": "none"}])
def test_a_question_without_an_answer_is_refused(tmp_path, answer):
    path = write(
        tmp_path / "q.jsonl", {"question": "q", "answer": "#### 1"}, {"question": "r"} | answer
    )
    with pytest.raises(QuasarError, match="question 3 has no answer"):
        read_questions(path, None)
    assert len(read_questions(path, 1)) == 1


def completion(text, reason="stop"):
    return Completion([1, 2], text, reason)


def test_arms_are_compared_question_by_question():
    questions = [Question("q", Decimal(n)) for n in (1, 2, 3, 4)]
    texts = ["#### 1", "#### 2.0", "#### 3", "no"], ["#### 1", "#### 5", "none", "is 4."]
    first, second = (
        Result.of(name, questions, [*map(completion, own[:3]), completion(own[3], "length")])
        for name, own in zip("ab", texts, strict=True)
    )
    assert first.right == [True, True, True, False] and second.right == [True, False, False, True]
    found = second.figures(first)
    assert (found["right"], found["accuracy"], found["cut"], found["tokens"]) == (2, 0.5, 1, 8)
    assert (found["only_first_right"], found["only_this_right"]) == (2, 1)
    mean, low, high = found["difference"]
    assert mean == -0.25 and low < mean < high
    assert first.figures(first)["difference"] == [0.0, 0.0, 0.0]
    assert "-25.0%" in page([first.figures(first), found])
