"""Rotary position embedding (RoFormer, arXiv 2104.09864)."""

from __future__ import annotations

import torch
from torch import Tensor

from quasar.models.config import ModelConfig


def rotary_tables(config: ModelConfig, positions: int) -> tuple[Tensor, Tensor]:
    """cos and sin [positions, head_dim / 2] fp32, the angles taken in fp64."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    frequencies = config.rope_theta**-exponents
    angles = torch.arange(positions, dtype=torch.float64)[:, None] * frequencies
    return angles.cos().float(), angles.sin().float()
