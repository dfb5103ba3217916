"""Tiny models with a byte tokenizer and outlier channels, so that smoothing has work to do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import save_file

import tiny
from byte_tokenizer import VOCABULARY, write_tokenizer

Write = Callable[..., Path]


@pytest.fixture
def write_model(tmp_path: Path) -> Write:
    """Writes a model folder of a family; keyword arguments override its config."""

    def write(family: str = "llama", **overrides: object) -> Path:
        config = {"vocab_size": VOCABULARY} | overrides
        folder = tiny.write_folder(tmp_path / f"{family}-model", family, **config)
        tensors = tiny.random_tensors(tiny.CONFIGS[family] | config)
        for name, tensor in tensors.items():
            if name.endswith("layernorm.weight"):
                tensor[3:5] *= 40
            if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
                tensor[:, 3:5] /= 20
        save_file(tensors, folder / "model.safetensors")
        write_tokenizer(folder)
        return folder

    return write
