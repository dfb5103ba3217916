"""Errors that a user can act on. Anything else that escapes is a bug of ours."""


class QuasarError(Exception):
    """A refusal or failure with a clear one-line message (exit code 1)."""


class UsageError(QuasarError):
    """An option or argument that cannot be honoured (exit code 2)."""


class CheckpointError(QuasarError):
    """A model file is missing, malformed, inconsistent or unsupported; names the file or tensor."""
