"""Second moments: equal to the direct sum, to the bit whatever the threads, and rotated."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import tiny
from quasar.models.families import parse_config
from quasar.models.layer import Layer
from quasar.models.tensors import GROUPS, layer_shapes
from quasar.quantization import calibrate, moments
from quasar.quantization.calibrate import GroupSample, Inputs, sample_layer
from quasar.quantization.hadamard import rotate_with_matrix
from quasar.quantization.moments import MomentSums, moments_over


def normal(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def narrow(monkeypatch):
    """Several blocks and portions, also where little is computed."""
    monkeypatch.setattr(moments, "BLOCK", 16)
    monkeypatch.setattr(calibrate, "PORTION_TOKENS", 30)


@pytest.mark.parametrize("channels", [16, 40, 64])
def test_sums_by_sequence_are_the_direct_sum(narrow, channels):
    parts = [normal(i, n, channels) for i, n in enumerate((7, 1, 12))]
    weights = [normal(9 + i, len(part)).square() for i, part in enumerate(parts)]
    sums = MomentSums()
    with ThreadPoolExecutor(2) as pool:
        sums.add({"o": parts[:2]}, {"o": weights[:2]}, pool)
        sums.add({"o": parts[2:]}, {"o": weights[2:]}, pool)
    rows, weight = torch.cat(parts).double(), torch.cat(weights).double()
    expected = rows.t() @ (rows * weight[:, None]) / weight.sum()
    found = sums.means()["o"]
    assert torch.allclose(found.double(), expected, atol=1e-5)
    assert sums.means() == {}


class Late(ThreadPoolExecutor):
    """Odd pieces of work wait, so that they end in another order."""

    def map(self, work, items):
        def late(pair):
            number, item = pair
            time.sleep(0.002 * (number % 2))
            return work(item)

        return super().map(late, list(enumerate(items)))


def layer_and_states():
    config = parse_config(tiny.CONFIGS["llama"] | {"num_hidden_layers": 1})
    shapes = layer_shapes(config)
    tensors = {name: normal(i, *shapes[name]) / 4 for i, name in enumerate(shapes)}
    lengths = (9, 21, 30, 2, 17, 40)
    return Layer(config, 0, tensors), [normal(50 + n, n, config.hidden_size) for n in lengths]


def test_the_bits_do_not_depend_on_the_threads(narrow):
    found = []
    for pool in (ThreadPoolExecutor(1), ThreadPoolExecutor(5), Late(3)):
        layer, states = layer_and_states()
        with pool:
            found.append(sample_layer(layer, states, pool, moments=True))
    for group in GROUPS:
        first, *others = (sample[group] for sample in found)
        for other in others:
            assert torch.equal(first.moments, other.moments)
            assert torch.equal(first.fitting.rows, other.fitting.rows)


def test_moments_of_a_layer_are_of_all_its_inputs(narrow, monkeypatch):
    """`o` and `down` by the size of the outputs, whatever part of the text is sampled."""
    layer, states = layer_and_states()
    seen, outputs = {group: [] for group in GROUPS}, []
    for state in states:
        outputs.append(layer(state, lambda group, x: seen[group].append(x)))
    monkeypatch.setattr(calibrate, "CALIBRATION_TOKENS", 25)
    with ThreadPoolExecutor(2) as pool:
        sample = sample_layer(layer, states, pool, moments=True)
    assert all(torch.equal(a, b) for a, b in zip(states, outputs, strict=True))
    size = torch.cat(outputs).square().mean(dim=1)
    for group in GROUPS:
        weight = 1 / size if group in ("o", "down") else torch.ones_like(size)
        rows = torch.cat(seen[group])
        expected = rows.t() @ (rows * (weight / weight.sum())[:, None])
        assert torch.allclose(sample[group].moments, expected, atol=1e-5 * float(expected.max()))
        assert torch.equal(sample[group].energy(), sample[group].moments.diagonal())
        assert len(sample[group].fitting.rows) + len(sample[group].checking.rows) == 30
        assert torch.equal(sample[group].absmax, rows.abs().amax(dim=0))


def test_without_moments_none_are_made():
    layer, states = layer_and_states()
    with ThreadPoolExecutor(2) as pool:
        sample = sample_layer(layer, states, pool)
    assert all(sample[group].moments is None for group in GROUPS)
    expected = (sample["o"].fitting.energy() + sample["o"].checking.energy()) / 2
    assert torch.equal(sample["o"].energy(), expected)


def test_rotated_moments_are_those_of_rotated_rows(narrow):
    rows, divisor = normal(1, 200, 48), normal(2, 48).abs() + 0.1
    matrix = rows.t() @ rows / 200
    before = matrix.clone()
    found = moments_over(matrix, divisor, 16)
    turned = rows / divisor
    rotate_with_matrix(turned, 16)
    expected = turned.t() @ turned / 200
    assert torch.allclose(found, expected, atol=1e-4 * float(expected.max()))
    assert torch.equal(matrix, before)


def test_a_rotated_sample_rotates_its_moments():
    rows, divisor = normal(1, 60, 32), torch.full((32,), 2.0)
    half = Inputs.of([rows], [torch.ones(60)])
    sample = GroupSample(rows.abs().amax(dim=0), half, half, rows.t() @ rows / 60)
    turned = sample.rotated(divisor, 16)
    assert torch.allclose(turned.energy(), turned.fitting.energy(), atol=1e-5)
    assert sample.rotated(divisor, 16).moments is not None


def test_moments_of_divided_inputs(narrow):
    rows, divisor = normal(1, 200, 40), normal(2, 40).abs() + 0.1
    matrix = rows.t() @ rows / 200
    scaled = rows / divisor
    expected = scaled.t() @ scaled / 200
    found = moments_over(matrix, divisor)
    assert torch.allclose(found, expected, atol=1e-4 * float(expected.max()))
    assert found.data_ptr() != matrix.data_ptr()
