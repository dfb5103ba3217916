"""The search: its surrogate is the formula, its choice is never worse than no smoothing."""

from __future__ import annotations

import pytest
import torch
from test_smooth import make_config, make_tensors

from quasar.models.tensors import GROUPS
from quasar.quantization import search
from quasar.quantization.calibrate import GroupSample, Inputs
from quasar.quantization.search import (
    Candidate,
    Noise,
    Surrogate,
    candidates,
    search_scales,
    shape_of,
)
from quasar.quantization.weights import WeightFormat

FORMATS = [WeightFormat(), WeightFormat(4, 8)]
CONFIG = make_config()


def search_group(group, tensors, sample, config, format):
    weights = [tensors[f"{name}.weight"] for name in GROUPS[group]]
    return search_scales(weights, sample, format, shape_of(group, config))


def sampled(group, outliers):
    """Inputs of one group, some channels of them 30 times as large."""
    columns = make_tensors(CONFIG)[f"{GROUPS[group][0]}.weight"].shape[1]
    x = torch.randn(400, columns, generator=torch.Generator().manual_seed(21))
    x[:, :outliers] *= 30
    ones = torch.ones(200)
    return GroupSample(
        x.abs().amax(dim=0), Inputs.of([x[:200]], [ones]), Inputs.of([x[200:]], [ones])
    )


def plain_tensors():
    """No outliers in the weights."""
    generator = torch.Generator().manual_seed(22)
    return {
        name: torch.randn(tensor.shape, generator=generator)
        for name, tensor in make_tensors(CONFIG).items()
    }


@pytest.mark.parametrize("format", FORMATS, ids=["w8", "w4"])
def test_surrogate_is_the_formula(format):
    generator = torch.Generator().manual_seed(23)
    x, weights = torch.randn(9, 16, generator=generator), torch.randn(2, 5, 16, generator=generator)
    omega = torch.rand(9, generator=generator)
    inputs = Inputs.of([x], [omega])
    scale = torch.rand(16, generator=generator) + 0.2
    omega, w = inputs.token_weight.double(), weights.reshape(10, 16).double()
    x, s = x.double(), scale.double()
    steps = ((x / s).abs().amax(dim=1) / 127).square()
    expected = (omega @ steps) * (w * s).square().sum()
    size = format.group_size or 16
    for start in range(0, 16, size):
        part = slice(start, start + size)
        maxima = ((w * s)[:, part].abs().amax(dim=1) / format.half_range).square().sum()
        expected += maxima * (omega @ (x / s)[:, part].square()).sum()
    found = Surrogate.of(inputs, list(weights), format)(scale)
    assert found == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize("format", FORMATS, ids=["w8", "w4"])
@pytest.mark.parametrize("group", GROUPS)
def test_outliers_are_smoothed(group, format):
    tensors, sample = plain_tensors(), sampled(group, outliers=2)
    best = search_group(group, tensors, sample, CONFIG, format)
    assert best is not None
    weights = [tensors[f"{name}.weight"] for name in GROUPS[group]]
    noise = Noise.of(sample.checking, weights, format)
    assert noise(best.scale) < 0.8 * noise(torch.ones_like(best.scale))
    assert best.scale[:2].min() > best.scale[2:].median()


@pytest.mark.parametrize("group", GROUPS)
def test_only_a_gain_is_taken(monkeypatch, group):
    """Candidates that are worse than the identity, or equal to it, are not chosen."""
    tensors, sample = plain_tensors(), sampled(group, 2)
    harm = 1 / sample.absmax
    worse = [Candidate("worse", harm if group != "o" else torch.exp2(harm.log2().round()))]
    worse.append(Candidate("equal", torch.ones_like(harm)))
    monkeypatch.setattr(search, "candidates", lambda *_: worse)
    assert search_group(group, tensors, sample, CONFIG, WeightFormat()) is None


def test_a_channel_that_some_token_has_large_is_not_scaled_up(monkeypatch):
    """The token is not among the sampled ones, whose noise the candidate lowers."""
    tensors, sample = plain_tensors(), sampled("down", 2)
    quiet = 9
    for part in (sample.fitting.rows, sample.checking.rows):
        part[:, quiet] /= 20
    sample.absmax[quiet] /= 20
    scale = sample.fitting.energy() ** 0.25
    monkeypatch.setattr(search, "candidates", lambda *_: [Candidate("rms", scale)])
    assert search_group("down", tensors, sample, CONFIG, WeightFormat()) is not None
    sample.absmax[quiet] = 100 * sample.absmax.max()
    assert search_group("down", tensors, sample, CONFIG, WeightFormat()) is None


def test_noise_is_that_of_the_integer_product():
    tensors, sample = plain_tensors(), sampled("down", 2)
    weight = tensors["mlp.down_proj.weight"]
    rows = sample.checking.rows
    codes = (rows / rows.abs().amax(dim=1, keepdim=True) * 127).round()
    rounded = (weight / weight.abs().amax(dim=1, keepdim=True) * 127).round()
    scales = rows.abs().amax(dim=1)[:, None] * weight.abs().amax(dim=1) / 127**2
    error = codes @ rounded.t() * scales - rows @ weight.t()
    expected = error.square().sum() / (rows @ weight.t()).square().sum()
    found = Noise.of(sample.checking, [weight], WeightFormat())(torch.ones(rows.shape[1]))
    assert found == pytest.approx(float(expected), rel=1e-3)


def test_scales_of_the_values_are_powers_of_two_that_heads_share():
    tensors = plain_tensors()
    weights = [tensors["self_attn.o_proj.weight"]]
    found = list(candidates(weights, sampled("o", 2), shape_of("o", CONFIG)))
    assert len(found) > 50
    for candidate in found:
        assert (torch.frexp(candidate.scale)[0] == 0.5).all(), candidate.label
        heads = candidate.scale.view(CONFIG.kv_heads, -1, CONFIG.head_dim)
        assert (heads == heads[:, :1]).all(), candidate.label


@pytest.mark.parametrize("group", GROUPS)
def test_dead_channels_are_no_obstacle(group):
    tensors, sample = plain_tensors(), sampled(group, 2)
    for part in (sample.absmax[None], sample.fitting.rows, sample.checking.rows):
        part[:, 5:9] = 0
    for name in GROUPS[group]:
        tensors[f"{name}.weight"][:, 11] = 0
    weights = [tensors[f"{name}.weight"] for name in GROUPS[group]]
    for candidate in candidates(weights, sample, shape_of(group, CONFIG)):
        assert torch.isfinite(candidate.scale).all() and (candidate.scale > 0).all()
    assert search_group(group, tensors, sample, CONFIG, WeightFormat()) is not None


def test_silence_is_left_alone():
    """No inputs, no weights: every candidate is as good as none."""
    tensors, sample = plain_tensors(), sampled("down", 0)
    for part in (sample.absmax, sample.fitting.rows, sample.checking.rows):
        part.zero_()
    assert search_group("down", tensors, sample, CONFIG, WeightFormat()) is None
