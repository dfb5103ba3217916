"""An install that found no compiler has no `_native`: reference kernels run, and say so."""

from __future__ import annotations

import subprocess
import sys

import pytest

from quasar.kernels import cpu

NOTICE = "quasar: kernels: cpu declined: the native module is not built"


def notices(err: str) -> list[str]:
    return [line for line in err.splitlines() if line.startswith(NOTICE)]


def test_a_missing_module_is_no_error_but_a_notice(model):
    script = (
        "import sys\nsys.modules['quasar._native'] = None  # importing it fails\n"
        "from quasar.cli.main import main\nsys.exit(main(sys.argv[1:]))"
    )
    command = ["generate", model, "-p", "ab ab", "--verifier", "bf16", "--max-tokens", "2"]
    ran = subprocess.run([sys.executable, "-c", script, *command], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    (notice,) = notices(ran.stderr)
    assert notice.endswith("running on reference")


@pytest.mark.parametrize("command", ["doctor", "evaluate"])
def test_other_commands_that_compute_say_so(command, quasar, monkeypatch, tmp_path, model):
    monkeypatch.setattr(cpu, "_native", None)
    monkeypatch.setattr(cpu, "_absence", "the native module is not built (test)", raising=False)
    text = tmp_path / "text"
    text.write_text("ab ab ab ab")
    arguments = {
        "doctor": (),
        "evaluate": (f"{model}+bf16", f"{model}+bf16", "--text", text),
    }
    result = quasar(command, *arguments[command])
    assert result.code == 0, result.err
    assert len(notices(result.err)) == 1
