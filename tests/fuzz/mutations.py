"""Damage to files: blind (bytes), and with knowledge of JSON, safetensors, GGUF and templates."""

from __future__ import annotations

import copy
import json
import random
import re
import struct
from collections.abc import Callable
from typing import Any

INTEGERS = (
    *(0, 1, 2, 3, 7, 8, 31, 32, 33, 255, 256),
    *(2**n + d for n in (15, 16, 20, 31, 32, 40, 53, 62, 63, 64) for d in (-1, 0, 1)),
)
DEEP = 40_000


def blind(data: bytes, rng: random.Random, others: list[bytes]) -> bytes:
    """One to four changes of bytes, most of them near the start, where headers are."""
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        data = rng.choice(BLIND)(data, rng, others)
    return data


def _place(data: bytes, rng: random.Random) -> int:
    reach = min(len(data), rng.choice((16, 64, 512, 4096, len(data))))
    return rng.randrange(reach) if reach else 0


def _flip(data: bytes, rng: random.Random, others: list[bytes]) -> bytes:
    if not data:
        return data
    at = _place(data, rng)
    return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]


def _overwrite(data: bytes, rng: random.Random, others: list[bytes]) -> bytes:
    at, noise = _place(data, rng), rng.randbytes(rng.randint(1, 16))
    return data[:at] + noise + data[at + len(noise) :]


def _integer(data: bytes, rng: random.Random, others: list[bytes]) -> bytes:
    at, size = _place(data, rng), rng.choice((1, 2, 4, 8))
    value = (rng.choice(INTEGERS) % 256**size).to_bytes(size, "little")
    return data[:at] + value + data[at + size :]


def _truncate(data: bytes, rng: random.Random, others: list[bytes]) -> bytes:
    return data[: _place(data, rng)]


def _delete(data: bytes, rng: random.Random, others: list[bytes]) -> bytes:
    at = _place(data, rng)
    return data[:at] + data[at + rng.choice((1, 1, 4, 8, 100)) :]


def _insert(data: bytes, rng: random.Random, others: list[bytes]) -> bytes:
    at = _place(data, rng)
    return (
        data[:at] + rng.choice((b"\0", b"\xff" * 8, b"[" * 99, b'"', rng.randbytes(9))) + data[at:]
    )


def _repeat(data: bytes, rng: random.Random, others: list[bytes]) -> bytes:
    at, size = _place(data, rng), rng.choice((1, 8, 64, 1000))
    return data[:at] + data[at : at + size] * rng.choice((2, 3, 50)) + data[at + size :]


def _splice(data: bytes, rng: random.Random, others: list[bytes]) -> bytes:
    other = rng.choice(others)
    return data[: _place(data, rng)] + other[_place(other, rng) :]


BLIND: tuple[Callable[[bytes, random.Random, list[bytes]], bytes], ...] = (
    *(_flip, _overwrite, _integer, _truncate, _delete, _insert, _repeat, _splice),
)


class Raw(str):
    """JSON text that `json` would not write: put in as it is."""


VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 3, 0.5, -0.0, 1e-300, 1e300, "", "x", [], {}, [[]], [None]),
    *(2**31, 2**32, 2**63, 2**64, -(2**63), float("nan"), float("inf"), "0", "1", "true", "<s>"),
    *("../../etc/passwd", "/etc/passwd", "a\0b", "line\nend", "\x1b[31m", "\u2581", "\U0001f600"),
    *("x" * 5000, ["x"] * 500, {"a": {"a": {"a": 1}}}, {"type": "Sequence"}, [1, 2, 3]),
    *(Raw("1e999"), Raw("1" * 5000), Raw("-" + "9" * 400), Raw('"\\ud800"'), Raw('"\\u0000"')),
    *(Raw("[" * DEEP), Raw('{"a":' * DEEP), Raw("[" * 500 + "]" * 500), Raw("1.0"), Raw("01")),
)


