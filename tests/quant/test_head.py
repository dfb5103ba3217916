"""The W4A8 head: the nearest codes on the best of a few grids."""

from __future__ import annotations

import torch

from quasar.quantization.head import round_groups


def error(weight, form):
    groups = (weight.shape[0], form.scale.shape[1], form.group_size)
    values = (form.codes.float().view(groups) - form.zero.float()[..., None]) * form.scale[
        ..., None
    ]
    return (values - weight.view(groups)).square().sum(dim=2)


def test_groups_lie_on_their_grid():
    weight = torch.randn(50, 96, generator=torch.Generator().manual_seed(0))
    weight[3], weight[4, 32:64], weight[5] = 0.0, 7.0, weight[5].abs()
    form = round_groups(weight)
    form.check()
    assert form.group_size == 32
    step = form.scale.square() / 12 * 32
    assert error(weight, form).mean() < 1.1 * step.mean()
    assert (error(weight, form)[3] == 0).all() and (form.scale[3] == 1).all()
    assert (form.zero[5] == 0).all() and (form.zero[4, 1] == 0).all()


def test_narrower_grids_only_help():
    weight = torch.randn(400, 96, generator=torch.Generator().manual_seed(1))
    covering, best = (
        error(weight, round_groups(weight, (1.0,))),
        error(weight, round_groups(weight)),
    )
    assert (best <= covering).all()
    assert best.sum() < 0.96 * covering.sum()
