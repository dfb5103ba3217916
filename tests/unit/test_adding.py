"""What docs/adding.md says works: its code is run, as a file that is added."""

from __future__ import annotations

import json
import platform
import re
import shutil
import subprocess
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

ROOT = Path(__file__).parents[2]
PAGE, CSRC = ROOT / "docs" / "adding.md", ROOT / "csrc"


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


CALLER = """
#include <cstdio>
#include <vector>
#include "quasar_kernels.h"
extern "C" const quasar_tier quasar_tier_sse4;
int main() {  // [1 2 3 ... 32] times itself, by the new tier
  const quasar_tier& tier = quasar_tier_sse4;
  std::vector<float> x(32), scale(32, 1.0f);
  std::vector<int8_t> codes(32);
  for (int k = 0; k < 32; ++k) x[k] = codes[k] = k + 1;
  x[31] = 127;  // codes are then the values themselves
  quasar_weight rows{};
  rows.values = codes.data();
  rows.out_features = 1;
  rows.in_features = 32;
  rows.precision = QUASAR_W8A8;
  std::vector<char> packed(tier.packed_bytes(&rows) + 64);
  void* weight = packed.data() + (64 - (uintptr_t)packed.data() % 64);
  tier.pack(&rows, weight, 1);
  quasar_linear layer{};
  layer.weight = weight;
  layer.scale = scale.data();
  layer.out_features = 1;
  layer.in_features = 32;
  layer.precision = QUASAR_W8A8;
  std::vector<char> scratch(tier.linear_scratch_bytes(&layer, 1) + 64);
  float out = 0;
  tier.linear(&layer, x.data(), 1, scratch.data(), &out, 1);
  std::printf("%s %.0f", tier.name, out);
}
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the page's tier is for x86-64")
def test_a_tier_is_one_file(tmp_path: Path) -> None:
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    (tmp_path / "tier_sse4.cpp").write_text(code("tier"))
    (tmp_path / "caller.cpp").write_text(CALLER)
    sources = [tmp_path / "tier_sse4.cpp", tmp_path / "caller.cpp", CSRC / "parallel.cpp"]
    flags = ["-std=c++17", "-O1", "-msse4.2", "-fwrapv", "-pthread", f"-I{CSRC}"]
    program = tmp_path / "program"
    subprocess.run([compiler, *flags, "-o", program, *sources], check=True)
    found = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    assert found == f"sse4 {sum(k * k for k in range(1, 32)) + 32 * 127}"
