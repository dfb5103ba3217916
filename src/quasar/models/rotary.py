"""Rotary position embedding (RoFormer, arXiv 2104.09864)."""

from __future__ import annotations

import torch
from torch import Tensor

from quasar.models.config import ModelConfig


def rotary_tables(config: ModelConfig, length: int, window: int = 0) -> tuple[Tensor, Tensor]:
    """cos and sin [rows, rotary_dim / 2] fp32 for texts of up to `length` tokens.

    A text that may grow past `config.short_texts` has its positions after those of a shorter one.
    """
    short = config.short_texts
    if not 0 < short < length:
        return rotary_table(config, length, window)
    pairs = zip(*(rotary_table(config, n, window) for n in (short, length)), strict=True)
    cos, sin = (torch.cat(both) for both in pairs)
    return cos, sin


def rotary_table(config: ModelConfig, length: int, window: int = 0) -> tuple[Tensor, Tensor]:
    """cos and sin [length, rotary_dim / 2] fp32 of a text that grows to `length` tokens, in the
    layers with this window. Angles are taken in fp64."""
    dims = config.rotary_dim or config.head_dim
    exponents = torch.arange(0, dims, 2, dtype=torch.float64) / dims
    local = bool(window) and config.window_rope_theta is not None
    scaling = None if local else config.rope_scaling
    theta = config.window_rope_theta if local else config.rope_theta
    assert theta is not None
    frequencies = theta**-exponents
    factor = 1.0
    if scaling is not None:
        frequencies = scaling.stretched(frequencies, theta, length)
        factor = scaling.attention_factor
    angles = torch.arange(length, dtype=torch.float64)[:, None] * frequencies
    return (angles.cos() * factor).float(), (angles.sin() * factor).float()
