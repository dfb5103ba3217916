"""Hugging Face folders: config.json and safetensors, whole or in shards.

A safetensors file is an 8-byte little-endian header length, a JSON header
{name: {dtype, shape, data_offsets: [begin, end]}}, then the data that the offsets refer to.
The header is read here rather than by the `safetensors` package because pages of our own map can be
given back and because each refusal names the tensor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quasar.checkpoints.base import Checkpoint, to_bfloat16
from quasar.checkpoints.mapping import MappedFile
from quasar.errors import CheckpointError
from quasar.files import parse_object, read_json

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
TEXTS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "quantization_report.json",
)
"""What is read of a folder besides its weights."""
PICKLES = frozenset({".bin", ".pt", ".pth", ".pkl", ".ckpt"})
"""Suffixes of files that could run code when read."""
_MAX_HEADER = 16 << 20
"""150,000 tensors; the largest dense models have about 1,200."""
_MAX_RANK, _MAX_SIZE = 8, 1 << 40
"""Of a shape. Products of longer numbers could take for ever, and Python refuses to print them."""
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_UNUSED_SUFFIX = "rotary_emb.inv_freq"
"""Old Llama checkpoints carry the rotary frequencies; they follow from the config."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Where one tensor lies."""

    file: MappedFile
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    def read(self) -> Tensor:
        """The tensor as stored: a view of the file, or a copy if it is not aligned there."""
        data = self.file.view(self.offset, self.nbytes)
        if data.data_ptr() % self.dtype.itemsize:
            data = data.clone()
        return data.view(self.dtype).view(self.shape)


def read_header(file: MappedFile) -> dict[str, Entry]:
    """All tensors of a safetensors file; refuses anything that does not tile the file exactly."""
    length = int.from_bytes(file.read(0, 8), "little")
    if length > min(_MAX_HEADER, file.size - 8):
        raise CheckpointError(f"{file.path}: header of {length} bytes is truncated or too large")
    header = parse_object(file.read(8, length), f"the header of {file.path}")
    header.pop("__metadata__", None)
    entries = {name: _entry(file, 8 + length, name, item) for name, item in header.items()}
    end = 8 + length
    for name, entry in sorted(entries.items(), key=lambda pair: pair[1].offset):
        if entry.offset != end:
            raise CheckpointError(f"{file.path}: tensor {name!r} overlaps another or leaves a hole")
        end += entry.nbytes
    if end != file.size:
        raise CheckpointError(f"{file.path}: tensors end at byte {end} of {file.size}")
    return entries


def _entry(file: MappedFile, start: int, name: str, item: Any) -> Entry:
    where = f"{file.path}: tensor {name!r}"
    match item:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(begin), int(end)]}:
            pass
        case _:
            raise CheckpointError(f"{where} has a malformed header entry")
    if dtype not in DTYPES:
        raise CheckpointError(f"{where} has dtype {dtype!r}, which is not supported")
    if len(shape) > _MAX_RANK or not all(type(n) is int and 0 < n <= _MAX_SIZE for n in shape):
        raise CheckpointError(f"{where} has the impossible shape {shape}")
    nbytes = math.prod(shape) * DTYPES[dtype].itemsize
    if end - begin != nbytes or begin < 0 or start + end > file.size:
        raise CheckpointError(
            f"{where} of {nbytes} bytes is truncated or malformed: it lies at {begin}..{end} "
            f"of {file.size - start} bytes of data"
        )
    return Entry(file, DTYPES[dtype], tuple(shape), start + begin, nbytes)


class SafetensorsCheckpoint(Checkpoint):
    """A Hugging Face folder in floating point."""

    format = "safetensors"

    def __init__(self, path: Path, config: Mapping[str, Any]) -> None:
        self.path = path
        self.config = config
        self.quantization: Mapping[str, Any] | None = None
        self.tokenizer_metadata = None
        generation = path / "generation_config.json"
        self.generation_config = read_json(generation) if generation.exists() else {}
        self._entries = _read_folder(path)
        self.files: Sequence[MappedFile] = tuple({e.file: None for e in self._entries.values()})
        self._drop_tied_head()
        self._names = tuple(n for n in self._entries if not n.endswith(_UNUSED_SUFFIX))

    def names(self) -> Sequence[str]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        return self.entry(name).shape

    def tensor(self, name: str) -> Tensor:
        return to_bfloat16(self.entry(name).read(), self.where(name))

    def entry(self, name: str) -> Entry:
        if name not in self._entries:
            raise CheckpointError(f"{self.path} lacks tensor {name!r}")
        return self._entries[name]

    def where(self, name: str) -> str:
        return f"{self.entry(name).file.path}: tensor {name!r}"

    def _drop_tied_head(self) -> None:
        """A tied model may carry a copy of its embedding as lm_head; any other head is a lie."""
        head = self._entries.get("lm_head.weight")
        embedding = self._entries.get("model.embed_tokens.weight")
        if head is None or embedding is None or self.config.get("tie_word_embeddings") is not True:
            return
        same = (head.dtype, head.shape) == (embedding.dtype, embedding.shape)
        if not (same and torch.equal(head.read(), embedding.read())):
            raise CheckpointError(
                f"{self.path}: tie_word_embeddings is true, but 'lm_head.weight' differs from "
                "'model.embed_tokens.weight'"
            )
        del self._entries["lm_head.weight"]
        self.release()


def _read_folder(path: Path) -> dict[str, Entry]:
    single, index = path / WEIGHTS, path / INDEX
    if single.exists():
        return read_header(MappedFile(single))
    if not index.exists():
        names = sorted(file.name for file in path.iterdir())
        raise CheckpointError(f"{path} {missing_weights(names)}")
    entries: dict[str, Entry] = {}
    for shard, listed in read_shards(index).items():
        found = read_header(MappedFile(path / shard))
        if listed != found.keys():
            name = min(listed ^ found.keys())
            verb = "lacks" if name in listed else "also holds"
            raise CheckpointError(f"{path / shard} {verb} tensor {name!r}, unlike {INDEX} says")
        entries.update(found)
    return entries


def read_shards(index: Path) -> dict[str, set[str]]:
    """The names of the tensors of each shard; shards are files beside the index."""
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(s, str) for s in places.values()):
        raise CheckpointError(f"{index}: weight_map is missing or malformed")
    shards: dict[str, set[str]] = {}
    for name, shard in sorted(places.items(), key=lambda item: item[1]):
        if Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise CheckpointError(f"{index}: shard {shard!r} is not a safetensors file beside it")
        shards.setdefault(shard, set()).add(name)
    return shards


def missing_weights(names: Sequence[str]) -> str:
    """What to say of a folder or repository of these files, none of which holds weights we read."""
    for name in names:
        if Path(name).suffix in PICKLES:
            return (
                f"holds its weights in {name}, a pickle file that could run code when read; "
                "convert the model to safetensors first"
            )
    for name in names:
        if name.endswith(".gguf"):
            return f"is not a Hugging Face model folder; give the file itself: {name}"
    return f"has neither {WEIGHTS} nor {INDEX}"
