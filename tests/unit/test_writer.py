"""Writing folders: all or nothing, one tensor at a time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny_files
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from quasar.checkpoints import open_checkpoint
from quasar.checkpoints.writer import CheckpointWriter
from quasar.errors import QuasarError, UsageError


def write(out: Path, shard_bytes: int = 1 << 30) -> None:
    with CheckpointWriter(out, shard_bytes) as writer:
        writer.add_json("config.json", tiny_files.CONFIG)
        for name, tensor in tiny_files.tensors().items():
            writer.add(name, tensor)
        writer.commit()


def test_one_shard_reads_back(tmp_path: Path) -> None:
    write(tmp_path / "out")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]
    stored = load_file(tmp_path / "out" / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path / "out")
    for name, tensor in tiny_files.tensors().items():
        assert torch.equal(stored[name], tensor)
        assert torch.equal(checkpoint.tensor(name), tensor)
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_many_shards_have_an_index(tmp_path: Path) -> None:
    write(tmp_path / "out", shard_bytes=8000)
    names = sorted(p.name for p in (tmp_path / "out").glob("*.safetensors"))
    assert len(names) > 2 and names[0] == f"model-00001-of-{len(names):05d}.safetensors"
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    size = sum(tensor.nbytes for tensor in tiny_files.tensors().values())
    assert index["metadata"]["total_size"] == size
    checkpoint = open_checkpoint(tmp_path / "out")
    for name, tensor in tiny_files.tensors().items():
        assert torch.equal(checkpoint.tensor(name), tensor)
    for name in names[:-1]:
        stored = load_file(tmp_path / "out" / name)
        assert sum(t.nbytes for t in stored.values()) <= 8000 or len(stored) == 1


def test_a_full_header_starts_a_shard(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path / "out") as writer:
        writer.add_json("config.json", tiny_files.CONFIG)
        for index in range(3000):
            writer.add(f"tensor.with.a.name.of.some.length.{index}", torch.full((4,), index % 256))
        writer.commit()
    shards = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(shards) > 1
    found = {name for shard in shards for name in load_file(shard)}
    assert len(found) == 3000


def test_other_readers_can_map_mixed_types(tmp_path: Path) -> None:
    values = {"a": torch.tensor([1, 2, 3], dtype=torch.int8), "b": torch.randn(3)}
    with CheckpointWriter(tmp_path / "out") as writer:
        for name, value in values.items():
            writer.add(name, value)
        writer.commit()
    found = {}
    for shard in (tmp_path / "out").glob("*.safetensors"):
        found |= load_file(shard)
    assert all(torch.equal(found[name], value) for name, value in values.items())


def test_views_are_written_as_they_look(tmp_path: Path) -> None:
    base = torch.arange(12.0).view(3, 4)
    with CheckpointWriter(tmp_path / "out") as writer:
        writer.add("x", base.T[1:])
        writer.commit()
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["x"], base.T[1:])


def test_files_are_copied(tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("hello")
    with CheckpointWriter(tmp_path / "out") as writer:
        writer.add_file(tmp_path / "note.txt")
        writer.add_file(tmp_path / "note.txt", "other.txt")
        (writer.folder / "mine.txt").write_text("direct")
        writer.commit()
    texts = {p.name: p.read_text() for p in (tmp_path / "out").iterdir()}
    assert texts == {"note.txt": "hello", "other.txt": "hello", "mine.txt": "direct"}


def test_an_interruption_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), CheckpointWriter(tmp_path / "out") as writer:
        writer.add("x", torch.ones(3))
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_leaving_without_commit_leaves_nothing(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path / "out") as writer:
        writer.add("x", torch.ones(3))
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_run_left_is_cleared(tmp_path: Path) -> None:
    leftover = tmp_path / ".out.partial"
    leftover.mkdir()
    (leftover / "shard-0").write_bytes(b"half")
    (leftover / "stale.json").write_text("{}")
    write(tmp_path / "out")
    assert not (tmp_path / "out" / "stale.json").exists()
    assert not leftover.exists()


def test_two_writers_of_one_folder_are_refused(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path / "out") as first:
        with (
            pytest.raises(QuasarError, match=r"another process is writing .*out") as error,
            CheckpointWriter(tmp_path / "out"),
        ):
            pass
        assert not isinstance(error.value, UsageError)
        first.add("x", torch.ones(3))
        first.commit()
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_existing_output_is_refused_before_work(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("keep")
    with pytest.raises(UsageError, match="not an empty folder"), CheckpointWriter(tmp_path / "out"):
        pass
    assert (tmp_path / "out" / "precious").read_text() == "keep"
    (tmp_path / "file").write_text("keep")
    with (
        pytest.raises(UsageError, match="not an empty folder"),
        CheckpointWriter(tmp_path / "file"),
    ):
        pass
    with pytest.raises(UsageError, match="cannot write"), CheckpointWriter(tmp_path / "file" / "x"):
        pass


def test_an_empty_folder_may_be_filled(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    write(tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.parametrize("target", ["empty", "absent"])
def test_a_link_keeps_pointing_to_the_folder(tmp_path: Path, target: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / target)
    write(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / target / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("target", "named"),
    [(".", "current folder"), ("loop", "link to itself"), ("mount", "mount point")],
)
def test_what_no_rename_can_replace_is_refused_before_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str, named: str
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    if target == "loop":
        Path("loop").symlink_to("loop")
    elif target == "mount":
        monkeypatch.setattr(Path, "is_mount", lambda path: path.name == "mount")
    with pytest.raises(UsageError, match=named), CheckpointWriter(Path(target)):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["here"]


def test_a_tensor_is_added_once(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path / "out") as writer:
        writer.add("x", torch.ones(3))
        with pytest.raises(ValueError, match="added before"):
            writer.add("x", torch.ones(3))


@pytest.mark.parametrize("aside", [False, True])
@pytest.mark.parametrize("killed", [False, True])
def test_one_of_two_sets_of_tensors_is_chosen(tmp_path: Path, aside: bool, killed: bool) -> None:
    """What is dropped is gone; a run killed after the choice finds it made."""
    with CheckpointWriter(tmp_path / "out", 12, resumable=True) as writer:
        assert writer.resume("key") is None
        for name in ("a", "b"):
            writer.add(name, torch.zeros(3))
        writer.set_aside({}, {})
        for name in ("a", "b", "c"):
            writer.add(name, torch.ones(3))
        assert len(list(writer.folder.glob("shard-*"))) == 5
        writer.choose(aside, {"chosen": aside})
        if killed:
            point = writer.resume("key")
            assert point is not None and point.state == {"chosen": aside}
            writer.choose(aside, point.state)
        assert len(list(writer.folder.glob("shard-*"))) == (2 if aside else 3)
        writer.add("d", torch.full((3,), 2.0))
        writer.commit()
    checkpoint = open_tensors(tmp_path / "out")
    assert sorted(checkpoint) == (["a", "b", "d"] if aside else ["a", "b", "c", "d"])
    assert checkpoint["a"].tolist() == [0.0 if aside else 1.0] * 3
    assert checkpoint["d"].tolist() == [2.0] * 3


def open_tensors(folder: Path) -> dict[str, torch.Tensor]:
    found = [load_file(path) for path in folder.glob("*.safetensors")]
    return {name: tensor for part in found for name, tensor in part.items()}


def test_json_without_numbers_is_refused(tmp_path: Path) -> None:
    with (
        CheckpointWriter(tmp_path / "out") as writer,
        pytest.raises(QuasarError, match=r"report\.json to .*out: .*nan"),
    ):
        writer.add_json("report.json", {"kl": float("nan")})


def test_a_failing_disk_is_one_clear_error(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path / "out") as writer:
        writer.add("x", torch.ones(3))
        writer._shards[0].file.close()
        writer._shards[0].file = Path("/dev/full").open("wb", buffering=0)  # noqa: SIM115
        with pytest.raises(QuasarError, match=r"cannot write .*out: No space left"):
            writer.add("y", torch.ones(3))
    assert list(tmp_path.iterdir()) == []
