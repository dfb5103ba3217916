"""Reading config.json by whitelist: every key is understood, known to be harmless, or refused.

A key nobody looked at may change the mathematics, so `ConfigReader.finish` refuses it by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from quasar.errors import CheckpointError
from quasar.models.families.rope import MAX_CONTEXT, Rope, RopeReader

HARMLESS = frozenset(
    {
        "_attn_implementation_autoset",
        "_commit_hash",
        "_name_or_path",
        "architectures",
        "attention_dropout",
        "attn_implementation",
        "auto_map",
        "bad_words_ids",
        "bos_token_id",
        "cache_implementation",
        "chunk_size_feed_forward",
        "classifier_dropout",
        "do_sample",
        "dtype",
        "early_stopping",
        "embd_pdrop",
        "eos_token_id",
        "finetuning_task",
        "gradient_checkpointing",
        "id2label",
        "initializer_range",
        "is_llama_config",
        "is_decoder",
        "label2id",
        "length_penalty",
        "max_length",
        "max_sequence_length",
        "min_length",
        "model_type",
        "no_repeat_ngram_size",
        "num_beams",
        "num_return_sequences",
        "output_attentions",
        "output_hidden_states",
        "output_scores",
        "pad_token_id",
        "pretraining_tp",
        "problem_type",
        "quantization_config",
        "quasar",
        "repetition_penalty",
        "resid_pdrop",
        "return_dict",
        "return_dict_in_generate",
        "sep_token_id",
        "task_specific_params",
        "temperature",
        "tokenizer_class",
        "top_k",
        "top_p",
        "torch_dtype",
        "torchscript",
        "transformers.js_config",
        "transformers_version",
        "typical_p",
        "unk_token_id",
        "unsloth_fixed",
        "unsloth_version",
        "use_bfloat16",
        "use_cache",
    }
)
"""Keys that inform, train, load or sample: none enters a forward pass. No code is ever loaded."""

INERT: Mapping[str, Any] = {
    "add_cross_attention": False,
    "is_causal": True,
    "is_encoder_decoder": False,
    "mlp_bias": False,
    "pruned_heads": {},
    "rope_interleaved": False,
    "tie_encoder_decoder": False,
    "use_bidirectional_attention": False,
    "use_mrope": False,
    "use_sliding_window": False,
}
"""What a family need not know, as long as the config says that it is not so."""

_REQUIRED: Any = object()
_MAX_HEAD_DIM = 1024


class Sizes(TypedDict):
    """The sizes that every decoder has, by ModelConfig's names."""

    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int


class ConfigReader:
    """The keys of one config.json; each is read once, checked, and ticked off."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config
        self._read: set[str] = set()

    def integer(self, key: str, most: int, default: Any = _REQUIRED, least: int = 1) -> int:
        """An integer in least..most."""
        value = self._get(key, default)
        if type(value) is not int or not least <= value <= most:
            raise CheckpointError(f"config: {key}={value!r} is not an integer in {least}..{most}")
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

    def optional(self, key: str) -> Any:
        """The value, not checked; None where the key is absent."""
        return self._get(key, None)

    def exactly(self, key: str, *allowed: Any) -> None:
        """A key that may be absent, else must have one of the values that change nothing."""
        value = self._get(key, allowed[0])
        if value not in allowed:
            raise CheckpointError(f"config: {key}={value!r} is not supported")

    def ignore(self, *keys: str) -> None:
        """Keys without effect given what was read before."""
        self._read.update(keys)

    def sizes(self, head_dim: int | None = None, kv_heads: int | None = None) -> Sizes:
        """All sizes, checked against each other; the arguments are the family's own defaults."""
        hidden = self.integer("hidden_size", 1 << 20)
        heads = self.integer("num_attention_heads", 1 << 12)
        kv_heads = self.integer("num_key_value_heads", heads, kv_heads or heads)
        if heads % kv_heads:
            raise CheckpointError(
                f"config: num_attention_heads={heads} is no multiple of "
                f"num_key_value_heads={kv_heads}"
            )
        return {
            "hidden_size": hidden,
            "intermediate_size": self.integer("intermediate_size", 1 << 22),
            "layers": self.integer("num_hidden_layers", 1 << 10),
            "heads": heads,
            "kv_heads": kv_heads,
            "head_dim": self._head_dim(hidden, heads, head_dim),
            "vocab_size": self.integer("vocab_size", 1 << 24),
        }

    def _head_dim(self, hidden: int, heads: int, default: int | None) -> int:
        if default is None:
            if self._config.get("head_dim") is None and hidden % heads:
                raise CheckpointError(
                    f"config: hidden_size={hidden} is no multiple of num_attention_heads={heads}"
                )
            default = hidden // heads
        head_dim = self.integer("head_dim", _MAX_HEAD_DIM, default)
        if head_dim % 2:
            raise CheckpointError(
                f"config: head_dim={head_dim} is odd, rotary embedding needs pairs"
            )
        return head_dim

    def rope(self, theta: float, head_dim: int, partial: bool = False) -> Rope:
        """Rotary settings from either spelling, and the context; `theta` is the default base.

        An unknown kind or key of scaling is refused, and so are heads rotated in part unless the
        family knows them (`partial`).
        """
        reader = self.rope_reader(
            {key: self.optional(key) for key in ("rope_scaling", "rope_parameters")}, head_dim
        )
        return reader.read(theta, partial)

    def rope_reader(
        self, parts: Mapping[str, Any], head_dim: int, theta: str = "rope_theta"
    ) -> RopeReader:
        """Settings in these objects and in the keys beside them; `theta` names that of the base."""
        beside = {
            "partial_rotary_factor": self.optional("partial_rotary_factor"),
            "original_max_position_embeddings": self.optional("original_max_position_embeddings"),
        }
        context = self.integer("max_position_embeddings", MAX_CONTEXT)
        reader = RopeReader(context, head_dim)
        reader.add(theta, "rope_theta", self.optional(theta))
        for where, part in {"": beside, **parts}.items():
            reader.add_all(where, part)
        return reader

    def window(self, absent: int | None) -> int | None:
        """`sliding_window`; null is none, an absent key stands for `absent`."""
        if "sliding_window" not in self._config:
            return absent
        if self.optional("sliding_window") is None:
            return None
        return self.integer("sliding_window", MAX_CONTEXT)

    def local_layers(self, default: Sequence[bool]) -> list[bool]:
        """By layer whether its attention is local, from `layer_types` where the config has it."""
        kinds = self.optional("layer_types")
        if kinds is None:
            return list(default)
        known = {"full_attention": False, "sliding_attention": True}
        if not isinstance(kinds, list) or len(kinds) != len(default):
            raise CheckpointError(f"config: layer_types is not a list of {len(default)} names")
        for kind in kinds:
            if not isinstance(kind, str) or kind not in known:
                raise CheckpointError(f"config: layer_types has {kind!r}, which is not supported")
        return [known[kind] for kind in kinds]

    def finish(self) -> None:
        """Refuse keys that nobody read; null says nothing."""
        unread = {k: v for k, v in self._config.items() if k not in self._read | HARMLESS}
        unknown = sorted(k for k, v in unread.items() if v is not None and v != INERT.get(k))
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
