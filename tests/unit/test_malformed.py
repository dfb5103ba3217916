"""Files nobody vouches for: one CheckpointError each, no code runs, nothing is allocated."""

from __future__ import annotations

import json
import os
import struct
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tiny_files
import torch

from quasar.checkpoints import check_tensors, open_checkpoint
from quasar.errors import CheckpointError
from quasar.files import SPARE_BYTES, read_json
from quasar.models.families import parse_config
from quasar.text.tokenizer import load_tokenizer

F32 = int(gguf.GGMLQuantizationType.F32)


def load(path: Path) -> None:
    """Everything that a loader does with a model."""
    checkpoint = open_checkpoint(path)
    parse_config(checkpoint.config)
    check_tensors(checkpoint, tiny_files.shapes())
    for name in checkpoint.names():
        if name.endswith("_proj.weight"):
            checkpoint.linear(name.removesuffix(".weight"))
        else:
            checkpoint.tensor(name)
    load_tokenizer(checkpoint).encode("the cat", add_special_tokens=True)


def refused(path: Path, named: str) -> None:
    with pytest.raises(CheckpointError, match=named) as error:
        load(path)
    assert "\n" not in str(error.value)


def cut_points(size: int, header: int) -> list[int]:
    """Each byte near the start, then a spread over the header and the data."""
    spread = [size * part // 40 for part in range(1, 40)]
    return sorted({*range(0, 40), *range(40, header, max(1, header // 60)), *spread, size - 1})


def test_the_untouched_files_load(tmp_path: Path) -> None:
    load(tiny_files.write_folder(tmp_path / "folder"))
    load(tiny_files.write_sharded(tmp_path / "sharded"))
    load(tiny_files.write_compressed(tmp_path / "compressed"))
    load(tiny_files.write_gguf(tmp_path / "x.gguf"))


def test_truncated_safetensors(tmp_path: Path) -> None:
    folder = tiny_files.write_folder(tmp_path)
    path = folder / "model.safetensors"
    data = path.read_bytes()
    for cut in cut_points(len(data), int.from_bytes(data[:8], "little") + 8):
        path.write_bytes(data[:cut])
        refused(folder, r"model\.safetensors")


def test_truncated_gguf(tmp_path: Path) -> None:
    path = tiny_files.write_gguf(tmp_path / "x.gguf")
    data = path.read_bytes()
    header = len(data) - sum(4 * t.numel() for t in tiny_files.tensors().values())
    for cut in cut_points(len(data), header):
        path.write_bytes(data[:cut])
        refused(path, r"x\.gguf")


def test_truncated_json(tmp_path: Path) -> None:
    folder = tiny_files.write_folder(tmp_path)
    for name in (
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ):
        text = (folder / name).read_bytes()
        for cut in (1, len(text) // 2, len(text) - 2):
            (folder / name).write_bytes(text[:cut])
            refused(folder, name)
        (folder / name).write_bytes(text)


@pytest.mark.parametrize(
    "text",
    [
        b"[]",
        b"null",
        b'{"a":1,"a":2}',
        b"\xff\xfe\x00",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"9" * 9999,
    ],
    ids=["list", "null", "twice", "bytes", "nested lists", "nested objects", "huge number"],
)
def test_json_that_is_no_object(tmp_path: Path, text: bytes) -> None:
    folder = tiny_files.write_folder(tmp_path)
    (folder / "config.json").write_bytes(text)
    refused(folder, r"config\.json")


def safetensors(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(shape: Any, begin: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ((2**63).to_bytes(8, "little"), "header"),
        ((2**64 - 1).to_bytes(8, "little") + b"{}", "header"),
        ((17 << 20).to_bytes(8, "little") + b" " * (17 << 20), "too large"),
        (safetensors(b"{"), "not valid JSON"),
        (safetensors(b'{"a":' * 50_000), "not valid JSON"),
        (safetensors({"a": 1}), "'a' has a malformed"),
        (safetensors({"a": {"dtype": "F32", "shape": [1]}}), "'a' has a malformed"),
        (safetensors({"a": entry([1], 0, 4, "F8_E4M3")}, bytes(4)), "'a' has dtype 'F8_E4M3'"),
        (safetensors({"a": entry([-1], 0, 4)}, bytes(4)), "'a' has the impossible shape"),
        (safetensors({"a": entry([1.5], 0, 4)}, bytes(4)), "'a' has the impossible shape"),
        (safetensors({"a": entry([2**40, 2**40], 0, 4)}, bytes(4)), "'a' of .* bytes"),
        (safetensors({"a": entry([10**4000] * 2, 0, 4)}, bytes(4)), "'a' has the impossible shape"),
        (safetensors({"a": entry([2] * 9999, 0, 4)}, bytes(4)), "'a' has the impossible shape"),
        (safetensors({"a": entry([1], 0, 10**4000)}, bytes(4)), "'a' of 4 bytes"),
        (safetensors({"a": entry([2], 0, 4)}, bytes(4)), "'a' of 8 bytes"),
        (safetensors({"a": entry([1], -4, 0)}, bytes(4)), "'a' of 4 bytes"),
        (safetensors({"a": entry([1], 4, 8)}, bytes(4)), "'a' of 4 bytes"),
        (safetensors({"a": entry([1], 4, 8)}, bytes(8)), "'a' overlaps another or leaves a hole"),
        (
            safetensors({"a": entry([2], 0, 8), "b": entry([1], 4, 8)}, bytes(8)),
            "'b' overlaps another",
        ),
        (safetensors({"a": entry([1], 0, 4)}, bytes(5)), "tensors end at byte"),
    ],
)
def test_malformed_safetensors(tmp_path: Path, content: bytes, named: str) -> None:
    folder = tiny_files.write_folder(tmp_path)
    (folder / "model.safetensors").write_bytes(content)
    refused(folder, named)


def with_tensor(name: str, value: torch.Tensor | None) -> dict[str, torch.Tensor]:
    values = tiny_files.tensors()
    del values[name]
    return values if value is None else values | {name: value}


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (None, f"lacks tensor '{NORM}'"),
        (torch.ones(33), NORM),
        (torch.ones(1, 32), NORM),
        (torch.ones(32, dtype=torch.int32), f"'{NORM}' holds torch.int32"),
        (torch.full((32,), torch.nan), f"'{NORM}' holds NaN"),
        (torch.full((32,), torch.inf, dtype=torch.bfloat16), f"'{NORM}' holds NaN or inf"),
        (torch.full((32,), 3.4e38), f"'{NORM}' holds NaN or inf"),
    ],
    ids=["missing", "size", "rank", "integer", "nan", "infinite", "infinite in bf16"],
)
def test_wrong_tensors(tmp_path: Path, value: torch.Tensor | None, named: str) -> None:
    refused(tiny_files.write_folder(tmp_path, with_tensor(NORM, value)), named)


def test_extra_tensor(tmp_path: Path) -> None:
    values = tiny_files.tensors() | {"model.layers.0.mlp.gate_proj.bias": torch.ones(64)}
    refused(tiny_files.write_folder(tmp_path, values), r"unexpected tensor .*gate_proj\.bias")


def test_a_tied_head_of_the_wrong_type_is_named(tmp_path: Path) -> None:
    """The head differs from the embedding, but the type of the key is what is wrong."""
    config = tiny_files.CONFIG | {"tie_word_embeddings": "true"}
    refused(tiny_files.write_folder(tmp_path, config=config), "tie_word_embeddings='true'")


def test_shards(tmp_path: Path) -> None:
    folder = tiny_files.write_sharded(tmp_path)
    index = folder / "model.safetensors.index.json"
    good = json.loads(index.read_text())
    shard = folder / "model-00002-of-00002.safetensors"
    shard.rename(folder / "gone")
    refused(folder, "model-00002-of-00002")
    (folder / "gone").rename(shard)
    for change, named in (
        ({"lm_head.weight": "../../etc/passwd"}, r"\.\./\.\./etc/passwd"),
        ({"lm_head.weight": "model-00001-of-00002.safetensors"}, r"lacks tensor 'lm_head\.weight'"),
        ({"other": "model-00001-of-00002.safetensors"}, "lacks tensor 'other'"),
        ({"lm_head.weight": 3}, "weight_map"),
    ):
        tiny_files.write_json(index, {"weight_map": {**good["weight_map"], **change}})
        refused(folder, named)
    tiny_files.write_json(index, {"weight_map": []})
    refused(folder, "weight_map")


@pytest.mark.parametrize("scale", [torch.nan, torch.inf, 0.0, -0.5])
def test_scales_that_are_no_positive_numbers(tmp_path: Path, scale: float) -> None:
    values = tiny_files.quantised(tiny_files.tensors(), torch.float32)
    values["model.layers.1.mlp.up_proj.weight_scale"][5] = scale
    refused(tiny_files.write_compressed(tmp_path, values), r"up_proj\.weight_scale.* positive")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"weight_scale": None}, r"lacks tensor .*up_proj\.weight_scale"),
        ({"weight_scale": torch.ones(63, 1)}, r"up_proj\.weight_scale.*\[63, 1\]"),
        ({"weight_scale": torch.ones(64, 2)}, r"up_proj\.weight_scale.*\[64, 2\]"),
        ({"weight_scale": torch.ones(64, 1, dtype=torch.int32)}, r"up_proj\.weight_scale.*int32"),
        ({"weight": torch.ones(64, 32, dtype=torch.uint8)}, r"up_proj\.weight_scale.*no I8"),
        ({"weight": torch.ones(64, 32, dtype=torch.bfloat16)}, r"up_proj\.weight"),
    ],
)
def test_wrong_quantised_tensors(tmp_path: Path, change: dict[str, Any], named: str) -> None:
    values = tiny_files.quantised(tiny_files.tensors(), torch.float32)
    for suffix, value in change.items():
        del values[f"model.layers.1.mlp.up_proj.{suffix}"]
        if value is not None:
            values[f"model.layers.1.mlp.up_proj.{suffix}"] = value
    refused(tiny_files.write_compressed(tmp_path, values), named)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def string_entry(key: str, value: str) -> bytes:
    return text(key) + struct.pack("<I", 8) + text(value)


