"""Errors that a user can act on. Anything else that escapes is a bug of ours."""

_LONGEST = 1000


class QuasarError(Exception):
    """A refusal or failure with a clear one-line message (exit code 1).

    Messages quote names and values of files: line ends in them are spaces here, and a long one
    loses its middle.
    """

    def __str__(self) -> str:
        text = " ".join(super().__str__().split())
        if len(text) <= _LONGEST:
            return text
        return f"{text[: _LONGEST // 2]} [...] {text[-_LONGEST // 2 :]}"


class UsageError(QuasarError):
    """An option or argument that cannot be honoured (exit code 2)."""


class CheckpointError(QuasarError):
    """A model file is missing, malformed, inconsistent or unsupported; names the file or tensor."""
