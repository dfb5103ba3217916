"""Models of the Hugging Face hub: what of a repository is needed, fetched into the hub's own cache.

The texts (config, tokenizer) come before the weights: a model that cannot be used is refused before
gigabytes are fetched, and weights in the cache mean that all of the model is there. Files that
could hold code (`*.bin`, `*.pt`, `*.py`) are never downloaded.
"""

from __future__ import annotations

import glob
import logging
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from quasar.checkpoints.hf import INDEX, TEXTS, WEIGHTS, missing_weights, read_shards
from quasar.errors import CheckpointError, UsageError

_NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,95}"
_ID = re.compile(rf"({_NAME}/{_NAME})(?:@([A-Za-z0-9][A-Za-z0-9_./-]{{0,199}}))?(?::([^:\0]+))?")

log = logging.getLogger("quasar")


@dataclass(frozen=True, slots=True)
class HubModel:
    """`owner/name`, as in `owner/name@revision` or, of GGUF files, `owner/name:Q8_0`."""

    repository: str
    revision: str | None = None
    """A branch, a tag or a commit; None for the main branch."""
    file: str | None = None
    """The name of a GGUF file, or the quantisation that the name ends in."""

    def __str__(self) -> str:
        return self.repository + (f"@{self.revision}" if self.revision else "")


def parse_id(text: str) -> HubModel | None:
    """What a hub id says, or None if it is none."""
    match = _ID.fullmatch(text)
    if match is None or ".." in match[1] or ".." in (match[2] or ""):
        return None
    return HubModel(*match.groups())


def title(path: Path) -> str:
    """A short name for a local model: of a snapshot in the hub's cache, its repository's."""
    snapshot = path if path.parent.name == "snapshots" else path.parent
    if path.suffix != ".gguf" and snapshot.parent.name == "snapshots":
        return snapshot.parents[1].name.removeprefix("models--")
    return path.stem


def download(model: HubModel, offline: bool, check: Callable[[Path], None]) -> Path:
    """The local folder or GGUF file of a model, downloaded unless the cache has it.

    `check` is given the folder of the texts before weights are fetched, and may refuse the model.
    `offline`, or HF_HUB_OFFLINE=1, asks the cache alone; so does a hub that cannot be reached, with
    a warning. CheckpointError, saying what to do, if there is no model that can be read.
    """
    import huggingface_hub

    _quieten()
    if offline or huggingface_hub.constants.HF_HUB_OFFLINE:
        return _cached(model, "offline nothing is downloaded: run it once online")
    try:
        with _explained(model):
            return _fetched(model, check)
    except _UnreachableError as error:
        why = f"{_host()} cannot be reached ({error})"
    found = _cached(model, f"{why}: check the connection and HF_ENDPOINT")
    log.warning("%s: using the copy in the cache", why)
    return found


def pick(names: Sequence[str], model: HubModel) -> str | None:
    """The GGUF file to take of a repository's files; None: the safetensors beside config.json.

    CheckpointError if there is neither, or a choice.
    """
    ggufs = sorted(n for n in names if n.endswith(".gguf") and "mmproj" not in n)
    if model.file is not None:
        return _named(ggufs, model)
    if WEIGHTS in names or INDEX in names:
        return None
    if not ggufs:
        raise CheckpointError(f"{model} {missing_weights(names)}")
    if len(ggufs) > 1:
        raise CheckpointError(
            f"{model} holds several GGUF files; choose one, as in {model}:{ggufs[0]}: "
            f"{', '.join(ggufs)}"
        )
    return ggufs[0]


def _named(ggufs: Sequence[str], model: HubModel) -> str:
    """The file of this name, or the one whose name ends in it, as in Q8_0."""
    wanted = str(model.file).lower()
    ends = tuple(f"{mark}{wanted}.gguf" for mark in "-./_")
    for found in (
        [name for name in ggufs if name.lower() == wanted],
        [name for name in ggufs if f"/{name.lower()}".endswith(ends)],
    ):
        if len(found) == 1:
            return found[0]
        if found:
            raise CheckpointError(f"{model}:{model.file} could be each of {', '.join(found)}")
    listed = ", ".join(ggufs) or "no GGUF file"
    raise CheckpointError(f"{model} has no GGUF file {model.file!r}; it holds {listed}")