ARCHITECTURE = string_entry("general.architecture", "llama")


def file(entries: list[bytes], tensors: list[bytes], data: bytes = b"", version: int = 3) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(entries))
    head += b"".join(entries) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + data


def tensor(name: str, sizes: list[int], kind: int = F32, offset: int = 0) -> bytes:
    shape = struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)
    return text(name) + shape + struct.pack("<IQ", kind, offset)


def array(key: str, kind: int, count: int) -> bytes:
    return text(key) + struct.pack("<IIQ", 9, kind, count)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"GGUF" + struct.pack("<IQQ", 3, 2**63, 0), "tensors cannot fit"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1, 2**63), "metadata entries cannot fit"),
        (file([], [], version=1), "version 1"),
        (file([], [], version=0x03000000), "version"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**64 - 1) + bytes(9), "truncated"),
        (file([array("a", 8, 2**62)], []), "'a' cannot fit"),
        (file([array("a", 4, 2**62)], []), "'a' cannot fit"),
        (file([array("a", 9, 1)], []), "'a' has unknown type 9"),
        (file([text("a") + struct.pack("<I", 77)], []), "'a' has unknown type 77"),
        (file([ARCHITECTURE, ARCHITECTURE], []), "'general.architecture' appears twice"),
        (file([], []), "general.architecture is missing"),
        (file([text("a") + struct.pack("<IQ", 8, 2) + b"\xff\xff"], []), "not UTF-8"),
        (
            file([text("general.alignment") + struct.pack("<II", 4, 0)], []),
            "general.alignment is 0",
        ),
        (
            file([text("general.alignment") + struct.pack("<II", 4, 3)], []),
            "general.alignment is 3",
        ),
        (file([ARCHITECTURE], [tensor("t", [1])]), "'t' ends at byte"),
        (file([ARCHITECTURE], [tensor("t", [8], offset=2**40)], bytes(32)), "'t' ends at byte"),
        (file([ARCHITECTURE], [tensor("t", [8], offset=2**64 - 32)], bytes(32)), "'t' ends at"),
        (file([ARCHITECTURE], [tensor("t", [8], offset=4)], bytes(64)), "'t' overlaps .* aligned"),
        (file([ARCHITECTURE], [tensor("t", [2**62, 4])], bytes(32)), "'t' has the impossible"),
        (file([ARCHITECTURE], [tensor("t", [0])], bytes(32)), "'t' has the impossible shape"),
        (file([ARCHITECTURE], [tensor("t", [33], kind=8)], bytes(64)), "'t' has the impossible"),
        (file([ARCHITECTURE], [tensor("t", [32], kind=999)], bytes(64)), "'t' has unknown type"),
        (file([ARCHITECTURE], [tensor("t", [256], kind=15)], bytes(512)), "Q8_K"),
        (file([ARCHITECTURE], [tensor("t", [])], bytes(32)), "'t' has 0 dimensions"),
        (file([ARCHITECTURE], [tensor("t", [1] * 5)], bytes(32)), "'t' has 5 dimensions"),
        (file([ARCHITECTURE], [tensor("t", [8])] * 2, bytes(64)), "'t' appears twice"),
        (
            file([ARCHITECTURE], [tensor("t", [16]), tensor("u", [8], offset=32)], bytes(64)),
            "'u' overlaps",
        ),
        (
            file([ARCHITECTURE, text("split.count") + struct.pack("<IH", 2, 3)], []),
            "one part of a split model",
        ),
    ],
)
def test_malformed_gguf(tmp_path: Path, content: bytes, named: str) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        refused(path, named)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("number", ["1" * 5000, "1000000", "\u0661"])
def test_gguf_layer_numbers_that_are_none(tmp_path: Path, number: str) -> None:
    """The name stays as it is, so that no model expects it."""
    path, name = tmp_path / "x.gguf", f"blk.{number}.attn_norm.weight"
    path.write_bytes(file([ARCHITECTURE], [tensor(name, [8])], bytes(32)))
    checkpoint = open_checkpoint(path)
    assert checkpoint.names() == (name,)
    with pytest.raises(CheckpointError, match=r"unexpected tensor 'blk\."):
        check_tensors(checkpoint, {})


