"""What docs/adding.md says works: its code is run, as a file that is added."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import quasar.drafting
import tiny
from byte_tokenizer import VOCABULARY, write_tokenizer
from quasar.cli.main import main

PAGE = Path(__file__).parents[2] / "docs" / "adding.md"


def code(kind: str) -> str:
    (found,) = re.findall(rf"```(?:python|cpp) {kind}\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return found


@pytest.fixture
def model(tmp_path: Path) -> str:
    folder = tiny.write_quantized(tmp_path / "model", "llama", vocab_size=VOCABULARY)
    write_tokenizer(folder)
    return str(folder)


def test_a_drafter_is_one_file(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "drafters").mkdir()
    (tmp_path / "drafters" / "bigram.py").write_text(code("drafter"))
    monkeypatch.setattr(
        quasar.drafting, "__path__", [*quasar.drafting.__path__, str(tmp_path / "drafters")]
    )
    quasar.drafting.drafters.cache_clear()
    answers = []
    try:
        for drafter in ("none", "bigram"):
            options = ["-p", "abcabcabc", "--max-tokens", "40", "--raw", "--json"]
            assert main(["generate", model, *options, "--drafter", drafter]) == 0
            answers.append(json.loads(capsys.readouterr().out))
    finally:
        monkeypatch.undo()
        quasar.drafting.drafters.cache_clear()
    plain, drafted = answers
    assert drafted["token_ids"] == plain["token_ids"]
    assert drafted["draft_tokens"] > 0 == plain["draft_tokens"]
