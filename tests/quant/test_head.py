"""Integer heads: rotated rows, in chunks; of W4A8 the nearest codes on the best of a few grids."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from quasar.kernels.base import Buffer
from quasar.kernels.reference import ReferenceBackend, hadamard_rotated
from quasar.quantization import head as heads
from quasar.quantization.head import quantize_head, quantize_head_int4, round_groups
from quasar.quantization.weights import round_to_nearest


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


@pytest.mark.parametrize(("columns", "block"), [(96, 32), (64, 64), (24, 0)])
def test_heads_are_the_same_in_chunks(monkeypatch, columns, block):
    rows = torch.randn(103, columns, generator=torch.Generator().manual_seed(1)).bfloat16()
    turned = hadamard_rotated(rows.float(), block) if block else rows.float()
    whole, four = round_to_nearest(turned), None
    if block:
        four = round_groups(turned)
    monkeypatch.setattr(heads, "CHUNK_ROWS", 10)
    head = quantize_head(rows, ReferenceBackend().rotate)
    assert torch.equal(head.codes, whole.codes) and torch.equal(head.scale, whole.scale)
    assert head.rotation == block
    if four is not None:
        head4 = quantize_head_int4(rows, ReferenceBackend().rotate)
        assert torch.equal(head4.codes, four.codes) and torch.equal(head4.scale, four.scale)
        assert head4.rotation == block


def test_a_channel_that_stands_out_does_no_harm():
    g, backend = torch.Generator().manual_seed(0), ReferenceBackend()
    rows = torch.randn(80, 128, generator=g)
    rows[:, 7] /= 30
    x = torch.randn(6, 128, generator=g)
    x[:, 7] *= 30
    expected, errors = x @ rows.bfloat16().float().t(), []
    turned = quantize_head(rows.bfloat16(), backend.rotate)
    plain = replace(quantize_head(rows.bfloat16(), lambda values, block: None), rotation=0)
    for head in (turned, plain):
        out = Buffer.empty(6, 80)
        backend.linear(6, Buffer.of(x), backend.pack(head), out)
        errors.append(float((out.tensor - expected).norm()))
    assert errors[0] < 0.8 * errors[1]
