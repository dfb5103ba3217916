"""Model files in and out: `open_checkpoint` finds the format by itself."""

from __future__ import annotations

from pathlib import Path

from quasar.checkpoints.base import Checkpoint, check_tensors
from quasar.checkpoints.hf import PICKLES, SafetensorsCheckpoint, missing_weights
from quasar.errors import CheckpointError
from quasar.files import open_regular, read_json

__all__ = ["Checkpoint", "check_tensors", "open_checkpoint"]


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a Hugging Face folder, a compressed-tensors W8A8 folder or a GGUF file.

    Raises CheckpointError, naming the file, for anything missing, malformed or unsupported.
    """
    try:
        if path.is_dir():
            return _open_folder(path)
        with open_regular(path) as file:
            magic = file.read(4)
    except OSError as error:
        raise CheckpointError(f"cannot open {path}: {error.strerror}") from None
    if magic == b"GGUF":
        from quasar.checkpoints.gguf import GgufCheckpoint

        return GgufCheckpoint(path)
    if path.suffix in PICKLES:
        raise CheckpointError(
            f"{path} is a pickle file, which could run code when read; "
            "convert the model to safetensors first"
        )
    advice = "; give the folder it lies in" if path.suffix == ".safetensors" else ""
    raise CheckpointError(f"{path} is neither a model folder nor a GGUF file{advice}")


def _open_folder(path: Path) -> Checkpoint:
    from quasar.checkpoints.compressed import CompressedCheckpoint

    if not (path / "config.json").exists():
        names = sorted(file.name for file in path.iterdir())
        raise CheckpointError(f"{path} has no config.json and {missing_weights(names)}")
    config = read_json(path / "config.json")
    if config.get("quantization_config") is not None:
        return CompressedCheckpoint(path, config)
    return SafetensorsCheckpoint(path, config)
