"""GGUF files as checkpoints: metadata to config.json keys, tensors to Hugging Face names.

Nothing is dropped in silence: metadata of the architecture that has no translation enters the
config under its own name, so that a family which does not know it refuses it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from quasar.checkpoints.architectures import CONFIG_KEYS, GLOBAL_NAMES, architecture
from quasar.checkpoints.base import SERIAL, Checkpoint, to_bfloat16
from quasar.checkpoints.gguf_file import GgufFile, TensorInfo
from quasar.checkpoints.mapping import MappedFile
from quasar.errors import CheckpointError

_SCALING_KEYS = {
    "rope.scaling.type": "rope_type",
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
    "rope.scale_linear": "factor",
}
_INFORMATION = frozenset({"tensor_data_layout", "rope.scaling.finetuned"})
"""Metadata of the architecture that says nothing about the mathematics."""
_FREQUENCIES = "rope_freqs.weight"
_FACTORS = ("rope_factors_short.weight", "rope_factors_long.weight")
_MAX_FACTORS = 512

_LAYER = re.compile(r"blk\.([0-9]{1,6})\.(\w+)\.(weight|bias)")
_CHUNK = 1 << 18
"""Elements dequantised at a time. Q8_0, Q5_0, Q6_K take 2.7, 3.5, 5.7 ns an element; smaller and
larger chunks take longer, and so do two threads (numpy holds the GIL between its short loops)."""


class GgufCheckpoint(Checkpoint):
    """One GGUF file."""

    format = "gguf"

    def __init__(self, path: Path) -> None:
        self.path = path
        self.quantization = None
        self._file = GgufFile(path)
        self.files: Sequence[MappedFile] = (self._file.map,)
        metadata = self._file.metadata
        name = metadata.get("general.architecture")
        if not isinstance(name, str):
            raise CheckpointError(f"{path}: general.architecture is missing")
        self._prefix = f"{name}."
        window = metadata.get(f"{name}.attention.sliding_window", 0)
        self._architecture = architecture(name, windowed=window != 0)
        if metadata.get("split.count", 1) != 1:
            raise CheckpointError(f"{path} is one part of a split model; merge the parts first")
        self.tokenizer_metadata = {k: v for k, v in metadata.items() if k.startswith("tokenizer.")}
        self._tensors = {self._translated(n): i for n, i in self._file.tensors.items()}
        if len(self._tensors) != len(self._file.tensors):
            raise CheckpointError(f"{path}: two tensors translate to one name")
        for kind, name in {info.kind: name for name, info in self._tensors.items()}.items():
            _check_kind(kind, f"{path}: tensor {name!r}")
        self._drop_tied_head()
        self.config = self._translate_config(metadata)
        self.generation_config: Mapping[str, Any] = {}
        self._names = tuple(n for n in self._tensors if n not in (_FREQUENCIES, *_FACTORS))

    def names(self) -> Sequence[str]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        return self._info(name).shape

    def tensor(self, name: str) -> Tensor:
        info = self._info(name)
        tensor = self._uninterleaved(name, self._dequantised(info))
        if self._architecture.norm_offset and name.endswith("norm.weight"):
            tensor = tensor.float() - self._architecture.norm_offset
        return to_bfloat16(tensor, f"{self.path}: tensor {name!r}")

    def _info(self, name: str) -> TensorInfo:
        if name not in self._tensors:
            raise CheckpointError(f"{self.path} lacks tensor {name!r}")
        return self._tensors[name]

    def _dequantised(self, info: TensorInfo) -> Tensor:
        """BF16, rounded from fp32 chunk by chunk; types that torch knows are left as they are."""
        data = self._file.map.view(info.offset, info.nbytes)
        if info.kind in _PLAIN:
            return data.view(_PLAIN[info.kind]).view(info.shape)
        out = torch.empty(math.prod(info.shape), dtype=torch.bfloat16)
        block, size = GGML_QUANT_SIZES[info.kind]
        for start in range(0, len(out), _CHUNK):
            # As one long row: `dequantize` works in groups of 16 rows, too few elements at a time.
            source = data[start // block * size : (start + _CHUNK) // block * size].view(1, -1)
            values = torch.from_numpy(dequantize(source.numpy(), info.kind))[0]
            for part in range(0, len(values), SERIAL):
                rows = values[part : part + SERIAL]
                out[start + part : start + part + len(rows)] = rows
        return out.view(info.shape)

    def _uninterleaved(self, name: str, tensor: Tensor) -> Tensor:
        """Rows of q and k back in Hugging Face's order (halves), for the weight and the bias."""
        module = name.rpartition(".")[0]
        rotated = module.endswith((".q_proj", ".k_proj"))
        if not rotated or not self._architecture.interleaved:
            return tensor
        key = "num_attention_heads" if module.endswith(".q_proj") else "num_key_value_heads"
        heads = self.config.get(key, self.config.get("num_attention_heads"))
        if type(heads) is not int or heads < 1 or tensor.shape[0] % (2 * heads):
            raise CheckpointError(f"{self.path}: tensor {name!r} does not fit {heads!r} heads")
        return tensor.view(heads, -1, 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)

    def _drop_tied_head(self) -> None:
        """A head that is bit for bit the embedding is the embedding."""
        head = self._tensors.get("lm_head.weight")
        embedding = self._tensors.get("model.embed_tokens.weight")
        if head is None or embedding is None:
            return
        if (head.kind, head.shape) == (embedding.kind, embedding.shape):
            view = self._file.map.view
            if torch.equal(view(head.offset, head.nbytes), view(embedding.offset, head.nbytes)):
                del self._tensors["lm_head.weight"]
            self.release()

    def _translate_config(self, metadata: Mapping[str, Any]) -> dict[str, Any]:
        known = self._architecture
        keys = {**CONFIG_KEYS, **known.keys}
        config: dict[str, Any] = {
            "model_type": known.model_type,
            "architectures": [known.model_class],
            "tie_word_embeddings": "lm_head.weight" not in self._tensors,
        }
        scaling: dict[str, Any] = {}
        for key, value in metadata.items():
            name = key.removeprefix(self._prefix)
            if name == key or name in _INFORMATION:
                continue
            if name in _SCALING_KEYS:
                scaling[_SCALING_KEYS[name]] = value
            else:
                config[keys.get(name, key)] = value
        self._settle(config)
        self._settle_window(config)
        self._settle_rope(config, scaling)
        return config

    def _settle(self, config: dict[str, Any]) -> None:
        """Keys that only repeat what is known otherwise, or are implied by it, leave the config."""
        embedding = self._tensors.get("model.embed_tokens.weight")
        rows = None if embedding is None else embedding.shape[0]
        if config.setdefault("vocab_size", rows) != rows:
            raise CheckpointError(
                f"{self.path}: vocab_size is {config['vocab_size']!r}, but the embedding has "
                f"{rows} rows"
            )
        layer = "model.layers.0."
        if self._architecture.bias_key:
            config[self._architecture.bias_key] = f"{layer}self_attn.q_proj.bias" in self._tensors
        if f"{layer}mlp.up_proj.bias" in self._tensors:
            config["mlp_bias"] = True
        value_length = self._prefix + "attention.value_length"
        if config.get(value_length, ...) == _head_dim(config):
            del config[value_length]
        for name in ("expert_count", "expert_used_count"):
            if config.get(self._prefix + name) == 0:
                del config[self._prefix + name]

    def _settle_window(self, config: dict[str, Any]) -> None:
        """Zero is no window; what Gemma's files leave out is what llama.cpp takes for granted."""
        for key in ("sliding_window", f"{self._prefix}attention.sliding_window"):
            if config.get(key) == 0:
                del config[key]
        pattern = config.get("sliding_window_pattern")
        if isinstance(pattern, list):
            del config["sliding_window_pattern"]
            config["layer_types"] = [_KINDS.get(local, local) for local in pattern]
        if self._architecture.model_type == "gemma3_text":
            if "sliding_window" not in config:
                config["sliding_window_pattern"] = 1
            # Only the model of 62 layers scales by the hidden size instead of the head.
            hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
            large = config.get("num_hidden_layers") == 62
            if large and type(hidden) is int and type(heads) is int and heads > 0:
                config["query_pre_attn_scalar"] = hidden // heads
            else:
                config["query_pre_attn_scalar"] = _head_dim(config)

    def _settle_rope(self, config: dict[str, Any], scaling: dict[str, Any]) -> None:
        """Rotated dimensions, and scaling from metadata and from tensors of divisors."""
        dims, head_dim = config.pop(f"{self._prefix}rope.dimension_count", None), _head_dim(config)
        if dims is not None and dims != head_dim:
            config["partial_rotary_factor"] = self._share(dims, head_dim)
        divisors = [self._divisors(name) for name in _FACTORS if name in self._tensors]
        if _FREQUENCIES in self._tensors:
            divisors = [self._divisors(_FREQUENCIES)] * 2
        if divisors:
            # Llama 3's divisors do not depend on the context: LongRoPE with one set for both.
            if scaling.setdefault("rope_type", "longrope") != "longrope" or len(divisors) != 2:
                raise CheckpointError(
                    f"{self.path}: {len(divisors)} tensors of rope factors do not fit "
                    f"rope.scaling.type {scaling['rope_type']!r}"
                )
            scaling["short_factor"], scaling["long_factor"] = divisors
            attention = config.pop(f"{self._prefix}rope.scaling.attn_factor", 1.0)
            scaling["attention_factor"] = attention
        elif "factor" in scaling:
            scaling.setdefault("rope_type", "linear")
        if scaling.get("rope_type", "none") != "none":
            config["rope_scaling"] = scaling

    def _share(self, dims: Any, head_dim: Any) -> float:
        """A fraction of head_dim whose product, rounded down, is `dims` again."""
        if type(dims) is not int or type(head_dim) is not int or not 0 < dims < head_dim:
            raise CheckpointError(f"{self.path}: rope.dimension_count {dims!r} of {head_dim!r}")
        share = dims / head_dim
        return share if int(head_dim * share) == dims else math.nextafter(share, 2.0)

    def _divisors(self, name: str) -> list[float]:
        """A tensor of divisors of the rotary frequencies."""
        info = self._info(name)
        if info.kind != GGMLQuantizationType.F32 or len(info.shape) != 1:
            raise CheckpointError(f"{self.path}: tensor {name!r} is not a vector of F32")
        if info.shape[0] > _MAX_FACTORS:
            raise CheckpointError(f"{self.path}: tensor {name!r} has {info.shape[0]} values")
        values: list[float] = self._dequantised(info).tolist()
        return values

    def _translated(self, name: str) -> str:
        """Hugging Face's name of a tensor; a name without a translation stays as it is."""
        stem, _, kind = name.rpartition(".")
        if stem in GLOBAL_NAMES:
            return f"{GLOBAL_NAMES[stem]}.{kind}"
        match = _LAYER.fullmatch(name)
        found = None if match is None else self._architecture.layer_name(match[2])
        if match is None or found is None:
            return name
        return f"model.layers.{int(match[1])}.{found}.{match[3]}"


_KINDS = {True: "sliding_attention", False: "full_attention"}
_PLAIN = {
    GGMLQuantizationType.F64: torch.float64,
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
    GGMLQuantizationType.I8: torch.int8,
    GGMLQuantizationType.I16: torch.int16,
    GGMLQuantizationType.I32: torch.int32,
    GGMLQuantizationType.I64: torch.int64,
}


def _check_kind(kind: GGMLQuantizationType, where: str) -> None:
    """Refuse a type that cannot be dequantised before any work is done."""
    if kind in _PLAIN:
        return
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        raise CheckpointError(f"{where} has type {kind.name}, which cannot be read") from None


def _head_dim(config: Mapping[str, Any]) -> Any:
    """`head_dim`, or what stands for it where the file does not say; None if it cannot be known."""
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    if "head_dim" in config or type(hidden) is not int or type(heads) is not int or heads < 1:
        return config.get("head_dim")
    return hidden // heads