def mutate_json(value: Any, rng: random.Random, palette: tuple[Any, ...] = VALUES) -> bytes:
    """The text of `value` after one to four changes of its structure."""
    value = copy.deepcopy(value)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        parent, key = rng.choice(_places(value) or [([value], 0)])
        change = rng.randrange(8)
        if change < 4:
            parent[key] = copy.deepcopy(rng.choice(palette))
        elif change == 4:
            del parent[key]
        elif change == 5:
            other, place = rng.choice(_places(value) or [([value], 0)])
            parent[key] = copy.deepcopy(other[place])
        elif change == 6 and isinstance(parent, dict):
            new = copy.deepcopy(parent[key])
            parent[rng.choice(("", "zz", "a\nb", "type", "\U0001f600", "x" * 999))] = new
        elif isinstance(parent[key], int | float):
            parent[key] = rng.choice((rng.choice(INTEGERS), -parent[key], parent[key] + 1))
    return _text(value, rng)


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) below `value`; of long lists and texts some."""
    found, todo = [], [value]
    while todo and len(found) < 400:
        item = todo.pop()
        keys = list(item) if isinstance(item, dict) else range(len(item))
        for key in list(keys)[:40]:
            found.append((item, key))
            if isinstance(item[key], dict | list):
                todo.append(item[key])
    return found


def _text(value: Any, rng: random.Random) -> bytes:
    raws: list[str] = []

    def mark(item: Any) -> Any:
        if isinstance(item, Raw):
            raws.append(str(item))
            return f"@raw{len(raws) - 1}@"
        if isinstance(item, dict):
            return {key: mark(part) for key, part in item.items()}
        return [mark(part) for part in item] if isinstance(item, list) else item

    text = json.dumps(mark(value), ensure_ascii=rng.random() < 0.5)
    for index, raw in enumerate(raws):
        text = text.replace(f'"@raw{index}@"', raw)
    keys = re.findall(r'"[^"\\]{1,60}":', text[:20_000])
    if len(keys) > 1 and rng.random() < 0.1:  # a key twice
        text = text.replace(*rng.sample(keys, 2), 1)
    return text.encode(errors="surrogatepass")


def mutate_tokenizer(data: bytes, rng: random.Random) -> bytes:
    """Other parts in place of a tokenizer's own, and other values anywhere."""
    layout = json.loads(data)
    for _ in range(rng.choice((0, 1, 1, 1, 2))):
        part, chosen = rng.choice(TOKENIZER_PARTS), copy.deepcopy(rng.choice(COMPONENTS))
        layout[part] = [*layout[part], chosen] if part == "added_tokens" else chosen
    if rng.random() < 0.6:
        return json.dumps(layout).encode()
    return mutate_json(layout, rng, (*VALUES, *COMPONENTS * 2))


TOKENIZER_PARTS = (
    "normalizer",
    "pre_tokenizer",
    "post_processor",
    "decoder",
    "model",
    "added_tokens",
)


def mutate_safetensors(data: bytes, rng: random.Random) -> bytes:
    """The header changed as JSON, its length right or wrong."""
    length = int.from_bytes(data[:8], "little")
    header = mutate_json(json.loads(data[8 : 8 + length]), rng, (*VALUES, *TENSOR_VALUES))
    told = len(header)
    if rng.random() < 0.15:
        told = rng.choice((*INTEGERS, told - 1, told + 1)) % 2**64
    body = data[8 + length :]
    if rng.random() < 0.2:
        body = blind(body, rng, [data])
    return told.to_bytes(8, "little") + header + body


