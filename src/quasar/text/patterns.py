"""The regular expressions that split text into words before BPE, of the models that we know.

Each takes linear time on any text. Expressions of a tokenizer.json that are not among them may take
exponential time; see `encoder.py`.
"""

from __future__ import annotations

_CONTRACTIONS = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_ANY_CASE = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"


def _modern(digits: str, contractions: str = _CONTRACTIONS) -> str:
    """Contractions, words with one leading mark, digits, marks with line ends, white space."""
    words = r"|[^\r\n\p{L}\p{N}]?\p{L}+|"
    return contractions + words + digits + r"| ?[^\s\p{L}\p{N}]+[\r\n]*" + _SPACES


def _cased(digits: str, end: str = "") -> str:
    """Words split where the case changes, as in o200k."""
    word = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]%s[\p{Ll}\p{Lm}\p{Lo}\p{M}]%s"
    words = word % ("*", "+") + end + "|" + word % ("+", "*") + end
    return words + "|" + digits + r"| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _SPACES


_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?((?=[\p{L}])([^a-z]))*((?=[\p{L}])([^A-Z]))+"
    r"|[^\r\n\p{L}\p{N}]?((?=[\p{L}])([^a-z]))+((?=[\p{L}])([^A-Z]))*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _SPACES
)
_DEEPSEEK = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*" + _SPACES
)
BY_NAME: dict[str, tuple[str, ...]] = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
    "gpt-2": (GPT2,),
    "smollm": (r"\p{N}", GPT2),
    "qwen2": (_modern(r"\p{N}"),),
    "llama-bpe": (_modern(r"\p{N}{1,3}"),),
    "smaug-bpe": (_modern(r"\p{N}{1,3}"),),
    "tekken": (_TEKKEN,),
}
"""By the name that GGUF files give them in `tokenizer.ggml.pre`."""

KNOWN = frozenset(
    {
        *(pattern for patterns in BY_NAME.values() for pattern in patterns),
        *(_modern(digits, _ANY_CASE) for digits in (r"\p{N}", r"\p{N}{1,3}")),
        _modern(r"\p{N}", _ANY_CASE)
        .replace(r"\p{L}+", r"[\p{L}\p{M}]+")
        .replace(r"[^\s\p{L}\p{N}]+", r"[^\s\p{L}\p{M}\p{N}]+"),
        *(_cased(r"\p{N}"), _cased(r"\p{N}{1,3}", f"{_ANY_CASE}?")),
        *(_DEEPSEEK, GPT2 + r"|\s+", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"),
        *(r"\p{N}{1,3}", r"\d", r"\d+", "[0-9]", r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+"),
    }
)
"""All that may be used without limits."""
