"""Which files are damaged how: one `Format` a kind of file, each with a small sound model."""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / "unit"), str(Path(__file__).parents[1])]

import tiny_files  # noqa: E402
from mutations import (  # noqa: E402
    blind,
    gguf_fields,
    mutate_gguf,
    mutate_json,
    mutate_safetensors,
    mutate_template,
    mutate_tokenizer,
)

Mutation = Callable[[bytes, random.Random], bytes]


@dataclass(frozen=True)
class Format:
    """A model on disk (`model`), the one of its files that is damaged (`file`), and how."""

    model: Path
    file: Path
    good: bytes
    mutate: Mutation
    renders: bool
    """Whether the damage may concern the chat template, whose process takes long to start."""
    share: float
    """Of all cases, next to the other formats."""

    def damage(self, rng: random.Random) -> None:
        self.restore()
        if rng.random() < 0.004:
            replace_by_something_else(self.file, rng)
        else:
            self.file.write_bytes(self.mutate(self.good, rng))

    def restore(self) -> None:
        """The sound file, also where there is none or something else now."""
        if self.file.is_symlink() or (self.file.exists() and not self.file.is_file()):
            remove = os.unlink if self.file.is_symlink() or not self.file.is_dir() else os.rmdir
            remove(self.file)
        self.file.write_bytes(self.good)


def replace_by_something_else(file: Path, rng: random.Random) -> None:
    file.unlink()
    kind = rng.randrange(6)
    if kind == 0:
        os.mkfifo(file)
    elif kind == 1:
        file.mkdir()
    elif kind < 5:
        file.symlink_to(("/dev/zero", "/etc/passwd", file)[kind - 2])


def make_formats(folder: Path) -> dict[str, Format]:
    """The formats by name, their models written below `folder`."""
    plain = tiny_files.write_folder(folder / "plain")
    (plain / "chat_template.jinja").write_text(tiny_files.TEMPLATE)
    sharded = tiny_files.write_sharded(folder / "sharded")
    compressed = mark_rotated(tiny_files.write_compressed(folder / "compressed"))
    gguf = tiny_files.write_gguf(folder / "tiny.gguf")
    sentencepiece = write_sentencepiece(folder / "sentencepiece.gguf")
    others = [
        (plain / "model.safetensors").read_bytes(),
        gguf.read_bytes(),
        b'{"a": [1]}',
        b"PK\3\4",
    ]

    def entry(
        model: Path,
        name: str,
        structured: Mutation,
        blind_share: float,
        renders: bool = False,
        share: float = 1.0,
    ) -> Format:
        file = model / name if name else model

        def mutate(data: bytes, rng: random.Random) -> bytes:
            return blind(data, rng, others) if rng.random() < blind_share else structured(data, rng)

        return Format(model, file, file.read_bytes(), mutate, renders, share)

    def gguf_entry(path: Path) -> Format:
        fields = gguf_fields(path.read_bytes())
        return entry(path, "", partial(mutate_gguf, fields=fields), 0.4, renders=True)

    return {
        "safetensors": entry(plain, "model.safetensors", mutate_safetensors, 0.4),
        "shard": entry(sharded, "model-00001-of-00002.safetensors", mutate_safetensors, 0.4),
        "index": entry(sharded, "model.safetensors.index.json", json_mutation, 0.3),
        "int8": entry(compressed, "model.safetensors", mutate_safetensors, 0.4),
        "int8 config": entry(compressed, "config.json", json_mutation, 0.2),
        "gguf": gguf_entry(gguf),
        "gguf sentencepiece": gguf_entry(sentencepiece),
        "config": entry(plain, "config.json", json_mutation, 0.2),
        "generation_config": entry(plain, "generation_config.json", json_mutation, 0.2),
        "tokenizer": entry(plain, "tokenizer.json", mutate_tokenizer, 0.2),
        "tokenizer_config": entry(
            plain, "tokenizer_config.json", json_mutation, 0.2, renders=True, share=0.1
        ),
        "template": entry(
            plain, "chat_template.jinja", template_mutation, 0.0, renders=True, share=0.15
        ),
    }


def mark_rotated(folder: Path) -> Path:
    """A W8A8 folder whose verifier rotates the inputs of down_proj."""
    config = json.loads((folder / "config.json").read_text())
    config["quasar"] = {"rotated_inputs": {"mlp.down_proj": 32}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def json_mutation(data: bytes, rng: random.Random) -> bytes:
    return mutate_json(json.loads(data), rng)


def template_mutation(data: bytes, rng: random.Random) -> bytes:
    return mutate_template(data.decode(), rng)


def write_sentencepiece(path: Path) -> Path:
    """The tiny model with a vocabulary of SentencePiece's kind."""
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    for add, value in (
        (writer.add_block_count, 2),
        (writer.add_context_length, 128),
        (writer.add_embedding_length, 32),
        (writer.add_feed_forward_length, 64),
        (writer.add_head_count, 4),
        (writer.add_head_count_kv, 2),
        (writer.add_layer_norm_rms_eps, 1e-5),
    ):
        add(value)
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581"]
    pieces += [*"the cat"[:3], "th", "the", "\u2581the", "c", "a", "at", "cat", "\u2581cat"]
    kinds = [2, 3, 3, *[6] * 256] + [1] * (len(pieces) - 259)
    pieces += [f"[PAD{index}]" for index in range(len(pieces), 320)]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(pieces)
    writer.add_token_scores([-float(index) for index in range(320)])
    writer.add_token_types(kinds + [5] * (320 - len(kinds)))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(tiny_files.TEMPLATE)
    tiny_files.add_tensors(writer, tiny_files.tensors())
    tiny_files.finish_gguf(writer)
    return path
