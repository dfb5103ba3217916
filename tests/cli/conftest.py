"""Tiny models with a byte tokenizer, and a way to run a command line inside this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import tiny
from byte_tokenizer import VOCABULARY, write_tokenizer
from quasar.cli.main import main


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama in BF16."""
    folder = tiny.write_folder(
        tmp_path_factory.mktemp("m") / "model", "llama", vocab_size=VOCABULARY
    )
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same llama in W8A8."""
    folder = tmp_path_factory.mktemp("m") / "quantized"
    tiny.write_quantized(folder, "llama", vocab_size=VOCABULARY)
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def untemplated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The BF16 llama without a chat template."""
    folder = tiny.write_folder(
        tmp_path_factory.mktemp("m") / "plain", "llama", vocab_size=VOCABULARY
    )
    write_tokenizer(folder, template=None)
    return folder


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The one line that says what failed."""
        (line,) = [line for line in self.err.splitlines() if line.startswith("quasar: error: ")]
        return line

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def quasar(capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """Runs `quasar ARGUMENTS` in this process."""

    def run(*arguments: object) -> Result:
        capsys.readouterr()
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as stop:
            code = int(stop.code or 0)
        return Result(code, *capsys.readouterr())

    return run


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    """Six Spec-Bench questions in three categories."""
    file = tmp_path / "questions.jsonl"
    lines = [
        {"question_id": i, "category": "abc"[i // 2], "turns": [f"{i}. ab ab ab ab", "not asked"]}
        for i in range(6)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file
