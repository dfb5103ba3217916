"""What a model file offers, whatever its format: a config, named tensors, a tokenizer's source."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from quasar.checkpoints.mapping import MappedFile
from quasar.errors import CheckpointError
from quasar.kernels.base import DenseWeight, LinearWeight

SERIAL = 1 << 15
"""torch works on up to this many elements without its thread pool, whose barriers cost tens of
milliseconds a tensor when the processors are busy otherwise (measured: loading took 7 times as
long)."""


class Checkpoint(Protocol):
    """A model on disk, mapped. Names are Hugging Face's whatever the format.

    The target is fixed here: whatever the file holds is dequantised to fp32 and rounded once to
    BF16. Opening checks every size against the file before anything is allocated; reading refuses
    tensors that hold NaN or infinities. All failures are `CheckpointError`.
    """

    path: Path
    format: str
    """`safetensors`, `gguf` or `compressed-tensors`."""
    precision: str = "bf16"
    """That of the linears, as a verifier is named."""
    down_rotation: int = 0
    """Size of the blocks in which a verifier is to rotate the inputs of `down`; 0: none. INT8
    weights are not rotated yet, 4-bit ones are."""
    config: Mapping[str, Any]
    """The keys of config.json; GGUF metadata is translated to them."""
    generation_config: Mapping[str, Any]
    quantization: Mapping[str, Any] | None
    """`quantization_config` of a compressed-tensors folder, else None."""
    tokenizer_metadata: Mapping[str, Any] | None
    """The `tokenizer.*` keys of a GGUF file; None if `path` is a folder with tokenizer.json."""
    files: Sequence[MappedFile]

    def names(self) -> Sequence[str]:
        """All tensor names, such as `model.layers.0.self_attn.q_proj.weight`.

        Scales and the like belong to their quantised weight and are not listed.
        """

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one tensor without reading it."""

    def tensor(self, name: str) -> Tensor:
        """One tensor in BF16, or the codes of a quantised weight, one a byte.

        It may be a view of the file: writing to it changes this process' copy, until `release`.
        """

    def linear(self, module: str) -> LinearWeight:
        """The linear layer `module`, with its bias if it has one, in the precision it is stored."""
        return DenseWeight(self.tensor(f"{module}.weight"), self.bias(module))

    def bias(self, module: str) -> Tensor | None:
        """Bias of `module`, [out] fp32 holding BF16 values, or None."""
        name = f"{module}.bias"
        return self.tensor(name).float() if name in self.names() else None

    def release(self) -> None:
        """Drop file pages read so far from this process' memory; they are read again on demand."""
        for file in self.files:
            file.release()

    def fingerprint(self) -> str:
        """SHA-256 over config and the bytes of all model files: a full read, so kept by callers."""
        digest = hashlib.sha256(json.dumps(dict(self.config), sort_keys=True).encode())
        for file in self.files:
            for chunk in file.chunks():
                digest.update(chunk)
        return digest.hexdigest()


def to_bfloat16(tensor: Tensor, where: str) -> Tensor:
    """Round once to BF16; refuse integers, NaN and infinities (also those that rounding makes)."""
    if not tensor.is_floating_point():
        raise CheckpointError(f"{where} holds {tensor.dtype}, floating point is needed")
    rounded = tensor.to(torch.bfloat16)
    flat = rounded.view(-1)
    for start in range(0, len(flat), SERIAL):
        # aminmax passes NaN on, needs no memory and runs at read speed, unlike isfinite().all().
        low, high = torch.aminmax(flat[start : start + SERIAL])
        if not (math.isfinite(low) and math.isfinite(high)):
            raise CheckpointError(f"{where} holds NaN or infinite values")
    return rounded


def check_tensors(checkpoint: Checkpoint, expected: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse a checkpoint whose tensors are not exactly the expected names and shapes."""
    names = dict.fromkeys(checkpoint.names())
    for problem, found in (
        ("lacks", [name for name in expected if name not in names]),
        ("has unexpected", [name for name in names if name not in expected]),
    ):
        if found:
            more = f" and {len(found) - 3} more" if len(found) > 3 else ""
            raise CheckpointError(
                f"{checkpoint.path} {problem} tensor {', '.join(map(repr, found[:3]))}{more}"
            )
    for name, shape in expected.items():
        if checkpoint.shape(name) != shape:
            raise CheckpointError(
                f"{checkpoint.path}: tensor {name!r} has shape {list(checkpoint.shape(name))}, "
                f"the config calls for {list(shape)}"
            )
