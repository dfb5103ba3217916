"""`quasar chat`: turns, commands, interruption."""

from __future__ import annotations

import io
import os
import pty
import signal
import subprocess
import sys

import pytest

import tiny
from byte_tokenizer import TEMPLATE, VOCABULARY, write_tokenizer
from quasar.cli import chat
from quasar.engine.engine import Engine
from quasar.loading import load_model
from quasar.types import SamplingParams

BF16 = ("--verifier", "bf16", "--max-tokens", "12", "--threads", "1")


@pytest.fixture
def say(quasar, monkeypatch):
    """Runs `quasar chat` with these lines on standard input."""

    def run(lines: list[str], *arguments):
        stdin = io.TextIOWrapper(io.BytesIO("".join(f"{line}\n" for line in lines).encode()))
        monkeypatch.setattr(sys, "stdin", stdin)
        return quasar("chat", *arguments)

    return run


def test_piped_lines_are_turns(say, quasar, model):
    first = quasar("generate", model, "-p", "ab ab", *BF16, "--json").json["text"]
    result = say(["ab ab", "", "  "], model, *BF16)
    assert result.code == 0
    assert result.out == first + "\n"
    assert result.err.count("acceptance length") == 1


def test_the_conversation_grows_and_is_forgotten(say, model, monkeypatch):
    seen = []
    original = chat.Chat.prompt

    def record(self, messages):
        seen.append([(m["role"], m["content"]) for m in messages] + [self.system])
        return original(self, messages)

    monkeypatch.setattr(chat.Chat, "prompt", record)
    lines = ["one", "two", "/reset", "three", "/system be brief", "four", "/quit", "never"]
    result = say(lines, model, *BF16, "--system", "be kind")
    answers = result.out.splitlines()
    assert result.code == 0
    assert [len(turns) for turns in seen] == [2, 4, 2, 2]
    assert seen[1][0] == ("user", "one") and seen[1][1][0] == "assistant"
    assert result.out.startswith(seen[1][1][1]) and answers
    assert seen[1][2:] == [("user", "two"), "be kind"]
    assert seen[3] == [("user", "four"), "be brief"]


def test_commands(say, model):
    result = say(["/help", "/stats", "ab", "/stats", "/dance", "/system"], model, *BF16)
    assert result.code == 0
    assert "0 answers" in result.err and "1 answers, 12 tokens" in result.err
    assert "unknown command /dance" in result.err
    assert result.err.count("/reset") == 3


def test_a_conversation_that_no_longer_fits_says_so_and_goes_on(say, model):
    result = say(["x" * 600, "ab"], model, *BF16)
    assert result.code == 1, "a script must learn that a turn failed"
    assert "/reset forgets it" in result.err
    assert result.err.count("tokens/s") == 1


def test_context_bounds_the_conversation(say, model):
    result = say(["abcd"], model, *BF16, "--context", "28")
    assert result.code == 0 and "[6 tokens" in result.err and "cut at the limit" in result.err
    assert say(["abcd"], model, *BF16, "--context", "0").code == 2


def test_without_a_template_chat_is_refused(say, untemplated):
    result = say(["ab"], untemplated, *BF16)
    assert (result.code, result.out) == (2, "")
    assert "no chat template" in result.err


def test_bytes_that_are_no_text_are_refused(quasar, model, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"ab\n\xff\n")))
    result = quasar("chat", model, *BF16)
    assert result.code == 2 and "line 2: not UTF-8" in result.err


def test_ctrl_c_stops_the_answer_and_the_second_interrupts():
    with chat.interruptible() as pressed:
        assert not pressed()
        signal.raise_signal(signal.SIGINT)
        assert pressed()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_a_stopped_answer_is_kept_and_the_chat_goes_on(model, capsys, monkeypatch):
    loaded = load_model(str(model), "bf16")
    engine = Engine(loaded.verifier, loaded.tokenizer)
    brief = SamplingParams(max_tokens=12)
    talk = chat.Chat(engine, loaded.tokenizer, brief, 512, interactive=True)
    shown = []

    def press(text):
        shown.append(text)
        if len(shown) == 2:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(chat.terminal, "write_text", press)
    talk.reply("ab")
    assert "stopped" in capsys.readouterr().err
    assert talk.turns[1]["content"] == "".join(shown).removesuffix("\n")
    assert engine.cache.free_slots == engine.cache.capacity
    talk.reply("more")
    assert len(talk.turns) == 4


def test_in_a_terminal(model):
    """A prompt, an answer without control characters, Ctrl-D leaves."""
    leader, follower = pty.openpty()
    command = [sys.executable, "-m", "quasar", "chat", str(model), *BF16]
    process = subprocess.Popen(command, stdin=follower, stdout=follower, stderr=subprocess.PIPE)
    os.close(follower)
    os.write(leader, b"ab ab\n")
    shown = read_until(leader, shown=b"", count=2)
    os.write(leader, b"\x04")
    _, err = process.communicate()
    assert process.returncode == 0, err
    assert b"> " in shown and b"acceptance length" in err


def read_until(leader: int, shown: bytes, count: int) -> bytes:
    """What the terminal shows until the prompt has come `count` times."""
    while shown.count(b"> ") < count:
        shown += os.read(leader, 4096)
    return shown


def test_a_system_message_is_checked_before_a_model_is_opened(quasar):
    result = quasar("chat", "no-such-model", "--system", "\udcff")
    assert (result.code, result.out) == (2, "") and "--system: it is not UTF-8" in result.error


def test_a_system_message_that_the_template_refuses_is_refused_before_loading(
    quasar, tmp_path, monkeypatch
):
    folder = tiny.write_folder(tmp_path / "m", "llama", vocab_size=VOCABULARY)
    strict = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    write_tokenizer(folder, template=strict + TEMPLATE)
    monkeypatch.setattr("quasar.loading.load_verifier", None)
    result = quasar("chat", folder, *BF16, "--system", "be kind")
    assert (result.code, result.out) == (1, "") and "no system" in result.error
