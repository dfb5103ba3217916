"""What a model file offers, whatever its format: a config, named tensors, a tokenizer's source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from quasar.kernels.base import LinearWeight


class Checkpoint(Protocol):
    """A model on disk, mapped. Names are Hugging Face's whatever the format.

    The target is fixed here: whatever the file holds is dequantised to fp32 and rounded once to
    BF16. Opening checks every size against the file before anything is allocated.
    """

    path: Path
    format: str
    """`safetensors`, `gguf` or `compressed-tensors`."""
    config: Mapping[str, Any]
    """The keys of config.json; GGUF metadata is translated to them."""
    generation_config: Mapping[str, Any]
    quantization: Mapping[str, Any] | None
    """`quantization_config` of a compressed-tensors folder, else None."""

    def names(self) -> Sequence[str]:
        """All tensor names, such as `model.layers.0.self_attn.q_proj.weight`."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one tensor without reading it."""

    def tensor(self, name: str) -> Tensor:
        """One tensor: BF16 if it is floating point in the file, else as stored."""

    def linear(self, module: str) -> LinearWeight:
        """The linear layer called `module`, with its bias if it has one; INT8 if it is so stored."""

    def release(self) -> None:
        """Drop file pages read so far from this process' memory; they are read again on demand."""

    def fingerprint(self) -> str:
        """SHA-256 over config and all tensors' bytes (cached beside nothing: computed on request)."""
