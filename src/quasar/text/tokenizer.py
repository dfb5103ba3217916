"""Text to tokens and back, chat templates included, from tokenizer.json or GGUF metadata."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import tokenizers

from quasar.errors import CheckpointError, UsageError
from quasar.files import read_json, read_regular
from quasar.text.encoder import Encoder, parse
from quasar.text.ggml import Vocabulary, build_tokenizer
from quasar.text.pieces import token_pieces
from quasar.text.template import ChatTemplate

_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token")
_MAX_FILE = 64 << 20
_MAX_ID = 1 << 31


class TokenizerSource(Protocol):
    """What a checkpoint tells about its tokenizer."""

    path: Path
    config: Mapping[str, Any]
    generation_config: Mapping[str, Any]
    tokenizer_metadata: Mapping[str, Any] | None


class Tokenizer:
    """A `tokenizers.Tokenizer` with its special tokens, end tokens and chat template."""

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        config: Mapping[str, Any],
        generation: Mapping[str, Any],
        model_vocab_size: int,
    ) -> None:
        """`config`: the keys of tokenizer_config.json, `chat_template` resolved to one text.

        `generation`: those of generation_config.json, `eos_token_id` a list of every end token.
        `model_vocab_size` bounds what `encode` may return: some tokenizers know more tokens than
        their model has embeddings.
        """
        self._tokenizer = tokenizer
        self._config = config
        self._generation = generation
        self.eos_ids = frozenset(generation["eos_token_id"])
        self._limit = model_vocab_size
        # First of all: it refuses ids so large that the library's writing of them never ends.
        self.pieces, self.strips_space = token_pieces(tokenizer)
        self._encoder = Encoder(tokenizer)
        self.special_ids = frozenset(
            index for index, added in tokenizer.get_added_tokens_decoder().items() if added.special
        )
        source = config.get("chat_template")
        self._template = None if source is None else ChatTemplate(source)

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id."""
        return len(self.pieces)

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids; special tokens written out in the text are recognised.

        `add_special_tokens` adds BOS and EOS if the model wants them.
        """
        try:
            text.encode()
        except UnicodeEncodeError:
            raise UsageError("the text holds lone surrogates, which no tokenizer accepts") from None
        ids = self._encoder.encode(text, add_special_tokens)
        if ids and max(ids) >= self._limit:
            token = self._tokenizer.id_to_token(max(ids))
            raise UsageError(f"the text holds {token!r}, a token that the model does not have")
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of the tokens. Bytes that are not UTF-8 become U+FFFD, ids without text nothing."""
        text = b"".join(self.piece(i, skip_special_tokens) for i in ids).decode("utf-8", "replace")
        return text.removeprefix(" ") if self.strips_space else text

    def piece(self, token: int, skip_special_tokens: bool = True) -> bytes:
        """The bytes of one token; empty for ids without text (padding of the embedding)."""
        if skip_special_tokens and token in self.special_ids:
            return b""
        return self.pieces[token] if 0 <= token < len(self.pieces) else b""

    def chat(
        self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True
    ) -> list[int]:
        """Token ids of a conversation. The template alone decides about BOS, as in training."""
        return self.encode(self.render(messages, add_generation_prompt), add_special_tokens=False)

    def render(
        self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """The chat template's text for `messages` of {"role", "content"}."""
        if self._template is None:
            raise UsageError("the model has no chat template: use raw prompts (--raw)")
        special = {key: _content(self._config[key]) for key in _SPECIAL if self._config.get(key)}
        return self._template.render(
            {
                "messages": [dict(message) for message in messages],
                "add_generation_prompt": add_generation_prompt,
                "tools": None,
                "documents": None,
                **special,
            }
        )

    def save(self, folder: Path) -> None:
        """Write tokenizer.json, tokenizer_config.json (with the chat template) and
        generation_config.json, as transformers and vLLM load them. OSError if the disk fails.
        """
        layout = self._tokenizer.to_str(pretty=True)
        (folder / "tokenizer.json").write_text(layout, encoding="utf-8")
        config = {k: v for k, v in self._config.items() if k != "auto_map"}
        _write(folder / "tokenizer_config.json", config)
        _write(folder / "generation_config.json", self._generation)


def load_tokenizer(checkpoint: TokenizerSource) -> Tokenizer:
    """The tokenizer of an opened checkpoint. CheckpointError if it is missing or not supported."""
    if checkpoint.tokenizer_metadata is not None:
        return _from_gguf(checkpoint, checkpoint.tokenizer_metadata)
    return _from_folder(checkpoint)


def _from_gguf(checkpoint: TokenizerSource, metadata: Mapping[str, Any]) -> Tokenizer:
    where = str(checkpoint.path)
    vocabulary = Vocabulary(metadata, where)
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": vocabulary.add_bos,
        "add_eos_token": vocabulary.add_eos,
        "clean_up_tokenization_spaces": False,
    }
    generation: dict[str, Any] = {"eos_token_id": sorted(vocabulary.end_ids())}
    for key, name in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        index = vocabulary.special(name)
        if index is not None:
            config[f"{key}_token"] = vocabulary.tokens[index]
            generation.setdefault(f"{key}_token_id", index)
    template = metadata.get("tokenizer.chat_template")
    if template is not None:
        config["chat_template"] = _template(template, where)
    tokenizer = build_tokenizer(vocabulary)
    return Tokenizer(tokenizer, config, generation, _vocab_size(checkpoint))


