"""GGUF architectures and the Hugging Face families that they are: names, keys, and what llama.cpp's
converter changes in the tensors, to be undone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

GLOBAL_NAMES = {
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
CONFIG_KEYS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
    "vocab_size": "vocab_size",
}


@dataclass(frozen=True, slots=True)
class Architecture:
    """One value of `general.architecture`."""

    model_type: str
    model_class: str
    """The class of transformers, for `architectures` in a config.json."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Tensors of a layer called otherwise than in Llama."""
    keys: Mapping[str, str] = field(default_factory=dict)
    """Metadata that only this architecture has."""
    bias_key: str | None = None
    """Of config.json, true where q, k, v and o have a bias."""
    interleaved: bool = False
    """Rows 2i and 2i + 1 of a head of q and k were i and i + head_dim / 2."""
    norm_offset: float = 0.0
    """Added to every norm weight."""

    def layer_name(self, stem: str) -> str | None:
        return self.names.get(stem, _LAYER_NAMES.get(stem))


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("llama", "LlamaForCausalLM", bias_key="attention_bias", interleaved=True),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM"),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", bias_key="attention_bias"),
    "pangu-embedded": Architecture("PanguEmbedded", "PanguEmbeddedForCausalLM", bias_key="bias"),
    "phi3": Architecture(
        "phi3",
        "Phi3ForCausalLM",
        names={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        keys={"attention.sliding_window": "sliding_window"},
    ),
    "gemma3": Architecture(
        "gemma3_text",
        "Gemma3ForCausalLM",
        names={
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        keys={
            "attention.sliding_window": "sliding_window",
            "attention.sliding_window_pattern": "sliding_window_pattern",
            "rope.freq_base_swa": "rope_local_base_freq",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        bias_key="attention_bias",
        norm_offset=1.0,
    ),
}
MISTRAL = Architecture(
    "mistral",
    "MistralForCausalLM",
    keys={"attention.sliding_window": "sliding_window"},
    interleaved=True,
)
"""Converted as `llama`, told apart by its window; without one its mathematics are Llama's."""


def architecture(name: str, windowed: bool) -> Architecture:
    """An unknown one is passed on by its own name, for the families to refuse."""
    if name == "llama" and windowed:
        return MISTRAL
    return ARCHITECTURES.get(name, Architecture(name, name))
