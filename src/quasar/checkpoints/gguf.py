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

from quasar.checkpoints.base import SERIAL, Checkpoint, to_bfloat16
from quasar.checkpoints.gguf_file import GgufFile, TensorInfo
from quasar.checkpoints.mapping import MappedFile
from quasar.errors import CheckpointError

INTERLEAVED_ROPE = frozenset({"llama"})
"""Architectures whose q and k rows the converter interleaved: row 2i+h of a head was i + h*D/2."""

_CONFIG_KEYS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "rope.freq_base": "rope_theta",
    "vocab_size": "vocab_size",
}
_SCALING_KEYS = {
    "rope.scaling.type": "rope_type",
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.finetuned": "finetuned",
    "rope.scaling.attn_factor": "attention_factor",
    "rope.scale_linear": "factor",
}
_INFORMATION = frozenset({"tensor_data_layout"})
"""Metadata of the architecture that says nothing about the mathematics."""

_GLOBAL_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
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
        self._architecture = metadata.get("general.architecture")
        if not isinstance(self._architecture, str):
            raise CheckpointError(f"{path}: general.architecture is missing")
        if metadata.get("split.count", 1) != 1:
            raise CheckpointError(f"{path} is one part of a split model; merge the parts first")
        self.tokenizer_metadata = {k: v for k, v in metadata.items() if k.startswith("tokenizer.")}
        self._tensors = {_translated(n): info for n, info in self._file.tensors.items()}
        if len(self._tensors) != len(self._file.tensors):
            raise CheckpointError(f"{path}: two tensors translate to one name")
        for kind, name in {info.kind: name for name, info in self._tensors.items()}.items():
            _check_kind(kind, f"{path}: tensor {name!r}")
        self._drop_tied_head()
        self.config = self._translate_config(metadata)
        self.generation_config: Mapping[str, Any] = {}
        self._names = tuple(n for n in self._tensors if n != "rope_freqs.weight")

    def names(self) -> Sequence[str]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        return self._info(name).shape

    def tensor(self, name: str) -> Tensor:
        info = self._info(name)
        tensor = self._uninterleaved(name, self._dequantised(info))
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
        if not rotated or self._architecture not in INTERLEAVED_ROPE:
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
        config: dict[str, Any] = {"model_type": self._architecture}
        scaling: dict[str, Any] = {}
        prefix = f"{self._architecture}."
        for key, value in metadata.items():
            name = key.removeprefix(prefix)
            if name == key or name in _INFORMATION:
                continue
            if name in _SCALING_KEYS:
                scaling[_SCALING_KEYS[name]] = value
            else:
                config[_CONFIG_KEYS.get(name, key)] = value
        if "rope_freqs.weight" in self._tensors:
            scaling["rope_type"] = "llama3"
        if scaling.get("rope_type", "none") != "none" or "factor" in scaling:
            config["rope_scaling"] = scaling
        config["tie_word_embeddings"] = "lm_head.weight" not in self._tensors
        self._settle(config, prefix)
        return config

    def _settle(self, config: dict[str, Any], prefix: str) -> None:
        """Keys that only repeat what is known otherwise, or are implied by it, leave the config."""
        embedding = self._tensors.get("model.embed_tokens.weight")
        rows = None if embedding is None else embedding.shape[0]
        if config.setdefault("vocab_size", rows) != rows:
            raise CheckpointError(
                f"{self.path}: vocab_size is {config['vocab_size']!r}, but the embedding has "
                f"{rows} rows"
            )
        hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
        head_dim = config.get("head_dim")
        if head_dim is None and type(hidden) is int and type(heads) is int and heads > 0:
            head_dim = hidden // heads
        if self._architecture == "llama":
            layer = "model.layers.0."
            config["attention_bias"] = f"{layer}self_attn.q_proj.bias" in self._tensors
            config["mlp_bias"] = f"{layer}mlp.up_proj.bias" in self._tensors
        for name in ("rope.dimension_count", "attention.value_length"):
            if config.get(prefix + name, ...) == head_dim:
                del config[prefix + name]
        for name in ("expert_count", "expert_used_count"):
            if config.get(prefix + name) == 0:
                del config[prefix + name]
        if config.get("sliding_window") == 0:
            del config["sliding_window"]
        elif "sliding_window" in config:
            config["use_sliding_window"] = True


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


def _translated(name: str) -> str:
    """Hugging Face's name of a GGUF tensor; a name without a translation stays as it is."""
    stem, _, kind = name.rpartition(".")
    if stem in _GLOBAL_NAMES:
        return f"{_GLOBAL_NAMES[stem]}.{kind}"
    match = _LAYER.fullmatch(name)
    if match is None or match[2] not in _LAYER_NAMES:
        return name
    return f"model.layers.{int(match[1])}.{_LAYER_NAMES[match[2]]}.{match[3]}"
