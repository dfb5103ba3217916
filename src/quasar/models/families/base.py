"""Reading config.json by whitelist: every key is understood, known to be harmless, or refused.

A key nobody looked at may change the mathematics, so `ConfigReader.finish` refuses it by name.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, TypedDict

from quasar.errors import CheckpointError

HARMLESS = frozenset(
    {
        "_attn_implementation_autoset",
        "_name_or_path",
        "architectures",
        "attention_dropout",
        "auto_map",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "id2label",
        "initializer_range",
        "is_llama_config",
        "label2id",
        "model_type",
        "pad_token_id",
        "output_attentions",
        "output_hidden_states",
        "pretraining_tp",
        "quantization_config",
        "tokenizer_class",
        "torch_dtype",
        "transformers.js_config",
        "transformers_version",
        "unk_token_id",
        "unsloth_fixed",
        "unsloth_version",
        "use_cache",
    }
)
"""Keys that inform, train or load, but do not enter a forward pass. No code is ever loaded."""

_REQUIRED: Any = object()
_MAX_HEAD_DIM = 1024
_MAX_CONTEXT = 1 << 24


class Sizes(TypedDict):
    """The sizes that every decoder has, by ModelConfig's names."""

    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int


class ConfigReader:
    """The keys of one config.json; each is read once, checked, and ticked off."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config
        self._read: set[str] = set()

    def integer(self, key: str, most: int, default: Any = _REQUIRED) -> int:
        """An integer in 1..most."""
        value = self._get(key, default)
        if type(value) is not int or not 1 <= value <= most:
            raise CheckpointError(f"config: {key}={value!r} is not an integer in 1..{most}")
        return value

    def number(self, key: str, above: float, below: float, default: Any = _REQUIRED) -> float:
        """A finite number strictly between two bounds."""
        value = self._get(key, default)
        if type(value) not in (int, float) or not above < value < below:
            raise CheckpointError(f"config: {key}={value!r} is not between {above} and {below}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        if type(value) is not bool:
            raise CheckpointError(f"config: {key}={value!r} is not true or false")
        return value

    def exactly(self, key: str, *allowed: Any) -> None:
        """A key that may be absent, else must have one of the values that change nothing."""
        value = self._get(key, allowed[0])
        if value not in allowed:
            raise CheckpointError(f"config: {key}={value!r} is not supported")

    def ignore(self, *keys: str) -> None:
        """Keys without effect given what was read before."""
        self._read.update(keys)

    def sizes(self) -> Sizes:
        """All sizes, checked against each other."""
        hidden = self.integer("hidden_size", 1 << 20)
        heads = self.integer("num_attention_heads", 1 << 12)
        kv_heads = self.integer("num_key_value_heads", heads, heads)
        if heads % kv_heads:
            raise CheckpointError(
                f"config: num_attention_heads={heads} is no multiple of "
                f"num_key_value_heads={kv_heads}"
            )
        if self._config.get("head_dim") is None and hidden % heads:
            raise CheckpointError(
                f"config: hidden_size={hidden} is no multiple of num_attention_heads={heads}"
            )
        head_dim = self.integer("head_dim", _MAX_HEAD_DIM, hidden // heads)
        if head_dim % 2:
            raise CheckpointError(
                f"config: head_dim={head_dim} is odd, rotary embedding needs pairs"
            )
        return {
            "hidden_size": hidden,
            "intermediate_size": self.integer("intermediate_size", 1 << 22),
            "layers": self.integer("num_hidden_layers", 1 << 10),
            "heads": heads,
            "kv_heads": kv_heads,
            "head_dim": head_dim,
            "vocab_size": self.integer("vocab_size", 1 << 24),
            "context_length": self.integer("max_position_embeddings", _MAX_CONTEXT),
        }

    def rope_theta(self, default: float) -> float:
        """Base of a plain rotary embedding, from either spelling; every scaling is refused."""
        theta = _theta("rope_theta", self._get("rope_theta", default))
        for key in ("rope_scaling", "rope_parameters"):
            rope = self._get(key, None)
            if rope is None:
                continue
            if not isinstance(rope, Mapping):
                raise CheckpointError(f"config: {key}={rope!r} is not an object")
            kind = rope.get("rope_type", rope.get("type", "default"))
            if kind not in ("default", None):
                raise CheckpointError(f"config: {key} of type {kind!r} is not supported")
            theta = self._merged_theta(key, rope, theta)
        return theta

    def _merged_theta(self, key: str, rope: Mapping[str, Any], theta: float) -> float:
        unknown = sorted(set(rope) - {"rope_type", "type", "rope_theta"})
        if unknown:
            raise CheckpointError(f"config: {key}.{unknown[0]!r} is not supported")
        if "rope_theta" not in rope:
            return theta
        found = _theta(f"{key}.rope_theta", rope["rope_theta"])
        if "rope_theta" in self._config and found != theta:
            raise CheckpointError(
                f"config: rope_theta={theta} contradicts {key}.rope_theta={found}"
            )
        return found

    def finish(self) -> None:
        """Refuse keys that nobody read."""
        unknown = sorted(set(self._config) - self._read - HARMLESS)
        if unknown:
            key = unknown[0]
            raise CheckpointError(
                f"config: {key!r}={self._config[key]!r} is not known for model_type "
                f"{self._config.get('model_type')!r}"
            )

    def _get(self, key: str, default: Any) -> Any:
        self._read.add(key)
        value = self._config.get(key)
        if value is None:
            value = default
        if value is _REQUIRED:
            raise CheckpointError(f"config: {key} is missing")
        return value


def _theta(key: str, value: Any) -> float:
    """Below 1 a base would turn the higher dimensions faster than the first, not slower."""
    if type(value) not in (int, float) or not 1 <= value <= sys.float_info.max:
        raise CheckpointError(f"config: {key}={value!r} is not a finite number from 1 on")
    return float(value)
