"""Hub ids through a local stand-in: the real command line, client, cache and HTTP."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[1] / "unit"))

import tiny_files

import tiny
from byte_tokenizer import VOCABULARY, write_tokenizer
from hub_server import Hub, read_files
from quasar.errors import UsageError
from quasar.loading import resolve

DRIVER = """
import contextlib, io, json, os, sys
from quasar.cli.main import main
requests, sys.stdin = sys.stdin, io.StringIO()
for line in requests:
    arguments, os.environ["HF_TOKEN"] = json.loads(line)
    if not os.environ["HF_TOKEN"]:
        del os.environ["HF_TOKEN"]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(arguments)
        except SystemExit as stop:
            code = int(stop.code or 0)
    sys.__stdout__.write(json.dumps([code, out.getvalue(), err.getvalue()]) + "\\n")
    sys.__stdout__.flush()
"""
"""Runs command lines one after the other: starting Python with torch for each takes seconds."""


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        (line,) = self.err.splitlines()
        return line.removeprefix("quasar: error: ")


def environment(hub_url: str, home: Path, **more: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
    return kept | {"HF_ENDPOINT": hub_url, "HF_HOME": str(home)} | more


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with Hub() as hub:
        yield hub


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hf")


@pytest.fixture(scope="module")
def quasar(hub: Hub, home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable]:
    variables = environment(hub.url, home, XDG_CACHE_HOME=str(tmp_path_factory.mktemp("xdg")))
    process = subprocess.Popen(
        [sys.executable, "-c", DRIVER],
        env=variables,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def run(*arguments: object, token: str = "") -> Result:
        request = [[str(argument) for argument in arguments], token]
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        return Result(*json.loads(process.stdout.readline()))

    yield run
    process.stdin.close()
    assert process.wait() == 0
    process.stdout.close()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("m") / "model"
    tiny.write_folder(folder, "llama", vocab_size=VOCABULARY)
    write_tokenizer(folder)
    return read_files(folder)


@pytest.fixture
def gguf_file(tmp_path: Path) -> bytes:
    return tiny_files.write_gguf(tmp_path / "x.gguf").read_bytes()


UNWANTED = {
    "pytorch_model.bin": b"cos\nsystem\n(S'touch pwned'\ntR.",
    "modeling_evil.py": b"raise SystemExit",
    "README.md": b"x" * 999,
    "consolidated.safetensors": b"again",
    "onnx/config.json": b"{}",
    "model.gguf": b"GGUF",
}


def test_only_what_is_needed_is_downloaded_and_once(hub, quasar, files):
    hub.add("tiny/whole", files | UNWANTED)
    hub.downloads.clear()
    result = quasar("info", "tiny/whole", "--json")
    assert (result.code, result.err) == (0, "")
    assert json.loads(result.out)["model"] == "tiny/whole"
    assert sorted(hub.downloads) == sorted(f"tiny/whole/{name}" for name in files)
    assert quasar("info", "tiny/whole").code == 0
    assert len(hub.downloads) == len(files)


def test_every_command_takes_a_hub_id(hub, quasar, files, tmp_path):
    hub.add("tiny/all", files)
    prompts = tmp_path / "q.jsonl"
    prompts.write_text(json.dumps({"question_id": 1, "category": "a", "turns": ["ab"]}) + "\n")
    name = "tiny/all"
    for arguments in (
        ("generate", name, "-p", "ab", "--max-tokens", 2, "--verifier", "bf16"),
        ("bench", name, "--data", prompts, "--configs", "bf16+none", "--max-tokens", 2),
        ("evaluate", f"{name}+bf16", f"{name}+bf16", "--prompts", prompts, "--max-tokens", 2),
    ):
        result = quasar(*arguments, "--threads", 1)
        assert result.code == 0, result.err
    with_revision = quasar("chat", name, "--revision", "no-such")
    assert with_revision.error == "tiny/all has no revision 'no-such'"


def sharded(tmp_path: Path) -> dict[str, bytes]:
    return read_files(tiny_files.write_sharded(tmp_path / "sharded"))


def test_sharded_repositories(hub, quasar, tmp_path):
    shards = sharded(tmp_path)
    hub.add("tiny/sharded", shards | {"model-00001-of-00009.safetensors": b"of another split"})
    hub.downloads.clear()
    assert quasar("info", "tiny/sharded").code == 0
    assert sorted(hub.downloads) == sorted(f"tiny/sharded/{name}" for name in shards)


def test_a_shard_that_is_not_there(hub, quasar, tmp_path):
    shards = sharded(tmp_path)
    del shards["model-00002-of-00002.safetensors"]
    hub.add("tiny/torn", shards)
    assert quasar("info", "tiny/torn").error == "tiny/torn lacks model-00002-of-00002.safetensors"


def test_an_index_cannot_name_other_places(hub, quasar, tmp_path):
    shards = sharded(tmp_path)
    index = json.loads(shards["model.safetensors.index.json"])
    index["weight_map"]["lm_head.weight"] = "../../../no/such/model"
    shards["model.safetensors.index.json"] = json.dumps(index).encode()
    hub.add("tiny/outside", shards)
    assert (
        "'../../../no/such/model' is not a safetensors file" in quasar("info", "tiny/outside").err
    )


def test_revisions(hub, quasar, files):
    old = files | {"config.json": files["config.json"].replace(b"512", b"256")}
    first = hub.add("tiny/moved", old)
    hub.repositories["tiny/moved"].revisions = {"main": files, "v1": old, "refs/pr/1": old}

    def context(*arguments: str) -> int:
        result = quasar("info", *arguments, "--json")
        assert result.code == 0, result.err
        return int(json.loads(result.out)["context"])

    assert context("tiny/moved") == 512
    for revision in ("v1", first, "refs/pr/1"):
        assert context("tiny/moved", "--revision", revision) == 256
        assert context(f"tiny/moved@{revision}") == 256
        assert context(f"tiny/moved@{revision}", "--offline") == 256


def test_a_main_branch_that_moved_is_fetched_anew(hub, quasar, files):
    hub.add("tiny/new", files)
    assert quasar("info", "tiny/new").code == 0
    hub.add("tiny/new", files | {"config.json": files["config.json"].replace(b"512", b"256")})
    assert json.loads(quasar("info", "tiny/new", "--json").out)["context"] == 256


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("a/b", "--revision", "../../x"), 2, "--revision '../../x' is not the name of a branch"),
        (("a/b@v1", "--revision", "v2"), 2, "a/b@v1 has a revision of its own beside"),
        (("smollm2-135m", "--revision", "v2"), 2, "--revision is for hub ids"),
        (("../no/such/model",), 1, "no such file or folder, and neither a hub id"),
        (("//host/share",), 1, "no such file or folder, and neither a hub id"),
        (("a\0b",), 1, "no such file or folder, and neither a hub id"),
        (("a/../b",), 1, "no such file or folder, and neither a hub id"),
        (("%2e%2e/%2e%2e",), 1, "no such file or folder, and neither a hub id"),
        (("x" * 10_000,), 1, "no such file or folder, and neither a hub id"),
        (("a/b--c",), 2, "a/b--c is neither a local path nor a hub id"),
        (("a/b.git",), 2, "a/b.git is neither a local path nor a hub id"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_names_that_are_refused_without_a_request(arguments, code, said, quasar, hub):
    hub.downloads.clear()
    result = quasar("info", *arguments)
    assert result.code == code and said in result.error
    assert len(result.error) < 1100
    assert not hub.downloads


def test_an_unknown_repository(hub, quasar):
    result = quasar("info", "tiny/typo")
    assert result.code == 1
    assert f"{hub.url}/tiny/typo does not exist or is private" in result.error
    assert "HF_TOKEN" in result.error


def test_a_gated_repository(hub, quasar, files):
    hub.add("tiny/gated", files, token="hf_secret")
    for token in ("", "hf_other"):
        error = quasar("info", "tiny/gated", token=token).error
        assert f"tiny/gated is gated: accept its terms at {hub.url}/tiny/gated" in error
        assert "HF_TOKEN" in error and "hf_other" not in error
    assert quasar("info", "tiny/gated", token="hf_secret").code == 0


def test_offline(hub, quasar, files):
    hub.add("tiny/kept", files)
    error = quasar("info", "tiny/kept", "--offline").error
    assert "tiny/kept is not fully in the cache, and offline nothing is downloaded" in error
    assert "hf download tiny/kept" in error
    assert quasar("info", "tiny/kept").code == 0
    del hub.repositories["tiny/kept"]
    result = quasar("info", "tiny/kept", "--offline")
    assert (result.code, result.err) == (0, "")


def test_weights_that_are_not_in_the_cache(hub, quasar, home, tmp_path):
    hub.add("tiny/partial", sharded(tmp_path))
    assert quasar("info", "tiny/partial").code == 0
    for shard in (home / "hub").glob("models--tiny--partial/snapshots/*/model-00002-*"):
        shard.unlink()
    error = quasar("info", "tiny/partial", "--offline").error
    assert "tiny/partial lacks model-00002-of-00002.safetensors in the cache" in error


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_hub_that_is_down(hub, quasar, files, status):
    hub.add("tiny/known", files)
    assert quasar("info", "tiny/known").code == 0
    hub.failure = status
    try:
        result = quasar("info", "tiny/known")
        assert result.code == 0
        assert result.err == (
            f"quasar: {hub.url} cannot be reached (it answers {status}): "
            "using the copy in the cache\n"
        )
        error = quasar("info", "tiny/unknown").error
        assert f"{hub.url} cannot be reached (it answers {status})" in error
    finally:
        hub.failure = None


def cli(arguments: list[str], variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "quasar", *arguments]
    return subprocess.run(command, env=variables, capture_output=True, text=True)


def test_no_network_and_the_offline_variable(hub, home, quasar, files):
    hub.add("tiny/seen", files)
    assert quasar("info", "tiny/seen").code == 0
    nowhere = environment("http://127.0.0.1:9", home)
    failed = cli(["info", "tiny/never"], nowhere)
    assert failed.returncode == 1 and failed.stderr.count("\n") == 1
    assert "http://127.0.0.1:9 cannot be reached (Connect" in failed.stderr
    assert "check the connection and HF_ENDPOINT" in failed.stderr
    for variables, err in (
        (nowhere, "using the copy in the cache"),
        (nowhere | {"HF_HUB_OFFLINE": "1"}, ""),
    ):
        result = cli(["info", "tiny/seen"], variables)
        assert result.returncode == 0 and err in result.stderr
        assert bool(result.stderr) == bool(err)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt"])
def test_pickles_are_refused_before_any_download(hub, quasar, files, name):
    del (pickled := dict(files))["model.safetensors"]
    hub.add("tiny/pickled", pickled | {name: UNWANTED["pytorch_model.bin"]})
    hub.downloads.clear()
    error = quasar("info", "tiny/pickled").error
    assert error.startswith(f"tiny/pickled holds its weights in {name}, a pickle file")
    assert "convert the model to safetensors first" in error
    assert hub.downloads == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_local_experts": 8}, "mixture of experts is not supported"),
        ({"model_type": "mamba"}, "'mamba' is not supported"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quant_method 'gptq' is not supported"),
        (None, "no tokenizer.json; let transformers write one"),
    ],
)
def test_what_cannot_be_used_is_refused_before_its_weights(hub, quasar, files, change, said):
    config = json.dumps(json.loads(files["config.json"]) | (change or {})).encode()
    kept = {k: v for k, v in files.items() if change or k != "tokenizer.json"}
    hub.add("tiny/useless", kept | {"config.json": config})
    hub.downloads.clear()
    result = quasar("info", "tiny/useless")
    assert result.code == 1
    assert said in result.error
    assert "tiny/useless/config.json" in hub.downloads
    assert not [name for name in hub.downloads if name.endswith(".safetensors")]


def test_gguf_repositories(hub, quasar, gguf_file):
    hub.add("tiny/one", {"README.md": b"", "tiny-Q8_0.gguf": gguf_file})
    result = quasar("info", "tiny/one", "--json")
    assert json.loads(result.out)["format"] == "gguf"
    names = ("tiny-Q8_0.gguf", "b/tiny-F32.gguf", "tiny-Q4_0.gguf")
    several = {name: gguf_file + name.encode() for name in names}
    hub.add("tiny/several", several)
    hub.downloads.clear()
    error = quasar("info", "tiny/several").error
    assert "choose one, as in tiny/several:b/tiny-F32.gguf" in error
    assert all(name in error for name in names)
    assert quasar("info", "tiny/several:Q5_K_M").error == (
        "tiny/several has no GGUF file 'Q5_K_M'; it holds "
        "b/tiny-F32.gguf, tiny-Q4_0.gguf, tiny-Q8_0.gguf"
    )
    assert hub.downloads == []
    for name in ("tiny-Q8_0.gguf", "q8_0", "F32"):
        for offline in ((), ("--offline",)):
            assert quasar("info", f"tiny/several:{name}", *offline).code == 0
    assert hub.downloads == ["tiny/several/tiny-Q8_0.gguf", "tiny/several/b/tiny-F32.gguf"]


def test_a_gguf_file_is_taken_beside_safetensors_only_when_named(hub, quasar, files, gguf_file):
    hub.add("tiny/both", files | {"tiny-Q8_0.gguf": gguf_file})
    for name, expected in (("tiny/both", "safetensors"), ("tiny/both:Q8_0", "gguf")):
        assert json.loads(quasar("info", name, "--json").out)["format"] == expected


def test_a_local_path_wins(tmp_path, monkeypatch):
    (tmp_path / "tiny" / "local").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve("tiny/local") == Path("tiny/local")
    with pytest.raises(UsageError, match="--revision is for hub ids; tiny/local is at"):
        resolve("tiny/local", revision="main")


def test_the_quantised_copy_follows_the_commit(hub, quasar, files, tmp_path):
    def quantised(*arguments: Any) -> Result:
        options = ("-p", "ab", "--max-tokens", 1, "--threads", 1)
        result = quasar("generate", "tiny/quant", *arguments, *options)
        assert result.code == 0, result.err
        return result

    hub.add("tiny/quant", files)
    assert "quantising tiny--quant to W8A8 once" in quantised().err
    assert "quantising" not in quantised("--offline").err
    hub.add("tiny/quant", files | {"config.json": files["config.json"].replace(b"512", b"256")})
    assert "quantising tiny--quant to W8A8 once" in quantised().err


def test_a_revision_needs_one_model(quasar):
    result = quasar("evaluate", "a/b+bf16", "c/d+bf16", "--revision", "v1", "--text", "x")
    assert result.code == 2 and "write owner/name@revision" in result.error
    assert "--revision is for timing a model" in quasar("doctor", "--revision", "v1").error
    assert "--offline is for timing a model" in quasar("doctor", "--offline").error
