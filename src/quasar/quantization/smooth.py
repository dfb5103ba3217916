"""SmoothQuant (arXiv 2211.10438): move the size of outlier channels from activations to weights.

For a linear y = x W^T and one factor s_j > 0 an input channel, (x / s) (W s)^T is the same
function. With a_j = max |x_j| and w_j = max_i |W_ij|, s_j = a_j^alpha / w_j^(1 - alpha) shares the
burden of rounding between the two. Nothing remains at run time: 1 / s goes into what makes x.

    group    x is made by                         folded as
    qkv      input norm                           norm / s in BF16, the realised quotient into W
    o        v (one s a channel of a kv head)     rows and bias of v / s, columns of o * s
    gate_up  post-attention norm                  as qkv
    down     silu(gate) * up                      rows of up / s, columns of down * s

Dividing a row of v or up costs those nothing: the row's own scale takes it up. For `o`, s is a
power of two: then v / s is exact in BF16 too, and K and V mean the same in every precision.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quasar.models.config import ModelConfig
from quasar.models.layer import LayerTensors
from quasar.models.tensors import GROUPS, INPUT_NORM, POST_NORM, storable_norm

ALPHA = 0.5
"""Share of the difficulty that moves to the weights; the paper's default."""
LIMIT = 2.0**14
"""Largest factor either way around the geometric mean; real models need 2^4."""

Scales = dict[str, Tensor]
"""By group: s [in] fp32 > 0. A group that is absent is left alone."""


@dataclass(frozen=True, slots=True)
class Smoothing:
    """What was chosen for a layer."""

    scales: Scales
    labels: Mapping[str, str]
    """By group of `scales`: how they were found, for the report."""

    def without(self, groups: Collection[str]) -> Smoothing:
        kept = [group for group in self.scales if group not in groups]
        return Smoothing(
            {group: self.scales[group] for group in kept},
            {group: self.labels[group] for group in kept},
        )


UNSMOOTHED = Smoothing({}, {})


def smoothquant(
    tensors: LayerTensors, absmax: Mapping[str, Tensor], config: ModelConfig
) -> Smoothing:
    """SmoothQuant factors of all four groups; absmax [in]: the largest |x| of each channel."""
    scales = {}
    for group, linears in GROUPS.items():
        weight = column_absmax(*(tensors[f"{linear}.weight"] for linear in linears))
        activation = absmax[group]
        if group == "o":
            activation, weight = (over_query_heads(x, config) for x in (activation, weight))
        factors = balance(activation, weight)
        if group == "o":
            factors = to_query_heads(nearest_power_of_two(factors), config)
        scales[group] = factors
    return Smoothing(scales, dict.fromkeys(scales, "smoothquant"))


def column_absmax(*weights: Tensor) -> Tensor:
    """max over all rows of |W_ij|: weights [out, in] -> [in]."""
    return torch.stack([weight.abs().amax(dim=0) for weight in weights]).amax(dim=0)


def balance(
    activation: Tensor, weight: Tensor, alpha: float = ALPHA, beta: float = 1 - ALPHA
) -> Tensor:
    """a^alpha / w^beta around a geometric mean of 1 (a common factor changes no rounding).

    A channel that is zero in the activations or in the weights needs no smoothing: 1.
    """
    live = (activation > 0) & (weight > 0)
    exponent = alpha * activation.double().log2() - beta * weight.double().log2()
    mean = exponent[live].mean() if live.any() else exponent.new_zeros(())
    exponent = torch.where(live, exponent - mean, torch.zeros_like(exponent))
    return (2.0**exponent).clamp(1 / LIMIT, LIMIT).float()


def nearest_power_of_two(scale: Tensor) -> Tensor:
    return torch.exp2(scale.log2().round())


def over_query_heads(x: Tensor, config: ModelConfig) -> Tensor:
    """[heads * head_dim] -> [kv_heads * head_dim], the maximum of the heads that share one v."""
    return x.view(config.kv_heads, -1, config.head_dim).amax(dim=1).flatten()


def to_query_heads(x: Tensor, config: ModelConfig) -> Tensor:
    """[kv_heads * head_dim] -> [heads * head_dim]: each query head gets its kv head's values."""
    grouped = x.view(config.kv_heads, 1, config.head_dim)
    return grouped.expand(-1, config.heads // config.kv_heads, -1).flatten()


def fold(tensors: LayerTensors, scales: Scales, config: ModelConfig) -> tuple[LayerTensors, Scales]:
    """The same layer with its scales folded in, and the scales as they came out.

    Norm weights of the result are exact in BF16, hence their realised scale differs a little.
    """
    folded, realised = dict(tensors), dict(scales)
    for group, norm in (("qkv", INPUT_NORM), ("gate_up", POST_NORM)):
        if group in scales:
            folded[norm], realised[group] = divide_norm(tensors[norm], scales[group], config)
    for linear, scale in output_scales(scales, config).items():
        _divide_rows(folded, linear, scale)
    for group, scale in realised.items():
        for linear in GROUPS[group]:
            folded[f"{linear}.weight"] = folded[f"{linear}.weight"] * scale
    return folded, realised


def output_scales(scales: Scales, config: ModelConfig) -> dict[str, Tensor]:
    """By linear: what its outputs [out] are divided by, to smooth the input of the next one."""
    found = {}
    if "o" in scales:
        # Every query head of a group repeats the scales of its kv head: take the first.
        heads = scales["o"].view(config.kv_heads, -1, config.head_dim)
        found["self_attn.v_proj"] = heads[:, 0].flatten()
    if "down" in scales:
        found["mlp.up_proj"] = scales["down"]
    return found


def divide_norm(norm: Tensor, scale: Tensor, config: ModelConfig) -> tuple[Tensor, Tensor]:
    """norm / scale rounded to what a file can hold, and the quotient that this rounding realises.

    Where the rounded weight is zero the channel is dead, or would die: it stays as it was.
    """
    rounded = storable_norm(norm / scale, config)
    rounded = torch.where(rounded == 0, norm, rounded)
    return rounded, torch.where(norm == 0, torch.ones_like(norm), norm / rounded)


def _divide_rows(tensors: LayerTensors, linear: str, scale: Tensor) -> None:
    for part in ("weight", "bias"):
        name = f"{linear}.{part}"
        if name in tensors:
            rows = tensors[name]
            tensors[name] = rows / scale.view(-1, *(1,) * (rows.dim() - 1))
