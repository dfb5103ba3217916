"""Tokenizers from GGUF metadata (`tokenizer.ggml.*`), equal to llama.cpp's on the same file.

`gpt2` is byte-level BPE behind a pre-tokeniser named by `tokenizer.ggml.pre`; `llama` is
SentencePiece BPE with byte fallback, its merges implied by the scores: of all neighbours whose
concatenation is a piece, the one of the highest score merges first. No Unicode normalisation takes
place, even where a model's tokenizer.json calls for NFC: llama.cpp does none. One difference is
meant: llama.cpp recognises normal tokens that read like end tokens (`</s>` in Qwen's vocabulary) in
any text; here the file's own token types count, as they do in the model's tokenizer.json.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from quasar.errors import CheckpointError
from quasar.text.panics import contained
from quasar.text.patterns import BY_NAME

_LONGEST_PIECE = 1024
"""Characters. All cuts of a piece are tried, so its time grows with the square of its length."""
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5

_SAME_AS = {
    "dbrx": "smaug-bpe",
    "deepseek-r1-qwen": "qwen2",
    "falcon3": "llama-bpe",
    "llama3": "llama-bpe",
    "llama-v3": "llama-bpe",
    "megrez": "qwen2",
    "mpt": "gpt-2",
    "olmo": "gpt-2",
    "phi-2": "gpt-2",
    "pixtral": "llama-bpe",
    "refact": "smollm",
    "stablelm2": "qwen2",
    "starcoder": "smollm",
}
_WHOLE_WORDS = frozenset({"llama-bpe", "tekken"})
"""Pre-tokenised words that are tokens themselves skip the merges, and BOS is added by default."""

_END_TEXTS = frozenset(
    {
        "<|eot_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|eom_id|>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<end_of_turn>",
        "<EOT>",
        "_<EOT>",
        "[EOT]",
        "</s>",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
    }
)
"""Control tokens that end a text whatever the metadata say; converters often name only one."""


class Vocabulary:
    """The typed lists and ids of `tokenizer.ggml.*`, checked."""

    def __init__(self, metadata: Mapping[str, Any], where: str) -> None:
        self._metadata = metadata
        self.where = where
        self.model = self.get("model", str, "")
        if not self.model:
            raise CheckpointError(f"{where}: tokenizer.ggml.model is missing")
        self.tokens: list[str] = self._strings("tokens")
        self.ids = {token: index for index, token in enumerate(self.tokens)}
        if len(self.ids) != len(self.tokens) or not self.tokens:
            raise CheckpointError(f"{where}: the vocabulary is empty or has a token twice")
        self.kinds: list[int] = self._numbers("token_type", _NORMAL)
        self.pre = self._pre() if self.model == "gpt2" else ""
        by_default = self.model == "llama" or self.pre in _WHOLE_WORDS
        self.add_bos = self.get("add_bos_token", bool, by_default)
        self.add_eos = self.get("add_eos_token", bool, False)
        self.add_space_prefix = self.get("add_space_prefix", bool, self.model == "llama")

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        value = self._metadata.get(f"tokenizer.ggml.{key}", default)
        if type(value) is not kind and value is not default:
            raise CheckpointError(f"{self.where}: tokenizer.ggml.{key} is not a {kind.__name__}")
        return value

    def special(self, name: str) -> int | None:
        """Id of `bos`, `eos`, `eot`, ... or None; outside the vocabulary it is refused."""
        defaults = {"bos": 1, "eos": 2, "unknown": 0} if self.model == "llama" else {}
        index = self.get(f"{name}_token_id", int, defaults.get(name))
        if index is not None and not 0 <= index < len(self.tokens):
            raise CheckpointError(f"{self.where}: {name}_token_id {index} is not in the vocabulary")
        return None if index is None else int(index)

    def end_ids(self) -> set[int]:
        """Every token that ends a text: eos, eot, eom, and control tokens known by their text."""
        named = {self.special(name) for name in ("eos", "eot", "eom")} - {None}
        known = {self.ids[text] for text in _END_TEXTS if text in self.ids}
        return {i for i in named if i is not None} | {i for i in known if self.kinds[i] == _CONTROL}

    def merges(self) -> list[tuple[str, str]]:
        result = []
        for merge in self._strings("merges"):
            left, space, right = merge[1:].partition(" ")
            if not space:
                raise CheckpointError(f"{self.where}: merge {merge!r} is not two tokens")
            result.append((merge[0] + left, right))
        return result

    def without_padding(self, merges: list[tuple[str, str]]) -> dict[str, int]:
        """Ids of all tokens but the unused ones that only fill the embedding, as in [PAD151935]."""
        made = {left + right for left, right in merges}
        return {
            token: index
            for token, index in self.ids.items()
            if self.kinds[index] != _UNUSED or len(token) == 1 or token in made
        }

    def implied_merges(self) -> list[tuple[str, str]]:
        """All splits of each piece into two pieces, by falling score of the whole."""
        scores = self._numbers("scores", 0.0)
        if not all(map(math.isfinite, scores)):
            raise CheckpointError(f"{self.where}: tokenizer.ggml.scores holds NaN or infinities")
        longest = max(self.tokens, key=len)
        if len(longest) > _LONGEST_PIECE:
            raise CheckpointError(f"{self.where}: piece {longest!r} is too long")
        splits: dict[str, list[int]] = {}
        for token in self.tokens:
            cuts = (c for c in range(1, len(token)) if token[:c] in self.ids)
            splits[token] = [c for c in cuts if token[c:] in self.ids]
        merged = [i for i, token in enumerate(self.tokens) if splits[token]]
        merged.sort(key=lambda index: -scores[index])
        for one, other in pairwise(merged):
            if scores[one] == scores[other] and {self.kinds[one], self.kinds[other]} == {_NORMAL}:
                # Then the leftmost pair merges first, which no list of merges can say.
                raise CheckpointError(
                    f"{self.where}: pieces {self.tokens[one]!r} and {self.tokens[other]!r} "
                    "have equal scores, which is not supported"
                )
        return [
            (self.tokens[index][:cut], self.tokens[index][cut:])
            for index in merged
            for cut in splits[self.tokens[index]]
        ]

    def added_tokens(self) -> list[AddedToken]:
        """Tokens found in a text before anything else is done to it, by ascending id."""
        return [
            AddedToken(token, special=kind != _USER_DEFINED, normalized=False)
            for token, kind in zip(self.tokens, self.kinds, strict=True)
            if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
        ]

    def _pre(self) -> str:
        pre = self.get("pre", str, "default")
        pre = _SAME_AS.get(pre, pre)
        if pre not in BY_NAME:
            known = ", ".join(sorted(BY_NAME | _SAME_AS))
            raise CheckpointError(
                f"{self.where}: pre-tokeniser {pre!r} is not supported; supported: {known}"
            )
        return str(pre)

    def _strings(self, key: str) -> list[str]:
        values = self.get(key, list, [])
        if not all(type(value) is str for value in values):
            raise CheckpointError(f"{self.where}: tokenizer.ggml.{key} is not a list of strings")
        return list(values)

    def _numbers(self, key: str, default: float) -> list[Any]:
        values = self.get(key, list, [default] * len(self.tokens))
        if len(values) != len(self.tokens) or any(type(v) not in (int, float) for v in values):
            raise CheckpointError(
                f"{self.where}: tokenizer.ggml.{key} is not one number for each token"
            )
        return list(values)


def build_tokenizer(vocabulary: Vocabulary) -> tokenizers.Tokenizer:
    """The tokenizer that the metadata describe. CheckpointError for an unknown kind."""
    builders = {"gpt2": _byte_level, "llama": _sentencepiece}
    if vocabulary.model not in builders:
        raise CheckpointError(
            f"{vocabulary.where}: tokenizer model {vocabulary.model!r} is not supported; "
            f"supported: {', '.join(sorted(builders))}"
        )
    with contained(f"{vocabulary.where}: malformed vocabulary"):
        tokenizer = builders[vocabulary.model](vocabulary)
        tokenizer.add_special_tokens([t for t in vocabulary.added_tokens() if t.special])
        tokenizer.add_tokens([t for t in vocabulary.added_tokens() if not t.special])
    _add_ends(tokenizer, vocabulary)
    return tokenizer


def _byte_level(vocabulary: Vocabulary) -> tokenizers.Tokenizer:
    whole_words = vocabulary.pre in _WHOLE_WORDS
    merges = vocabulary.merges()
    model = models.BPE(vocabulary.without_padding(merges), merges, ignore_merges=whole_words)
    tokenizer = tokenizers.Tokenizer(model)
    splits = [
        pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in BY_NAME[vocabulary.pre]
    ]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(vocabulary: Vocabulary) -> tokenizers.Tokenizer:
    unknown = vocabulary.special("unknown")
    model = models.BPE(
        vocabulary.ids,
        vocabulary.implied_merges(),
        unk_token=None if unknown is None else vocabulary.tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = tokenizers.Tokenizer(model)
    prepend, strip = [], []
    if vocabulary.add_space_prefix:
        prepend, strip = [normalizers.Prepend("\u2581")], [decoders.Strip(" ", 1, 0)]
    tokenizer.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _add_ends(tokenizer: tokenizers.Tokenizer, vocabulary: Vocabulary) -> None:
    """BOS and EOS around a text that is encoded with special tokens."""
    single: list[str] = ["$A"]
    special: dict[str, int] = {}
    for name, wanted in (("bos", vocabulary.add_bos), ("eos", vocabulary.add_eos)):
        if not wanted:
            continue
        index = vocabulary.special(name)
        if index is None:
            raise CheckpointError(f"{vocabulary.where}: add_{name}_token without a {name}_token_id")
        token = vocabulary.tokens[index]
        single.insert(0 if name == "bos" else len(single), token)
        special[token] = index
    if special:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=single, special_tokens=list(special.items())
        )