def _fetched(model: HubModel, check: Callable[[Path], None]) -> Path:
    from huggingface_hub import HfApi, hf_hub_download

    info = HfApi().model_info(model.repository, revision=model.revision)
    names = [sibling.rfilename for sibling in info.siblings or []]
    file = pick(names, model)
    if file is not None:
        return Path(hf_hub_download(model.repository, file, revision=model.revision))
    folder = _snapshot(model, model.revision, [*TEXTS, INDEX])
    check(folder)
    weights = [WEIGHTS] if WEIGHTS in names else read_shards(folder / INDEX)
    for name in weights:
        if name not in names:
            raise CheckpointError(f"{model} lacks {name}")
    return _snapshot(model, folder.name, list(weights))


def _snapshot(
    model: HubModel, revision: str | None, names: Sequence[str], offline: bool = False
) -> Path:
    from huggingface_hub import snapshot_download

    folder = snapshot_download(
        model.repository,
        revision=revision,
        allow_patterns=[glob.escape(name) for name in names],
        local_files_only=offline,
    )
    return Path(folder)


def _cached(model: HubModel, why: str) -> Path:
    """The copy in the cache, if it is complete."""
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    def absent(what: str) -> CheckpointError:
        return CheckpointError(
            f"{model} {what} in the cache, and {why}; or fetch it with `hf download "
            f"{model.repository}` elsewhere and give the folder"
        )

    try:
        folder = _snapshot(model, model.revision, TEXTS, offline=True)
    except LocalEntryNotFoundError:
        raise absent("is not fully") from None
    except HFValidationError as error:
        raise _no_id(model, error) from None
    names = [str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()]
    if not any(name.endswith((".gguf", ".safetensors")) for name in names):
        raise absent("has no weights")
    file = pick(names, model)
    single = WEIGHTS in names
    for name in [file] if file else [WEIGHTS] if single else read_shards(folder / INDEX):
        if name not in names:
            raise absent(f"lacks {name}")
    return folder / file if file else folder


class _UnreachableError(Exception):
    """No answer, or one that says nothing about the model; the reason, in few words."""


@contextmanager
def _explained(model: HubModel) -> Iterator[None]:
    """The library's errors, in one line each that says what to do."""
    from huggingface_hub import errors

    page = f"{_host()}/{model.repository}"
    try:
        yield
    except (CheckpointError, errors.HFValidationError) as error:
        raise error if isinstance(error, CheckpointError) else _no_id(model, error) from None
    except errors.GatedRepoError:
        raise CheckpointError(
            f"{model} is gated: accept its terms at {page}, then set HF_TOKEN or run "
            "`hf auth login`"
        ) from None
    except errors.RevisionNotFoundError:
        raise CheckpointError(f"{model.repository} has no revision {model.revision!r}") from None
    except errors.RepositoryNotFoundError:
        raise CheckpointError(
            f"{model} is no file or folder here, and {page} does not exist or is private: "
            "check the name; for a private model set HF_TOKEN or run `hf auth login`"
        ) from None
    except Exception as error:  # the library's HTTP client, and its errors, change with its version
        raise _failure(model, error) from None


def _failure(model: HubModel, error: Exception) -> Exception:
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 403):
        return CheckpointError(f"{model}: {_host()} refuses access ({status}): check HF_TOKEN")
    if status is not None:
        return _UnreachableError(f"it answers {status}")
    if isinstance(error, OSError) and error.filename is not None:
        return CheckpointError(f"{model} cannot be cached: {error.filename}: {error.strerror}")
    return _UnreachableError(f"{type(error).__name__}: {error}".partition("\n")[0])


def _no_id(model: HubModel, error: Exception) -> UsageError:
    return UsageError(f"{model} is neither a local path nor a hub id: {error}")


def _host() -> str:
    from huggingface_hub import constants

    return str(constants.ENDPOINT)


def _quieten() -> None:
    """The library's bars are for terminals, its warnings say nothing that ours do not."""
    from huggingface_hub import constants
    from huggingface_hub.utils.tqdm import disable_progress_bars

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    if not sys.stderr.isatty() and constants.HF_HUB_DISABLE_PROGRESS_BARS is None:
        disable_progress_bars()
