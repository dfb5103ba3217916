"""What docs/adding.md says works: its code is run, as a file that is added."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import quasar.drafting
import tiny
from byte_tokenizer import VOCABULARY, write_tokenizer
from quasar.checkpoints import open_checkpoint
from quasar.cli.main import main
from quasar.errors import CheckpointError
from quasar.models import families
from quasar.models.layer import logits

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


@pytest.fixture
def seed_oss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A tiny model of a family that the package does not have, and the family's file."""
    (tmp_path / "families").mkdir()
    (tmp_path / "families" / "seed_oss.py").write_text(code("family"))
    monkeypatch.setattr(families, "__path__", [*families.__path__, str(tmp_path / "families")])
    families.families.cache_clear()
    config = {"model_type": "seed_oss", "attention_out_bias": True, "head_dim": 16}
    config |= {"architectures": ["SeedOssForCausalLM"], "vocab_size": VOCABULARY}
    monkeypatch.setitem(tiny.CONFIGS, "seed_oss", tiny.LLAMA | config | {"attention_bias": True})
    folder = tiny.write_folder(tmp_path / "seed", "seed_oss")
    write_tokenizer(folder)
    yield folder
    monkeypatch.undo()
    families.families.cache_clear()


def test_a_family_is_one_file(seed_oss: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Logits of transformers, and a command that generates."""
    transformers = pytest.importorskip("transformers")
    tokens = torch.arange(60)
    model = transformers.AutoModelForCausalLM.from_pretrained(seed_oss, dtype=torch.float32)
    with torch.inference_mode():
        expected = model(tokens[None]).logits[0]
    checkpoint = open_checkpoint(seed_oss)
    found = logits(checkpoint, families.parse_config(checkpoint.config), tokens)
    assert (found - expected).abs().max() <= 1e-3 * expected.abs().max()
    options = ["-p", "abcabcabc", "--max-tokens", "8", "--raw", "--json", "--verifier", "bf16"]
    assert main(["generate", str(seed_oss), *options]) == 0
    assert json.loads(capsys.readouterr().out)["completion_tokens"] == 8


def test_without_its_file_the_family_is_refused() -> None:
    with pytest.raises(CheckpointError, match="'seed_oss' is not supported"):
        families.parse_config(tiny.LLAMA | {"model_type": "seed_oss"})
