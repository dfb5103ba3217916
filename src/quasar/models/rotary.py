"""Rotary position embedding (RoFormer, arXiv 2104.09864)."""

from __future__ import annotations

import torch
from torch import Tensor

from quasar.models.config import ModelConfig


def rotary_tables(config: ModelConfig, positions: int, window: int = 0) -> tuple[Tensor, Tensor]:
    """cos and sin [positions, rotary_dim / 2] fp32 of the layers with this window.

    Angles are taken in fp64. What scaling depends on a length takes it from the config.
    """
    dims = config.rotary_dim or config.head_dim
    exponents = torch.arange(0, dims, 2, dtype=torch.float64) / dims
    local = bool(window) and config.window_rope_theta is not None
    scaling = None if local else config.rope_scaling
    theta = config.window_rope_theta if local else config.rope_theta
    assert theta is not None
    frequencies = theta**-exponents
    factor = 1.0
    if scaling is not None:
        frequencies = scaling.stretched(frequencies, theta, config.context_length)
        factor = scaling.attention_factor
    angles = torch.arange(positions, dtype=torch.float64)[:, None] * frequencies
    return (angles.cos() * factor).float(), (angles.sin() * factor).float()