def test_gguf_with_nan_scales(tmp_path: Path) -> None:
    writer = tiny_files.start_gguf(tmp_path / "x.gguf")
    block = np.zeros((32, 34), np.uint8)
    block[3, :2] = np.array([np.nan], np.float16).view(np.uint8)
    writer.add_tensor("blk.0.attn_output.weight", block, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    tiny_files.finish_gguf(writer)
    checkpoint = open_checkpoint(tmp_path / "x.gguf")
    with pytest.raises(CheckpointError, match=r"x\.gguf.*o_proj\.weight' holds NaN"):
        checkpoint.linear("model.layers.0.self_attn.o_proj")


def test_gguf_rows_that_do_not_fit_the_heads(tmp_path: Path) -> None:
    writer = tiny_files.start_gguf(tmp_path / "x.gguf")
    writer.add_tensor("blk.0.attn_q.weight", np.ones((30, 32), np.float32))
    tiny_files.finish_gguf(writer)
    checkpoint = open_checkpoint(tmp_path / "x.gguf")
    with pytest.raises(CheckpointError, match=r"q_proj\.weight' does not fit 4 heads"):
        checkpoint.linear("model.layers.0.self_attn.q_proj")


def test_damaged_headers_never_escape(tmp_path: Path) -> None:
    """Random bytes changed in the headers: either still a model or one CheckpointError."""
    random = np.random.default_rng(0)
    folder = tiny_files.write_folder(tmp_path / "folder")
    for path, target in (
        (folder / "model.safetensors", folder),
        (folder / "tokenizer.json", folder),
        (tiny_files.write_gguf(tmp_path / "x.gguf"), tmp_path / "x.gguf"),
    ):
        good = path.read_bytes()
        reach = min(len(good), 6000)
        for _ in range(150):
            damaged = bytearray(good)
            for position in random.integers(0, reach, random.integers(1, 4)):
                damaged[position] = random.integers(0, 256)
            path.write_bytes(damaged)
            try:
                load(target)
            except CheckpointError as error:
                assert str(error)
        path.write_bytes(good)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickle_files_are_refused(tmp_path: Path, name: str) -> None:
    folder = tiny_files.write_folder(tmp_path)
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(b"cos\nsystem\n(S'touch pwned'\ntR.")
    refused(folder, f"{name}, a pickle .* convert the model to safetensors")
    refused(folder / name, "pickle .* convert the model to safetensors")


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda path: path / "absent", "absent"),
        (lambda path: path, r"config\.json"),
        (lambda path: _touch(path / "empty.gguf"), "neither a model folder nor a GGUF"),
        (lambda path: _touch(path / "model.safetensors"), "give the folder it lies in"),
    ],
    ids=["absent", "empty folder", "empty file", "safetensors file"],
)
def test_paths_that_are_no_model(tmp_path: Path, make: Callable[[Path], Path], named: str) -> None:
    refused(make(tmp_path), named)