TENSOR_VALUES: tuple[Any, ...] = (
    *("F64", "F32", "F16", "BF16", "I64", "I8", "U8", "BOOL", "F8_E4M3", "C64", "f32"),
    *([0], [-1], [1], [2**62, 4], [2**40] * 3, [1] * 9, [1] * 5000, [1.5], [True], [32, 32]),
    *([0, 4], [4, 0], [0, 2**64], [-4, 0], [0, 0], [2**63, 2**63 + 4], [0.0, 4.0], [0, 4, 8]),
    *({"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, {"format": "pt"}),
)


def gguf_fields(data: bytes) -> list[tuple[int, int]]:
    """(offset, size) of every count, length, type, dimension and offset of a sound GGUF file."""
    fields = [(4, 4), (8, 8), (16, 8)]
    tensors, entries = struct.unpack_from("<QQ", data, 8)
    at = 24
    sizes = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}

    def text(at: int) -> int:
        fields.append((at, 8))
        return at + 8 + struct.unpack_from("<Q", data, at)[0]

    for _ in range(entries):
        at = text(at)
        kind = struct.unpack_from("<I", data, at)[0]
        fields.append((at, 4))
        at += 4
        count = 1
        if kind == 9:
            fields += [(at, 4), (at + 4, 8)]
            kind, count = struct.unpack_from("<IQ", data, at)
            at += 12
        if kind == 8:
            for _ in range(count):
                at = text(at)
        else:
            fields.append((at, sizes[kind]))
            at += sizes[kind] * count
    for _ in range(tensors):
        at = text(at)
        rank = struct.unpack_from("<I", data, at)[0]
        fields.append((at, 4))
        fields += [(at + 4 + 8 * axis, 8) for axis in range(rank)]
        at += 4 + 8 * rank
        fields += [(at, 4), (at + 4, 8)]
        at += 12
    return fields


def mutate_gguf(data: bytes, rng: random.Random, fields: list[tuple[int, int]]) -> bytes:
    """One to four numbers of the header set to extremes, to neighbours or to each other."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at, size = rng.choice(fields)
        old = int.from_bytes(changed[at : at + size], "little")
        other_at, other_size = rng.choice(fields)
        other = int.from_bytes(changed[other_at : other_at + other_size], "little")
        value = rng.choice(
            (rng.choice(INTEGERS), old + 1, old - 1, old * 2, other, rng.randrange(40))
        )
        changed[at : at + size] = (value % 256**size).to_bytes(size, "little")
    return bytes(changed)


REGEXES = (
    *(
        r"(a+)+$",
        r"(a|aa)+$",
        r"(?:.*)*x",
        r"\p{L}+" * 300,
        "(" * 300 + ")" * 300,
        r"a{99999}{99999}",
    ),
    *(
        r"\s+(?!\S)",
        r"\p{N}{1,3}",
        "[",
        "(?<",
        r"\1",
        "",
        "|",
        "^",
        r"(?=a)",
        r"(?<=a+)",
        "x" * 9999,
    ),
)
COMPONENTS: tuple[Any, ...] = (
    *(
        {"type": kind}
        for kind in ("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "Nmt")
    ),
    *({"type": "Replace", "pattern": {"Regex": r}, "content": "aa"} for r in REGEXES),
    *(
        {"type": "Split", "pattern": {"Regex": r}, "behavior": "Isolated", "invert": False}
        for r in REGEXES
    ),
    {
        "type": "Sequence",
        "normalizers": [{"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}] * 40,
    },
    {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "x" * 999}] * 99},
    {"type": "Sequence", "pretokenizers": []},
    {"type": "Sequence", "decoders": []},
    {"type": "Precompiled", "precompiled_charsmap": "AAAA"},
    {"type": "Precompiled", "precompiled_charsmap": "/////wAAAAAAAA=="},
    {"type": "Precompiled", "precompiled_charsmap": "CAAAAAEAAAD/////"},
    {"type": "Strip", "strip_left": True, "strip_right": True},
    {"type": "Strip", "content": " ", "start": 2**40, "stop": 0},
    {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "lowercase": True},
    {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True},
    {"type": "Metaspace", "replacement": "ab", "add_prefix_space": True},
    {"type": "FixedLength", "length": 0},
    {"type": "Digits", "individual_digits": True},
    {"type": "CharDelimiterSplit", "delimiter": "a"},
    *(
        {"type": kind}
        for kind in ("Whitespace", "WhitespaceSplit", "BertPreTokenizer", "UnicodeScripts")
    ),
    *({"type": kind} for kind in ("ByteFallback", "Fuse", "BPEDecoder", "WordPiece", "CTC")),
    {"type": "Punctuation", "behavior": "Removed"},
    {
        "type": "TemplateProcessing",
        "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 500,
        "pair": [],
        "special_tokens": {},
    },
    {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "no", "type_id": 0}}],
        "pair": [],
        "special_tokens": {},
    },
    {"type": "BertProcessing", "sep": ["[SEP]", 2**31], "cls": ["[CLS]", 0]},
    {
        "type": "RobertaProcessing",
        "sep": ["</s>", 2],
        "cls": ["<s>", 0],
        "trim_offsets": True,
        "add_prefix_space": True,
    },
    {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "<unk>"},
    {
        "type": "WordPiece",
        "vocab": {"a": 0},
        "unk_token": "x",
        "continuing_subword_prefix": "##",
        "max_input_chars_per_word": 2**40,
    },
    {"type": "Unigram", "unk_id": 0, "vocab": [["a", -1.0], ["b", 1e300]], "byte_fallback": True},
    {"type": "Unigram", "unk_id": 9, "vocab": [["a", -1.0]]},
    {"type": "Unigram", "unk_id": None, "vocab": []},
    {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]] * 9, "dropout": 0.5},
    {"type": "BPE", "vocab": {"a": 2**32 - 2}, "merges": []},
    {
        "type": "BPE",
        "vocab": {"a": 0},
        "merges": ["a", "a a a"],
        "unk_token": "b",
        "fuse_unk": True,
    },
    {"type": "BPE", "vocab": {"": 0}, "merges": [["", ""]]},
    {
        "id": 2**32 - 1,
        "content": "z",
        "single_word": False,
        "lstrip": True,
        "rstrip": True,
        "normalized": True,
        "special": True,
    },
    {
        "id": 1,
        "content": "",
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": False,
    },
    {"direction": "Right", "max_length": 0, "strategy": "LongestFirst", "stride": 9},
    {
        "strategy": {"Fixed": 2**33},
        "direction": "Left",
        "pad_to_multiple_of": 0,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "x",
    },
)

SNIPPETS = (
    *("{{ 'x' * 10**9 }}", "{{ [0] * 10**9 }}", "{{ 9**9**9 }}", "{{ '%999999999d' % 1 }}"),
    *(
        "{{ range(10**9)|list }}",
        "{{ range(99999)|join('x' * 9999) }}",
        "{{ '{:>{w}}'.format(1, w=10**9) }}",
    ),
    *("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "{{ x }}"),
    *(
        "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    ),
    *(
        "{{ cycler.__init__.__globals__.os.system('id') }}",
        "{{ lipsum.__globals__ }}",
        "{{ self.__init__ }}",
    ),
    *(
        "{{ '{0.__class__}'.format(x) }}",
        "{{ ('{0.__class__}'|attr('format'))(x) }}",
        "{{ messages.pop() }}",
    ),
    *(
        "{{ messages[0].content.encode() }}",
        "{{ raise_exception('a\\nb') }}",
        "{{ strftime_now('%Y' * 9999) }}",
    ),
    *(
        "{{ x|tojson(indent=10**8) }}",
        "{{ messages|tojson(indent=4) }}",
        "{{ '\\ud800' }}",
        "{{ '\\x00' }}",
    ),
    *(
        "{% set ns = namespace(a=[1]) %}",
        "{% set ns.a = ns.a + ns.a %}",
        "{{ ns.a|length }}",
        "{% endfor %}",
    ),
    *(
        "{% if true %}",
        "{% endif %}",
        "{{ ",
        " }}",
        "{% ",
        " %}",
        "{# ",
        "{{ messages }}",
        "{{ 1/0 }}",
    ),
    *(
        "{{ messages|map(attribute='role')|list }}",
        "{{ 'a'.join(['b'] * 10**8) }}",
        "{{ " + "(" * 999,
    ),
    *("{{ " + "not " * 9999 + "1 }}", "{{ [" * 200, "{% include 'x' %}", "{% extends messages %}"),
    *(
        "{{ 'a'|center(10**9) }}",
        "{{ 'a'|indent(10**9) }}",
        "{{ ('a'*9999)|wordwrap(1) }}",
        "{{ dict(a=1) }}",
    ),
    *(
        "{{ messages|groupby('role') }}",
        "{{ 'x'|replace('', 'y' * 10**6) }}",
        "{{ loop }}",
        "{{ 1e999|int }}",
    ),
)


def mutate_template(text: str, rng: random.Random) -> bytes:
    """Snippets put in, or bytes changed."""
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(len(text) + 1)
        text = text[:at] + rng.choice(SNIPPETS) + text[at + rng.choice((0, 0, 5, 50)) :]
    data = text.encode(errors="surrogatepass")
    return blind(data, rng, [data]) if rng.random() < 0.3 else data
