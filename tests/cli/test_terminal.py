"""What reaches a terminal."""

from __future__ import annotations

import pytest

from quasar.cli.parts import terminal


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain\ttext\n", "plain\ttext\n"),
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b]0;title\x07x", "x"),
        ("\x1b]8;;http://a\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("over\rwrite\x08\x7f", "overwrite"),
        ("\x9b31mC1", "31mC1"),
        ("cut \x1b[3", "cut [3"),
        ("日本 é 😀", "日本 é 😀"),
    ],
)
def test_control_sequences_are_taken_out(text, shown):
    assert terminal.harmless(text) == shown


def test_only_a_terminal_gets_harmless_text(monkeypatch, capsys):
    terminal.write_text("\x1b[1mx")
    assert capsys.readouterr().out == "\x1b[1mx"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    terminal.write_text("\x1b[1mx")
    assert capsys.readouterr().out == "x"


def test_table_aligns_text_left_and_numbers_right():
    text = terminal.table(("name", "count"), [("a", "5"), ("long name", "1,234.5%")])
    assert text.splitlines() == [
        "name          count",
        "---------  --------",
        "a                 5",
        "long name  1,234.5%",
    ]


def test_progress_shows_nothing_before_its_first_call(capsys):
    with terminal.progress_bar():
        pass
    assert capsys.readouterr() == ("", "")
    with terminal.progress_bar() as progress:
        progress("work", 1, 2)
        progress("work", 2, 2)
    out, err = capsys.readouterr()
    assert out == "" and "work" in err and "2/2" in err


def test_pages_and_notes_are_harmless(capsys):
    evil = "a\x1b[31m\nb\x9b"
    assert terminal.listing([(evil, evil)]) == "a b  a b"
    assert terminal.table((evil,), [(evil,)]).splitlines() == ["a b", "---", "a b"]
    terminal.note(evil)
    assert capsys.readouterr().err == "a\nb\n"
