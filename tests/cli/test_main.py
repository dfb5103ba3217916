"""The command itself: discovery, help, exit codes."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from quasar.cli import main as cli
from quasar.errors import QuasarError, UsageError

QUASAR = [sys.executable, "-m", "quasar"]
HEAVY = ("torch", "numpy", "transformers", "tokenizers", "jinja2", "rich", "gguf")


def test_help_names_every_command_file_and_imports_nothing_heavy():
    script = (
        "import sys\nfrom quasar.cli.main import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit as stop:\n    assert stop.code == 0\n"
        f"print('loaded:', [name for name in {HEAVY} if name in sys.modules])"
    )
    shown = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    ).stdout
    assert shown.splitlines()[-1] == "loaded: []"
    files = {file.stem for file in Path(cli.__file__).parent.glob("*.py")} - {"main", "__init__"}
    assert files == set(cli.commands()) >= {"generate", "chat", "info", "doctor", "bench", "demo"}
    for name in files:
        assert name in shown


def test_only_the_named_command_is_imported():
    script = (
        "import sys\nfrom quasar.cli.main import make_parser\nmake_parser(['info', 'm'])\n"
        "print(sorted(n for n in sys.modules if n.startswith('quasar.cli.') and n.count('.') == 2))"
    )
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert shown.stdout.strip() == "['quasar.cli.info', 'quasar.cli.main', 'quasar.cli.parts']"


@pytest.mark.parametrize("name", cli.commands())
def test_each_command_has_help(name, quasar):
    result = quasar(name, "--help")
    assert result.code == 0 and f"usage: quasar {name}" in result.out


def test_version(quasar):
    result = quasar("--version")
    assert result.code == 0 and result.out.startswith("quasar 0.")


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("fly",),
        ("generate",),
        ("generate", "m", "-p", "x", "--fly"),
        ("generate", "m", "-p", "x", "--max", "3"),
        ("doctor", "a", "b"),
    ],
    ids=" ".join,
)
def test_usage_errors_are_one_line_and_exit_2(arguments, quasar):
    result = quasar(*arguments)
    assert result.code == 2
    assert result.out == ""
    assert result.err.startswith("quasar: error: ") and result.err.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "code", "shown"),
    [
        (QuasarError("file a\n is broken"), 1, "quasar: error: file a is broken\n"),
        (UsageError("no such option"), 2, "quasar: error: no such option\n"),
        (OSError(28, "No space left on device"), 1, "No space left on device\n"),
        (MemoryError(), 1, "quasar: error: MemoryError\n"),
        (QuasarError("a\x1b[31m key\x9b"), 1, "quasar: error: a key\n"),
        (
            RuntimeError(
                "[enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate "
                "memory: you tried to allocate 9 bytes. Error code 12\nframe #0: c10::Error"
            ),
            1,
            "quasar: error: can't allocate memory: you tried to allocate 9 bytes\n",
        ),
        (KeyboardInterrupt(), 130, "quasar: interrupted\n"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_failures_become_exit_codes(error, code, shown, quasar, monkeypatch):
    def fail(args):
        raise error

    monkeypatch.setattr("quasar.cli.info.run", fail)
    result = quasar("info", "m")
    assert (result.code, result.out) == (code, "")
    assert result.err.endswith(shown)


def test_a_bug_is_not_hidden(quasar, monkeypatch):
    monkeypatch.setattr("quasar.cli.info.run", lambda args: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        quasar("info", "m")


def test_a_reader_that_leaves_is_no_traceback(model):
    command = [*QUASAR, "generate", str(model), "-p", "ab ab", "--verifier", "bf16"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    err = process.stderr.read()
    process.stderr.close()
    assert process.wait() == 1
    assert "Traceback" not in err and "Broken" not in err


def test_ctrl_c_exits_130():
    script = (
        "import sys, time\nimport quasar.cli.info\nfrom quasar.cli.main import main\n"
        "def wait(args):\n    print('ready', flush=True)\n    time.sleep(60)\n"
        "quasar.cli.info.run = wait\nsys.exit(main(['info', 'm']))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert (process.returncode, out, err) == (130, "", "quasar: interrupted\n")


def test_another_runtime_error_is_a_bug(quasar, monkeypatch):
    def fail(args):
        raise RuntimeError("shapes differ")

    monkeypatch.setattr("quasar.cli.info.run", fail)
    with pytest.raises(RuntimeError):
        quasar("info", "m")


def shell(line: str, **variables: str) -> subprocess.CompletedProcess[bytes]:
    """Runs `quasar LINE`, redirections and all."""
    command = f"{shlex.quote(sys.executable)} -m quasar {line}"
    return subprocess.run(command, shell=True, capture_output=True, env=os.environ | variables)


def test_text_that_the_locale_cannot_encode(tmp_path, model):
    folder = tmp_path / "mod\u00e8le \U0001f600"
    folder.symlink_to(model)
    found = shell(f"info {shlex.quote(str(folder))} --json", PYTHONIOENCODING="ascii")
    assert (found.returncode, found.stderr) == (0, b"")
    assert json.loads(found.stdout.decode())["model"] == str(folder)
    absent = shell("info \u00e8/x/y", PYTHONIOENCODING="ascii")
    assert absent.returncode == 1 and absent.stderr.startswith("quasar: error: \u00e8/x/y".encode())


def test_a_name_of_no_encoding_is_valid_json(tmp_path, model):
    folder = os.fsencode(tmp_path) + b"/\xff"
    os.symlink(model, folder)
    found = subprocess.run([*QUASAR, "info", folder, "--json"], capture_output=True)
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout.decode())["model"] == os.fsdecode(folder)


@pytest.mark.parametrize(
    ("line", "code", "error"),
    [
        ("info absent/x/y <&-", 1, b"absent/x/y"),
        ("generate absent -p - <&-", 2, b"the prompt is empty"),
        ("info absent >&-", 1, b"standard output is closed"),
        ("info absent/x/y 2>&-", 1, b""),
    ],
)
def test_closed_streams_are_no_traceback(line, code, error):
    found = shell(line)
    assert (found.returncode, found.stdout) == (code, b"")
    assert error in found.stderr and found.stderr.count(b"\n") == bool(error)


@pytest.mark.parametrize(
    "line",
    [
        "info m",
        "generate m -p x",
        "chat m",
        "quantize m out",
        "doctor",
        "bench m --data f",
        "evaluate m+bf16 m+bf16 --text f",
        "demo",
    ],
)
def test_every_command_refuses_an_unknown_tier_at_once(line, quasar, monkeypatch):
    monkeypatch.setenv("QUASAR_ISA", "bogus")
    monkeypatch.setattr("quasar.loading.resolve", None)
    result = quasar(*line.split())
    assert (result.code, result.out) == (2, "") and "QUASAR_ISA='bogus'" in result.error


@pytest.mark.parametrize(
    "line",
    [
        "info a/b/c",
        "generate a/b/c -p x",
        "doctor a/b/c",
        "evaluate a/b/c+bf16 a/b/c+bf16 --text f",
    ],
)
def test_numpy_is_imported_before_torch_whose_import_of_it_swallows_ctrl_c(line):
    script = (
        f"import sys\nfrom quasar.cli.main import main\nassert main({line.split()}) == 1\n"
        "names = list(sys.modules)  # by the end of their import\n"
        "parts = [names.index(name) for name in names if name.startswith('torch')]\n"
        "assert names.index('numpy') < min(parts)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
