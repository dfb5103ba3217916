"""The simulated verifier: its products are the kernels', its KL is the textbook's."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from quasar.kernels.base import Int8Weight
from quasar.kernels.reference import ReferenceBackend, quantize_rows
from quasar.quantization import simulation
from quasar.quantization.simulation import Arm, Int4Linear, Int8Linear, compare
from quasar.quantization.weights import WeightFormat, covering_grid, round_to_nearest


@pytest.mark.parametrize("shape", [(1, 3, 5), (7, 30, 17), (33, 64, 96)])
def test_products_equal_the_reference_kernel_bit_for_bit(shape):
    rows, columns, out = shape
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, columns, generator=generator)
    x[0] = 0.0
    made = round_to_nearest(torch.randn(out, columns, generator=generator))
    weight = Int8Weight(made.codes, made.scale, torch.randn(out, generator=generator))
    linear = ReferenceBackend().pack(weight)
    expected = torch.stack([linear(row) for row in x])
    assert torch.equal(Int8Linear(weight)(x), expected)


def test_four_bit_products():
    """Codes times codes, corrected by the zero points, group by group."""
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(6, 64, generator=generator)
    weight = torch.randn(5, 64, generator=generator) + 0.3
    grid = covering_grid(weight, WeightFormat(4, 32))
    made = grid.pack(grid.codes(weight), torch.randn(5, generator=generator))
    codes, scale = quantize_rows(x)
    sums = torch.zeros(6, 5, dtype=torch.float64)
    for group in range(2):
        a = codes[:, group * 32 :][:, :32].long()
        w = made.codes[:, group * 32 :][:, :32].long()
        integers = a @ w.t() - a.sum(dim=1, keepdim=True) * made.zero[:, group].long()
        sums += integers * made.scale[:, group].double()
    expected = sums * scale.double() + made.bias.double()
    assert torch.allclose(Int4Linear(made)(x).double(), expected, rtol=1e-5, atol=1e-5)


def test_an_int8_head_is_an_arm(monkeypatch):
    monkeypatch.setattr(simulation, "HEAD_CHUNK", 16)
    generator = torch.Generator().manual_seed(5)
    head = torch.randn(50, 12, generator=generator).bfloat16()  # 12 inputs: none are rotated
    hidden = torch.randn(9, 12, generator=generator)
    targets = torch.randint(0, 50, (9,), generator=generator)
    _, found = measure([Arm(hidden), Arm(hidden, int8_head=True)], head, targets)
    exact = torch.log_softmax(hidden.double() @ head.double().t(), dim=-1)
    rounded = torch.log_softmax(Int8Linear(round_to_nearest(head.float()))(hidden).double(), -1)
    kl = (exact.exp() * (exact - rounded)).sum(dim=-1).mean()
    assert found.kl == pytest.approx(float(kl), rel=1e-2) and found.kl > 0


def measure(arms, head, targets):
    steps = []
    with ThreadPoolExecutor(2) as pool:
        found = compare(
            list(arms), head, targets, pool, lambda done, total: steps.append((done, total))
        )
    assert steps[-1] == (len(head), len(head))
    return found


@pytest.mark.parametrize("chunk", [7, 64])
def test_fidelity_in_tiles_is_that_of_whole_logits(monkeypatch, chunk):
    monkeypatch.setattr(simulation, "HEAD_CHUNK", chunk)
    monkeypatch.setattr(simulation, "POSITIONS", 5)
    generator = torch.Generator().manual_seed(2)
    head = torch.randn(50, 12, generator=generator).bfloat16()
    arms = [torch.randn(13, 12, generator=generator)]
    arms += [arms[0] + noise * torch.randn(13, 12, generator=generator) for noise in (0.01, 0.5)]
    targets = torch.randint(0, 50, (13,), generator=generator)
    found = measure(map(Arm, arms), head, targets)
    log_p = [torch.log_softmax(arm.double() @ head.double().t(), dim=-1) for arm in arms]
    for arm, result in zip(log_p, found, strict=True):
        kl = (log_p[0].exp() * (log_p[0] - arm)).sum(dim=-1).mean()
        assert result.kl == pytest.approx(float(kl), rel=1e-3, abs=1e-6)
        agree = (arm.argmax(-1) == log_p[0].argmax(-1)).double().mean()
        assert result.top1 == pytest.approx(float(agree))
        nll = -arm[torch.arange(13), targets].mean()
        assert result.perplexity == pytest.approx(float(nll.exp()), rel=1e-4)
    assert found[0].kl == 0.0 and found[0].top1 == 1.0


def test_lowest_token_wins_a_tie_across_chunks(monkeypatch):
    """Tokens 1 and 9 have equal logits in one arm; in the other only token 9 is best."""
    monkeypatch.setattr(simulation, "HEAD_CHUNK", 4)
    head = torch.zeros(12, 2)
    head[1, 0] = head[9, 0] = head[9, 1] = 1.0
    arms = [torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, 1.0]])]
    found = measure(map(Arm, arms), head.bfloat16(), torch.tensor([0]))
    assert found[1].top1 == 0.0