def _from_folder(checkpoint: TokenizerSource) -> Tokenizer:
    folder = checkpoint.path
    path = tokenizer_file(folder)
    tokenizer = parse(_read(path), str(path))
    config = _read_object(folder / "tokenizer_config.json")
    for key, value in _read_object(folder / "special_tokens_map.json").items():
        config.setdefault(key, value)
    jinja = folder / "chat_template.jinja"
    if jinja.exists():
        config["chat_template"] = _read(jinja)
    if config.get("chat_template") is not None:
        config["chat_template"] = _template(config["chat_template"], str(folder))
    eos = tokenizer.token_to_id(_content(config.get("eos_token")) or "")
    ids = {*_ids(checkpoint, "config"), *_ids(checkpoint, "generation_config")}
    if eos is not None:
        ids.add(eos)
    generation = {**checkpoint.generation_config, "eos_token_id": sorted(ids)}
    return Tokenizer(tokenizer, config, generation, _vocab_size(checkpoint))


def tokenizer_file(folder: Path) -> Path:
    """The folder's tokenizer.json, or what to do about it: some models come with another form."""
    path = folder / "tokenizer.json"
    if not path.exists():
        raise CheckpointError(
            f"{folder} has no tokenizer.json; let transformers write one: AutoTokenizer."
            "from_pretrained(MODEL).save_pretrained(FOLDER), or take the model as a GGUF file"
        )
    return path


def _vocab_size(checkpoint: TokenizerSource) -> int:
    size = checkpoint.config.get("vocab_size")
    if type(size) is not int:
        raise CheckpointError(f"{checkpoint.path}: vocab_size is {size!r}")
    return size


def _ids(checkpoint: TokenizerSource, part: str) -> list[int]:
    value = getattr(checkpoint, part).get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(index) is int and 0 <= index < _MAX_ID for index in ids):
        raise CheckpointError(f"{checkpoint.path}: {part} has eos_token_id {value!r}")
    return ids


def _template(value: Any, where: str) -> str:
    """The one template, or the one called `default` of a list of named ones."""
    if isinstance(value, list):
        named = {t.get("name"): t.get("template") for t in value if isinstance(t, dict)}
        value = named.get("default")
    if not isinstance(value, str):
        raise CheckpointError(f"{where}: chat_template is no text and has none called 'default'")
    return value


def _content(token: Any) -> str | None:
    """tokenizer_config.json writes a special token as a text or as an object with `content`."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _read_object(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _read(path: Path) -> str:
    try:
        return read_regular(path, _MAX_FILE).decode()
    except UnicodeDecodeError as error:
        raise CheckpointError(f"cannot read {path}: {error}") from None


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
