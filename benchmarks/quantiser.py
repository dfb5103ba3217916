"""Recipes of the quantiser side by side: KL divergence, top-1 agreement and perplexity.

    python benchmarks/quantiser.py MODEL --text FILE.txt --prompts FILE.jsonl [--windows 16]
        [--answers 24] [--max-tokens 96] [--keep FILE.json] [--json FILE] [--calib FILE] ARM...

ARM is SCHEME:SMOOTH:WEIGHTS[:GROUP], such as w8a8:search:rtn or w4a8:search:gptq:64. SMOOTH is also
`compressor`: SmoothQuant with the mapping of llm-compressor, whose scales come from ranges and go
to q, k, v and gate, up only. WEIGHTS is also `symmetric`, for W4A8: round-to-nearest without zero
points, scale = absmax / 7. `+hadamard` at the end rotates the inputs of `down`, `+int8=qkv,o` keeps
these groups in 8 bits, `+head` gives an arm an INT8 head.

The model is read once, all arms go through a layer before the next is read, and every arm predicts
the same positions: N, windows of a text, and G, the BF16 verifier's own greedy answers to prompts
(`--keep` keeps them between runs). Neither is calibrated on. The reference is the target in fp32
arithmetic. Intervals: 95 %, paired bootstrap over windows or answers, against the scheme's first
arm.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from quasar.bench.fidelity import Passage
from quasar.bench.statistics import RESAMPLES, Rate, paired_ratio
from quasar.cli.evaluate import prompt_passages, reference_answers, text_passages
from quasar.kernels.reference import rms_norm
from quasar.loading import Model, make_backend
from quasar.models.config import ModelConfig
from quasar.models.layer import Layer, LayerTensors, read_layer, unobserved
from quasar.models.tensors import EMBEDDING, FINAL_NORM, GROUPS, LINEARS, head_rows
from quasar.quantization.calibrate import calibration_text, sample_layer
from quasar.quantization.hadamard import block_of
from quasar.quantization.recipe import Recipe, default_recipe
from quasar.quantization.simulation import Arm, Int4Linear, compare_positions, simulated
from quasar.quantization.smooth import Smoothing, column_absmax
from quasar.quantization.trial import workers
from quasar.quantization.weights import QuantizedLayer, by_group

WINDOW_TOKENS = 512


@dataclass(frozen=True)
class Compressor(Recipe):
    """SmoothQuant 0.5 as llm-compressor maps it."""

    def _smoothing(self, tensors, sample, config, workers):
        scales = {}
        for group in ("qkv", "gate_up"):
            rows = torch.cat([sample[group].fitting.rows, sample[group].checking.rows])
            ranges = (rows.amax(dim=0) - rows.amin(dim=0)).clamp_min(1e-5)
            weight = 2 * column_absmax(*(tensors[f"{n}.weight"] for n in GROUPS[group]))
            scales[group] = (ranges / weight.clamp_min(1e-5)).sqrt()
        return Smoothing(scales, {})


def symmetric(tensors: LayerTensors, size: int) -> dict[str, Tensor]:
    """Each linear's weight rounded to -7..7 times absmax / 7 of its group."""
    found = {}
    for name in LINEARS:
        weight = by_group(tensors[f"{name}.weight"], tensors[f"{name}.weight"].shape[1] // size)
        scale = (weight.abs().amax(dim=2, keepdim=True) / 7).clamp_min(1e-30)
        found[name] = ((weight / scale).round() * scale).flatten(1)
    return found


class Symmetric(Int4Linear):
    def __init__(self, values, bias):
        self.values, self.bias, self.rotation = values, bias, 0


@dataclass
class Contender:
    name: str
    recipe: Recipe
    symmetric: bool
    int8_head: bool
    states: list[Tensor]
    layer: Layer | None = None

    @classmethod
    def parse(cls, name: str, states: Sequence[Tensor], config: ModelConfig) -> Contender:
        text, *extras = name.split("+")
        int8 = tuple(g for e in extras if e.startswith("int8=") for g in e[5:].split(","))
        extras = [extra for extra in extras if not extra.startswith("int8=")]
        if unknown := ({*extras} - {"hadamard", "head"}) | ({*int8} - {*GROUPS}):
            raise SystemExit(f"{name}: {', '.join(unknown)} is not known")
        scheme, smooth, weights, *group = text.split(":")
        block = block_of(config.intermediate_size) if "hadamard" in extras else 0
        size = int(group[0]) if group else None
        recipe = default_recipe(scheme, smooth, weights, size, block, int8)
        if smooth == "compressor":
            recipe = Compressor(recipe.format, smooth, weights, block)
        return cls(name, recipe, weights == "symmetric", "head" in extras, list(states))

    def quantize(self, config, index, tensors, sample, pool, made) -> Layer:
        """The layer as this arm computes it; `made` keeps what arms can share."""
        if self.symmetric:
            values = symmetric(tensors, self.recipe.format.group_size)
            products = {n: Symmetric(values[n], tensors.get(f"{n}.bias")) for n in LINEARS}
            return Layer(config, index, tensors, products)
        if self.recipe not in made:
            made[self.recipe] = (
                QuantizedLayer.round(tensors, self.recipe.format)
                if self.recipe == self.recipe.plain
                else self.recipe.apply(tensors, sample, config, pool).verified
            )
        return simulated(config, index, made[self.recipe])


def answers(model: Model, args: argparse.Namespace) -> list[Passage]:
    """The BF16 verifier's greedy answers, generated or kept from an earlier run."""
    if args.keep and args.keep.exists():
        pairs = json.loads(args.keep.read_text())
    else:
        asked = [p.tokens for p in prompt_passages(model, args.prompts, args.answers)]
        verifier = model.load("bf16", make_backend())
        told = reference_answers(model, verifier, asked, args.max_tokens)
        pairs = [[list(a), list(b)] for a, b in zip(asked, told, strict=True)]
        if args.keep:
            args.keep.write_text(json.dumps(pairs))
    fitting = [(a, b) for a, b in pairs if len(b) > 1 and len(a) <= args.longest_prompt]
    return [Passage([*a, *b], len(a)) for a, b in fitting[: args.answers]]


def move(states, layer, pool, observe=lambda: unobserved):
    def run(index):
        observer = observe()
        states[index] = layer(states[index], observer)
        return observer

    return list(pool.map(run, range(len(states))))


def run_layers(model, text, arms, reference, pool):
    """Everything through all layers; prints progress."""
    config, table = model.config, model.checkpoint.tensor(EMBEDDING)
    calibration = [table[ids].float() for ids in text.calibration]
    moments = any(arm.recipe.needs_moments for arm in arms)
    for index in range(config.layers):
        tensors = read_layer(model.checkpoint, config, index)
        layer = Layer(config, index, tensors)
        sample, made = sample_layer(layer, calibration, pool, moments), {}
        move(reference, layer, pool)
        for arm in arms:
            move(arm.states, arm.quantize(config, index, tensors, sample, pool, made), pool)
        model.checkpoint.release()
        print(f"layer {index}: {time.process_time():.0f} s of CPU", flush=True)


def measure(model, passages, arms, reference, pool) -> list[Tensor]:
    """[arms, 3, positions] of each passage, as `compare_positions` gives them."""
    config = model.config
    norm = model.checkpoint.tensor(FINAL_NORM).float()

    def outputs(states):
        parts = [x[p.start - 1 : -1] for x, p in zip(states, passages, strict=True)]
        return rms_norm(torch.cat(parts), norm, config.rms_norm_eps)

    compared = [Arm(outputs(reference))]
    compared += [Arm(outputs(arm.states), arm.int8_head) for arm in arms]
    targets = torch.cat([torch.tensor(p.tokens[p.start :]) for p in passages])
    figures = compare_positions(compared, head_rows(model.checkpoint, config), targets, pool)
    return list(figures.split([len(p.tokens) - p.start for p in passages], dim=2))


def top1_interval(a: np.ndarray, b: np.ndarray, counts: np.ndarray) -> tuple[float, float]:
    """Difference of two agreements, a and b [passages] the agreeing positions of each."""
    picks = np.random.default_rng(0).integers(0, len(a), (RESAMPLES, len(a)))
    drawn = (a - b)[picks].sum(axis=1) / counts[picks].sum(axis=1)
    low, high = np.percentile(drawn, (2.5, 97.5))
    return float(low), float(high)


def table(name: str, parts: Sequence[Tensor], arms: Sequence[Contender]) -> list[dict]:
    sums = np.stack([part.sum(dim=2).numpy() for part in parts])  # [passages, arms, 3]
    counts = np.array([part.shape[2] for part in parts], dtype=np.float64)
    total, rows, first = counts.sum(), [], {}
    print(f"\n{name}: {int(total)} positions of {len(parts)} passages")
    print(f"{'arm':32s} {'KL':>8s} {'ratio to first':>22s} {'top-1':>7s} "
          f"{'change':>16s} {'perplexity':>10s}")  # fmt: skip
    for j, arm in enumerate(arms, 1):
        base = first.setdefault(arm.recipe.scheme, j)
        ratio = paired_ratio(Rate(sums[:, j, 0], counts), Rate(sums[:, base, 0], counts))
        low, high = top1_interval(sums[:, j, 1], sums[:, base, 1], counts)
        kl, top1, nll = sums[:, j].sum(axis=0) / total
        more = np.exp(nll - sums[:, 0, 2].sum() / total) - 1
        interval = [ratio.mean, ratio.low, ratio.high]
        rows.append(
            {"arm": arm.name, "text": name, "kl": kl, "ratio": interval, "top1": top1}
            | {"top1_change": [low, high], "perplexity_change": more}
        )
        print(f"{arm.name:32s} {kl:8.5f} {ratio.mean:6.3f} [{ratio.low:5.3f}, {ratio.high:5.3f}] "
              f"{top1:7.2%} [{low:+6.2%}, {high:+6.2%}] {more:+10.2%}", flush=True)  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("arms", nargs="+", metavar="ARM")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--answers", type=int, default=24)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--longest-prompt", type=int, default=1000)
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--calib", type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    model = Model.open(args.model)
    windows = text_passages(model, args.text, WINDOW_TOKENS, args.windows)
    passages = windows + answers(model, args)
    embedding = model.checkpoint.tensor(EMBEDDING)
    reference = [embedding[torch.tensor(p.tokens)].float() for p in passages]
    arms = [Contender.parse(name, reference, model.config) for name in args.arms]
    moments = any(arm.recipe.needs_moments for arm in arms)
    text = calibration_text(model.tokenizer, args.calib, moments=moments)
    with workers() as pool:
        run_layers(model, text, arms, reference, pool)
        parts = measure(model, passages, arms, reference, pool)
    rows = table("N", parts[: len(windows)], arms) + table("G", parts[len(windows) :], arms)
    if args.json:
        args.json.write_text(json.dumps({"model": args.model, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
