"""Tiny model files made on the fly: a Llama of two layers in every format we read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import decoders, models, pre_tokenizers, trainers
from torch import Tensor

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
QUANTIZATION: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "kv_cache_scheme": None,
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "strategy": "channel",
                "dynamic": False,
            },
            "input_activations": {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "strategy": "token",
                "dynamic": True,
            },
            "output_activations": None,
        }
    },
}


def shapes() -> dict[str, tuple[int, ...]]:
    """Every tensor of the tiny model."""
    hidden, inner, kv, vocab = 32, 64, 16, 320
    result: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(2):
        prefix = f"model.layers.{layer}"
        result |= {
            f"{prefix}.input_layernorm.weight": (hidden,),
            f"{prefix}.self_attn.q_proj.weight": (hidden, hidden),
            f"{prefix}.self_attn.k_proj.weight": (kv, hidden),
            f"{prefix}.self_attn.v_proj.weight": (kv, hidden),
            f"{prefix}.self_attn.o_proj.weight": (hidden, hidden),
            f"{prefix}.post_attention_layernorm.weight": (hidden,),
            f"{prefix}.mlp.gate_proj.weight": (inner, hidden),
            f"{prefix}.mlp.up_proj.weight": (inner, hidden),
            f"{prefix}.mlp.down_proj.weight": (hidden, inner),
        }
    return result | {"model.norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}


def tensors() -> dict[str, Tensor]:
    """Random BF16 values, the same every time."""
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes().items()
    }


def byte_level_tokenizer() -> tokenizers.Tokenizer:
    """All 256 bytes, a few merges, three special tokens."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        ["the cat sat on the mat, and the dog sat there too"] * 9, trainer
    )
    return tokenizer


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


def write_tokenizer(folder: Path) -> None:
    byte_level_tokenizer().save(str(folder / "tokenizer.json"))
    write_json(
        folder / "tokenizer_config.json",
        {"eos_token": "<|im_end|>", "chat_template": TEMPLATE},
    )


def write_folder(
    folder: Path, values: dict[str, Tensor] | None = None, config: dict[str, Any] | None = None
) -> Path:
    """A Hugging Face folder with one safetensors file and a tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", CONFIG if config is None else config)
    write_json(folder / "generation_config.json", {"eos_token_id": [0]})
    save_file(tensors() if values is None else values, folder / "model.safetensors")
    write_tokenizer(folder)
    return folder


def write_sharded(folder: Path) -> Path:
    """The same in two shards with an index."""
    write_folder(folder)
    (folder / "model.safetensors").unlink()
    values = list(tensors().items())
    parts = {"model-00001-of-00002.safetensors": values[:9]}
    parts["model-00002-of-00002.safetensors"] = values[9:]
    for name, part in parts.items():
        save_file(dict(part), folder / name)
    places = {tensor: name for name, part in parts.items() for tensor, _ in part}
    write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": places})
    return folder


def quantised(values: dict[str, Tensor], scale_dtype: torch.dtype) -> dict[str, Tensor]:
    """Projections as int8 codes and scales [out, 1], the rest as it is."""
    result = dict(values)
    for name, value in values.items():
        if name.endswith("_proj.weight"):
            scale = (value.float().abs().amax(1, keepdim=True) / 127).to(scale_dtype)
            result[name] = (value.float() / scale.float()).round().clamp(-127, 127).to(torch.int8)
            result[f"{name}_scale"] = scale
    return result


def write_compressed(
    folder: Path,
    values: dict[str, Tensor] | None = None,
    quantization: dict[str, Any] | None = None,
) -> Path:
    """A compressed-tensors W8A8 folder."""
    values = quantised(tensors(), torch.float32) if values is None else values
    quantization = QUANTIZATION if quantization is None else quantization
    return write_folder(folder, values, {**CONFIG, "quantization_config": quantization})


def gguf_name(name: str) -> str:
    """GGUF's name of a tensor of the tiny model."""
    stem, kind = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        layer, stem = stem.removeprefix("model.layers.").split(".", 1)
        return f"blk.{layer}.{_GGUF_NAMES[stem]}.{kind}"
    return f"{_GGUF_NAMES[stem]}.{kind}"


def interleaved(weight: Tensor, heads: int) -> Tensor:
    """What the GGUF converter does to the rows of q and k of a Llama."""
    halves = weight.view(heads, 2, -1, *weight.shape[1:])
    return halves.transpose(1, 2).reshape(weight.shape)


def start_gguf(path: Path, architecture: str = "llama", pre: str = "gpt-2") -> gguf.GGUFWriter:
    """A GGUF writer with the tiny model's metadata and tokenizer."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(2)
    writer.add_context_length(128)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(8)
    add_vocabulary(writer, pre)
    return writer


def add_vocabulary(writer: gguf.GGUFWriter, pre: str) -> None:
    layout = json.loads(byte_level_tokenizer().to_str())
    vocabulary = layout["model"]["vocab"]
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    padding = [f"[PAD{index}]" for index in range(len(tokens), 320)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens + padding)
    writer.add_token_types([3] * 3 + [1] * (len(tokens) - 3) + [5] * len(padding))
    writer.add_token_merges([" ".join(merge) for merge in layout["model"]["merges"]])
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)


def finish_gguf(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tensors(writer: gguf.GGUFWriter, values: dict[str, Tensor]) -> None:
    for name, value in values.items():
        if name.endswith("q_proj.weight"):
            value = interleaved(value, 4)
        elif name.endswith("k_proj.weight"):
            value = interleaved(value, 2)
        writer.add_tensor(gguf_name(name), np.ascontiguousarray(value.float().numpy()))


def write_gguf(path: Path, values: dict[str, Tensor] | None = None) -> Path:
    """The tiny model as a GGUF file in F32."""
    writer = start_gguf(path)
    add_tensors(writer, tensors() if values is None else values)
    finish_gguf(writer)
    return path