def _touch(path: Path) -> Path:
    path.touch()
    return path


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "chat_template.jinja",
    ],
)
@pytest.mark.parametrize("special", ["pipe", "/dev/zero"])
def test_special_files_in_a_folder_are_refused(tmp_path: Path, name: str, special: str) -> None:
    """Reading a pipe would block, reading this device would never end."""
    folder = tiny_files.write_folder(tmp_path)
    (folder / name).unlink(missing_ok=True)
    if special == "pipe":
        os.mkfifo(folder / name)
    else:
        (folder / name).symlink_to(special)
    refused(folder, rf"{name} is not a regular file")


def test_special_files_are_no_model(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    refused(tmp_path / "pipe.gguf", r"pipe\.gguf is not a regular file")
    refused(Path("/dev/zero"), "/dev/zero is not a regular file")


def test_a_json_file_of_bounded_size(tmp_path: Path) -> None:
    folder = tiny_files.write_folder(tmp_path)
    os.truncate(folder / "config.json", (64 << 20) + 1)
    refused(folder, r"config\.json is too large")


def test_a_folder_of_gguf_files_names_the_file_to_give(tmp_path: Path) -> None:
    tiny_files.write_json(tmp_path / "config.json", tiny_files.CONFIG)
    _touch(tmp_path / "model-q4.gguf")
    refused(tmp_path, r"give the file itself: .*model-q4\.gguf")


def test_python_code_in_a_folder_never_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by `auto_map`, nor by names that an import from the current folder would find."""
    config = tiny_files.CONFIG | {
        "auto_map": {"AutoModelForCausalLM": "modeling_evil.Evil", "AutoTokenizer": "evil.Evil"}
    }
    folder = tiny_files.write_folder(tmp_path / "model", config=config)
    marker = tmp_path / "ran"
    code = f"open({str(marker)!r}, 'w').close()\n"
    for name in (
        "modeling_evil",
        "evil",
        "jinja2",
        "json",
        "tokenizers",
        "sitecustomize",
        "quasar",
    ):
        (folder / f"{name}.py").write_text(code)
    monkeypatch.chdir(folder)
    load(folder)
    assert load_tokenizer(open_checkpoint(folder)).render([]) == "<|im_start|>assistant\n"
    assert not marker.exists()


@pytest.mark.parametrize("pre_tokenizer", ["ByteLevel", "BertPreTokenizer"])
def test_huge_token_ids_are_refused(tmp_path: Path, pre_tokenizer: str) -> None:
    """Before the library writes such a vocabulary for another process: it would list every id."""
    folder = tiny_files.write_folder(tmp_path)
    layout = json.loads((folder / "tokenizer.json").read_text())
    layout["model"]["vocab"]["zz"] = 2**32 - 2
    layout["pre_tokenizer"] = {**layout["pre_tokenizer"], "type": pre_tokenizer}
    tiny_files.write_json(folder / "tokenizer.json", layout)
    refused(folder, "token id 4294967294 is too large")


def peak_of(load_file: Callable[[], object]) -> int:
    """Bytes that Python took at most while the file was refused."""
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError):
            load_file()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "values", [b"[],", b"{},", b"1.5,", b'"ab",', b'{"a":1},'], ids=lambda value: value.decode()
)
def test_json_does_not_unfold(tmp_path: Path, values: bytes) -> None:
    """Objects can take twenty times the text: refused where that would be much."""
    path, size = tmp_path / "config.json", 15 << 20
    path.write_bytes(b'{"a":[' + values * (size // len(values)) + b"1]}")
    assert peak_of(lambda: open_checkpoint(tmp_path)) < 2 * size + SPARE_BYTES


def test_a_short_json_may_unfold(tmp_path: Path) -> None:
    path, size = tmp_path / "x.json", 4 << 20
    path.write_bytes(b"[" + b"[]," * (size // 3) + b"1]")
    assert peak_of(lambda: read_json(path)) < 2 * size + SPARE_BYTES


@pytest.mark.parametrize(
    ("kind", "item", "count"),
    [(0, b"\1", 7 << 20), (3, b"\xff\x7f", 7 << 20), (8, bytes(8), 5 << 20), (7, b"\1", 9 << 20)],
    ids=["uint8", "int16", "string", "bool"],
)
def test_gguf_lists_do_not_unfold(tmp_path: Path, kind: int, item: bytes, count: int) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(file([ARCHITECTURE, array("a", kind, count) + item * count], []))
    with pytest.raises(CheckpointError, match="more memory than twice the file"):
        open_checkpoint(path)
    assert peak_of(lambda: open_checkpoint(path)) < 2 * path.stat().st_size + SPARE_BYTES


def test_gguf_texts_do_not_unfold(tmp_path: Path) -> None:
    """One character beyond the Basic Multilingual Plane makes all the others take four bytes."""
    path = tmp_path / "x.gguf"
    path.write_bytes(file([ARCHITECTURE, string_entry("a", "\U0001f600" + "x" * (80 << 20))], []))
    assert peak_of(lambda: open_checkpoint(path)) < 2 * path.stat().st_size + SPARE_BYTES


@pytest.mark.parametrize("value", ['"\\ud800"', '{"\\udfff": 1}'])
@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_half_a_surrogate_pair(tmp_path: Path, name: str, value: str) -> None:
    """No file name, token or message can hold it."""
    folder = tiny_files.write_folder(tmp_path)
    (folder / name).write_text(f'{{"eos_token": {value}}}')
    refused(folder, f"{name} holds half of a surrogate pair")


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]
)
def test_links_out_of_a_folder_are_refused(tmp_path: Path, name: str) -> None:
    """A cloned repository can hold them; a template ends up in prompts and in quantised copies."""
    secret = tmp_path / "secret"
    folder = tiny_files.write_folder(tmp_path / "model")
    secret.write_bytes((folder / name).read_bytes() if (folder / name).exists() else b"secret")
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(secret)
    opened = watch_opened()
    refused(folder, f"{name} is a link out of the model's folder, to {secret}")
    assert not [path for path in opened if path.endswith((f"/{name}", "secret"))]


def test_links_inside_a_folder_and_in_the_hub_cache_are_followed(tmp_path: Path) -> None:
    cache = tmp_path / "models--a--b"
    folder = tiny_files.write_folder(cache / "snapshots" / "0123")
    (cache / "blobs").mkdir()
    for number, link in enumerate(sorted(folder.iterdir())):
        link.rename(cache / "blobs" / str(number))
        link.symlink_to(f"../../blobs/{number}")
    (folder / "again").symlink_to("config.json")
    load(folder)
    assert read_json(folder / "again")["hidden_size"] == 32


def test_only_files_of_the_model_are_opened(tmp_path: Path) -> None:
    """No pickle and no code; modules are imported by the first load."""
    folder = tiny_files.write_folder(tmp_path / "model")
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch pwned'\ntR.")
    (folder / "modeling_tiny.py").write_text("raise SystemExit")
    load(folder)
    opened = watch_opened()
    load(folder)
    read = ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"]
    expected = {str(folder / name) for name in (*read, "tokenizer_config.json")}
    assert set(opened) - {os.devnull} == expected


_watched: list[list[str]] = []
"""Hooks stay for the life of a process, so there is one."""


def watch_opened() -> list[str]:
    """Paths that are opened from now on, in this test."""
    if not _watched:
        sys.addaudithook(
            lambda event, args: (
                _watched[-1].append(args[0])
                if event == "open" and isinstance(args[0], str)
                else None
            )
        )
    _watched.append([])
    return _watched[-1]


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_a_folder_of_pickles_without_a_config(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"cos\nsystem\n(S'touch pwned'\ntR.")
    refused(tmp_path, f"holds its weights in {name}, a pickle .* convert the model to safetensors")


def test_an_index_of_pickles(tmp_path: Path) -> None:
    folder = tiny_files.write_sharded(tmp_path)
    index = {"weight_map": {"lm_head.weight": "pytorch_model-00001-of-00001.bin"}}
    tiny_files.write_json(folder / "model.safetensors.index.json", index)
    refused(folder, r"'pytorch_model-00001-of-00001\.bin' is not a safetensors file")


def sentencepiece(path: Path, tokens: list[str], scores: list[float]) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_vocab_size(len(tokens))
    writer.add_tensor("token_embd.weight", np.ones((len(tokens), 32), np.float32))
    tiny_files.finish_gguf(writer)
    return path


@pytest.mark.parametrize(
    ("tokens", "scores", "named"),
    [
        (["<unk>", "<s>", "</s>", "x" * 2_000_000], [0.0, 0.0, 0.0, -1.0], "is too long"),
        (["<unk>", "<s>", "</s>", "a"], [0.0, 0.0, 0.0, float("nan")], "scores holds NaN"),
    ],
    ids=["quadratic", "nan"],
)
def test_pieces_that_cannot_be_merged(
    tmp_path: Path, tokens: list[str], scores: list[float], named: str
) -> None:
    checkpoint = open_checkpoint(sentencepiece(tmp_path / "x.gguf", tokens, scores))
    with pytest.raises(CheckpointError, match=named):
        load_tokenizer(checkpoint)


def test_messages_are_one_line_of_bounded_length(tmp_path: Path) -> None:
    name = "line\nend" + "x" * 100_000
    folder = tiny_files.write_folder(tmp_path, config={**tiny_files.CONFIG, name: 1})
    with pytest.raises(CheckpointError) as error:
        load(folder)
    assert len(str(error.value)) < 1100 and "\n" not in str(error.value)
