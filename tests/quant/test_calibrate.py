"""The calibration text: the built-in one, and files that are refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from quasar.checkpoints import open_checkpoint
from quasar.errors import UsageError
from quasar.models.tensors import GROUPS
from quasar.quantization.calibrate import (
    CALIBRATION_TOKENS,
    HELD_OUT_TOKENS,
    LARGEST_FILE,
    MOMENT_TOKENS,
    SAMPLED_ROWS,
    Inputs,
    LayerInputs,
    SampledRows,
    builtin_passages,
    calibration_text,
    cut,
    file_passages,
    mixed,
    parse_passages,
    portions,
    sample_groups,
    strides,
)
from quasar.text.tokenizer import load_tokenizer


@pytest.fixture
def tokenizer(write_model):
    return load_tokenizer(open_checkpoint(write_model()))


def decoded(tokenizer, sequences):
    return [tokenizer.decode(ids.tolist()) for ids in sequences]


def test_builtin_text_is_varied_and_split():
    kept, held_out = builtin_passages()
    kinds = {"prose", "chat", "code", "mathematics", "table"}
    assert {p.kind for p in kept} == {p.kind for p in held_out} == kinds
    assert not {p.text for p in kept} & {p.text for p in held_out}
    size = sum(len(p.text.encode()) for p in kept + held_out)
    assert 110_000 < size < 140_000
    text = "".join(p.text for p in kept + held_out)
    for sign in ("ß", "é", "ñ", "的", "の", "й", "한", "و", "ह", "\\frac", "fn ", "SELECT", "|---"):
        assert sign in text


def test_every_stretch_has_its_share_of_each_kind():
    for part in builtin_passages():
        order = mixed(part)
        assert sorted(p.text for p in order) == sorted(p.text for p in part)
        chats = [p.kind == "chat" for p in order]
        for end in range(5, len(order)):
            assert abs(sum(chats[:end]) / end - sum(chats) / len(chats)) < 0.25
        assert len({p.kind for p in order[: len(order) // 2]}) == 5


def test_conversations_take_turns():
    for passage in (p for part in builtin_passages() for p in part if p.kind == "chat"):
        roles = [turn["role"] for turn in passage.turns]
        assert roles == ["user", "assistant"] * (len(roles) // 2) and roles
        assert all(turn["content"] for turn in passage.turns)


def test_marker_lines_are_not_text():
    chat, prose = parse_passages("=== chat\n--- user\na\n--- x\n--- assistant\nb\n\n=== prose\nc\n")
    assert [t["role"] for t in chat.turns] == ["user", "x", "assistant"]
    assert chat.text == "a\n\n\n\nb"
    assert (prose.text, prose.turns) == ("c", ())


def test_sequences_fill_the_budgets(tokenizer):
    text = calibration_text(tokenizer)
    assert sum(map(len, text.calibration)) == CALIBRATION_TOKENS
    assert sum(map(len, text.held_out)) == HELD_OUT_TOKENS
    assert max(map(len, text.calibration)) == 512
    again = calibration_text(tokenizer)
    pairs = zip(text.calibration, again.calibration, strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert max(map(len, calibration_text(tokenizer, longest=64).calibration)) == 64


def test_moments_get_more_text(tokenizer, tmp_path):
    """What the others get comes first: the search of scales then samples the same inputs."""
    file = tmp_path / "mine.txt"
    file.write_text("".join(f"Line {i} of mine, one after the other.\n" for i in range(2000)))
    for given in (None, file):
        less, more = (calibration_text(tokenizer, given, moments=m) for m in (False, True))
        assert sum(map(len, less.calibration)) == CALIBRATION_TOKENS
        assert sum(map(len, more.calibration)) == MOMENT_TOKENS
        pairs = list(zip(less.calibration, more.calibration, strict=False))
        assert all(torch.equal(a, b) for a, b in pairs[:-1])
        assert torch.equal(torch.cat(less.held_out), torch.cat(more.held_out))
    file.write_text("Words of mine.\n" * 1000)
    short = calibration_text(tokenizer, file, moments=True)
    assert CALIBRATION_TOKENS < sum(map(len, short.calibration)) < MOMENT_TOKENS


def test_only_the_first_tokens_are_sampled():
    assert strides([100, 200]) == [1, 1]
    assert strides([4000, 4191, 2, 500, 500]) == [8, 8, 8, 0, 0]
    assert list(portions([4095, 1, 5000, 3])) == [[0, 1], [2], [3]]
    assert list(portions([5])) == [[0]]


def test_some_passages_go_through_the_template(tokenizer, tmp_path):
    assert any("<user>" in t for t in decoded(tokenizer, calibration_text(tokenizer).calibration))
    file = tmp_path / "mine.txt"
    file.write_text("Words of mine, one after the other.\n" * 400)
    found = decoded(tokenizer, calibration_text(tokenizer, file).calibration)
    assert any("<user>Words" in t for t in found)
    assert any("<user>" not in t for t in found)


def test_the_tail_of_a_file_is_held_out(tokenizer, tmp_path):
    file = tmp_path / "mine.txt"
    file.write_bytes(b"\xef\xbb\xbf" + b"a" * 6000 + b"b" * 2000)
    text = calibration_text(tokenizer, file)
    assert text.name == "mine.txt"
    assert set("".join(decoded(tokenizer, text.held_out))) <= set("b<user>\n")
    assert "a" in "".join(decoded(tokenizer, text.calibration))
    assert "\ufeff" not in "".join(decoded(tokenizer, text.calibration))


def test_a_quarter_is_held_out_whatever_is_left_behind_the_last_cut(tokenizer, tmp_path):
    """Pieces end with a line, so a text of a few of them has a short one behind them."""
    file = tmp_path / "mine.txt"
    for lines in range(60, 160, 5):
        file.write_text("Words of mine, one after the other.\n" * lines)
        kept, held_out = (sum(len(p.text) for p in part) for part in file_passages(file))
        assert kept + held_out == file.stat().st_size
        assert kept >= held_out >= (kept + held_out) / 4
        calibration_text(tokenizer, file)


@pytest.mark.parametrize("size", [1, 3, 1000, 5000])
def test_cutting_loses_nothing(size):
    text = "".join(chr(97 + i * i % 23) for i in range(size))
    assert "".join(cut(text)) == text
    assert max(map(len, cut("one two three\n" * 900))) <= 1500
    assert all(piece.endswith("\n") for piece in cut("one two three\n" * 900))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (b" \n\t\n", "empty"),
        (b"\xff\xfe\x00\x01 not text", "not UTF-8"),
        ("caf\u00e9 ".encode("latin-1") * 500, "not UTF-8"),
        (b"text and \x00 a zero byte" * 100, "NUL"),
        (b"too little text", "too short"),
        (b"x" * 500, "too short"),
    ],
)
def test_unusable_files_are_refused(tokenizer, tmp_path, content, message):
    file = tmp_path / "calib.txt"
    file.write_bytes(content)
    with pytest.raises(UsageError, match=rf"calib\.txt.*{message}"):
        calibration_text(tokenizer, file)


def test_missing_folder_and_huge_files_are_refused(tokenizer, tmp_path):
    with pytest.raises(UsageError, match=r"none\.txt.*No such file"):
        calibration_text(tokenizer, tmp_path / "none.txt")
    with pytest.raises(UsageError, match="directory"):
        calibration_text(tokenizer, tmp_path)
    huge = tmp_path / "huge.txt"
    huge.touch()
    os.truncate(huge, LARGEST_FILE + 1)
    for endless in (huge, Path("/dev/zero")):
        with pytest.raises(UsageError, match="excerpt"):
            calibration_text(tokenizer, endless)


def test_observers():
    x = torch.tensor([[1.0, -5.0], [-3.0, 2.0]])
    inputs, rows = LayerInputs(stride=2), SampledRows()
    inputs("o", x)
    rows("o", x)
    assert inputs.absmax["o"].tolist() == [3.0, 5.0]
    assert inputs["o"].tolist() == [[1.0, -5.0]]
    assert torch.equal(rows["o"], x)
    rows("qkv", torch.arange(1000.0)[:, None])
    assert len(rows["qkv"]) == SAMPLED_ROWS and rows["qkv"][-1] > 900


def seen_in_a_layer(lengths):
    """Observers of sequences whose every input is (sequence number, position)."""
    observers = []
    for number, length in enumerate(lengths):
        observers.append(LayerInputs(stride=2))
        x = torch.stack([torch.full((length,), float(number)), torch.arange(float(length))], dim=1)
        for group in GROUPS:
            observers[-1](group, x)
    return observers


def test_sequences_fit_or_check():
    residuals = [torch.full((n, 3), float(i + 1)) for i, n in enumerate((5, 4, 6))]
    sample = sample_groups(seen_in_a_layer((5, 4, 6)), residuals, {})
    assert set(sample) == set(GROUPS)
    fitting, checking = sample["qkv"].fitting, sample["qkv"].checking
    assert fitting.rows.tolist() == [[0, 0], [0, 2], [0, 4], [2, 0], [2, 2], [2, 4]]
    assert checking.rows.tolist() == [[1, 0], [1, 2]]
    assert sample["qkv"].absmax.tolist() == [2.0, 5.0]
    for group in GROUPS:
        for inputs in (sample[group].fitting, sample[group].checking):
            assert float(inputs.token_weight.sum()) == pytest.approx(1.0)
    assert len(fitting.token_weight.unique()) == 1
    # Sequences 0 and 2 have residuals of size 1 and 3.
    weight = sample["down"].fitting.token_weight
    assert float(weight[0] / weight[3]) == pytest.approx(9.0)


def test_a_single_sequence_is_halved():
    sample = sample_groups(seen_in_a_layer((8,)), [torch.ones(8, 3)], {})
    assert sample["o"].fitting.rows[:, 1].tolist() == [0, 2]
    assert sample["o"].checking.rows[:, 1].tolist() == [4, 6]


def test_energy_of_weighted_rows():
    rows = torch.randn(7, 3, generator=torch.Generator().manual_seed(1))
    inputs = Inputs.of([rows[:4], rows[4:]], [torch.ones(4), torch.ones(3) * 3])
    weight = torch.tensor([1.0] * 4 + [3.0] * 3) / 13
    expected = sum(w * x.square() for w, x in zip(weight, rows, strict=True))
    assert torch.allclose(inputs.energy(), expected, atol=1e-6)
    assert inputs.thinned(3).rows.tolist() == rows[::2].tolist()
