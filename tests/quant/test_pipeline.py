"""A whole run: what the folder holds, what its report says, and that a failure leaves nothing."""

from __future__ import annotations

import json
import logging
import math
import os
import resource
import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny
from byte_tokenizer import VOCABULARY
from quasar.checkpoints import open_checkpoint
from quasar.checkpoints.hf import SafetensorsCheckpoint
from quasar.checkpoints.writer import CheckpointWriter
from quasar.errors import CheckpointError, QuasarError, UsageError
from quasar.kernels.base import DenseWeight, Int8Weight
from quasar.loading import quantized_copy
from quasar.models.families import parse_config
from quasar.models.layer import logits
from quasar.models.tensors import GROUPS, LINEARS
from quasar.quantization import recipe, saving
from quasar.quantization.pipeline import QuantizeOptions, Source, quantize
from quasar.quantization.smooth import Smoothing, smoothquant
from quasar.quantization.weights import round_to_nearest

FAMILIES = sorted(tiny.CONFIGS)
GROUPABLE = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
"""Sizes of whole groups of 32."""


@pytest.fixture(autouse=True)
def short_texts(monkeypatch):
    """A tenth of the tokens: these models learn nothing from more."""
    monkeypatch.setattr("quasar.quantization.calibrate.CALIBRATION_TOKENS", 800)
    monkeypatch.setattr("quasar.quantization.calibrate.MOMENT_TOKENS", 1600)
    monkeypatch.setattr("quasar.quantization.calibrate.HELD_OUT_TOKENS", 200)


def run(folder, out, smooth="search", scheme="w8a8", **options):
    wanted = QuantizeOptions(scheme, smooth)
    return quantize(open_checkpoint(folder), out, wanted, **options)


def stored(folder):
    return load_file(folder / "model.safetensors")


def report_of(folder):
    return json.loads((folder / "quantization_report.json").read_text())


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_folder_is_a_compressed_tensors_checkpoint(write_model, tmp_path, family, tied):
    source = write_model(family, tie_word_embeddings=tied)
    run(source, tmp_path / "out")
    before, after = stored(source), stored(tmp_path / "out")
    expected = set(before) | {f"{n}_scale" for n in before if n.endswith("_proj.weight")}
    assert set(after) == expected
    assert ("lm_head.weight" in after) != tied
    for name, tensor in after.items():
        if name.endswith("_proj.weight"):
            assert tensor.dtype == torch.int8
            scale = after[f"{name}_scale"]
            assert (scale.dtype, scale.shape) == (torch.float32, (tensor.shape[0], 1))
            assert (scale > 0).all()
        elif not name.endswith("_scale"):
            assert tensor.dtype == torch.bfloat16
    names = ("model.embed_tokens.weight",) + ("model.norm.weight",) * tied
    assert all(torch.equal(after[name], before[name]) for name in names)
    opened = open_checkpoint(tmp_path / "out")
    assert opened.format == "compressed-tensors"
    assert parse_config(opened.config) == parse_config(open_checkpoint(source).config)
    weight = opened.linear("model.layers.1.mlp.down_proj")
    assert isinstance(weight, Int8Weight)


def test_files_beside_the_tensors(write_model, tmp_path):
    source = write_model()
    (source / "generation_config.json").write_text('{"temperature": 0.7, "eos_token_id": 257}')
    config = json.loads((source / "config.json").read_text())
    config |= {"auto_map": {"AutoModel": "code.Model"}, "dtype": "float16"}
    (source / "config.json").write_text(json.dumps(config))
    run(source, tmp_path / "out")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "quantization_report.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert generation == {"temperature": 0.7, "eos_token_id": [257]}
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "auto_map" not in config
    assert config.get("dtype", config["torch_dtype"]) == "bfloat16"
    assert config["quantization_config"]["ignore"] == ["lm_head"]


@pytest.mark.parametrize("weights", ["clip", "gptq"])
def test_other_roundings_of_weights(write_model, tmp_path, weights):
    source = write_model()
    report = quantize(
        open_checkpoint(source), tmp_path / "out", QuantizeOptions(weights=weights, smooth="none")
    )
    content = report_of(tmp_path / "out")
    assert report.kept == (content["requested"]["kl"] <= content["summary"]["kl_rtn"])
    assert content["requested"]["weights"] == weights
    assert content["weights"] == (weights if report.kept else "rtn")
    assert content["requested"]["kl"] != content["summary"]["kl_rtn"]


@pytest.mark.parametrize(
    ("scheme", "weights", "tokens"),
    [("w8a8", None, 800), ("w8a8", "gptq", 1600), ("w4a8", None, 1600), ("w4a8", "clip", 800)],
)
def test_gptq_gets_more_text(write_model, scheme, weights, tokens):
    """Also what a run needs on disk knows of it."""
    options = QuantizeOptions(scheme=scheme, weights=weights)
    source = Source.of(open_checkpoint(write_model(**GROUPABLE)), options)
    assert sum(map(len, source.text.calibration)) == tokens
    assert source.state_bytes == 4 * 64 * (tokens + 3 * 200)


@pytest.mark.parametrize("family", FAMILIES)
def test_dequantised_folder_predicts_like_the_source(write_model, tmp_path, family):
    """The weights alone, in fp32: smoothing must not have changed the function."""
    source, out = write_model(family), tmp_path / "out"
    run(source, out)
    tensors = stored(out)
    for name in [n for n in tensors if n.endswith("_proj.weight")]:
        codes, scale = tensors[name].float(), tensors.pop(f"{name}_scale")
        tensors[name] = (codes * scale).bfloat16()
    plain = write_model(family, _name_or_path="dequantised")
    save_file(tensors, plain / "model.safetensors")
    tokens = torch.arange(3, 60)
    expected, found = (
        logits(checkpoint, parse_config(checkpoint.config), tokens)
        for checkpoint in (open_checkpoint(source), open_checkpoint(plain))
    )
    assert (found - expected).std() < 0.1 * expected.std()


def test_report(write_model, tmp_path):
    source = write_model()
    report = run(source, tmp_path / "out")
    content = report_of(tmp_path / "out")
    summary = content["summary"]
    assert list(summary) == [
        *(
            "scheme",
            "smooth",
            "rotate",
            "group_size",
            "kl",
            "kl_rtn",
            "top1",
            "top1_rtn",
            "perplexity",
        ),
        *("perplexity_rtn", "perplexity_bf16", "seconds", "peak_rss_bytes"),
    ]
    assert (summary["scheme"], summary["smooth"]) == ("w8a8", "search")
    assert summary["group_size"] is None
    assert 0 < summary["kl"] < summary["kl_rtn"]
    assert 0 < summary["top1_rtn"] <= summary["top1"] <= 1
    assert summary["perplexity_bf16"] > 1
    assert summary["seconds"] > 0 and summary["peak_rss_bytes"] > 10_000_000
    checkpoint = open_checkpoint(source)
    assert content["int8_head"]["kl"] > 0
    assert content["source"] == {"name": "llama-model", "sha256": checkpoint.fingerprint()}
    assert content["text"] == {
        "name": "builtin",
        "calibration_tokens": 800,
        "held_out_tokens": 200,
    }
    linears = content["linears"]
    expected = [f"model.layers.{i}.{name}" for i in range(2) for name in LINEARS]
    assert [entry["name"] for entry in linears] == expected
    for entry in linears:
        assert entry["scheme"] == "w8a8" and entry["smoothing"]
        assert 0 < entry["relative_error"] < 0.2
    before, after = (
        sum(e[key] for e in linears) for key in ("relative_error_rtn", "relative_error")
    )
    assert after < 0.7 * before
    assert report.summary() == summary


def test_no_smoothing_is_round_to_nearest(write_model, tmp_path):
    source = write_model()
    report = run(source, tmp_path / "out", smooth="none")
    checkpoint, written = open_checkpoint(source), open_checkpoint(tmp_path / "out")
    for name in LINEARS:
        module = f"model.layers.0.{name}"
        expected = round_to_nearest(checkpoint.tensor(f"{module}.weight").float())
        found = written.linear(module)
        assert torch.equal(found.codes, expected.codes)
        assert torch.equal(found.scale, expected.scale)
    summary = report.summary()
    assert summary["smooth"] == "none"
    assert summary["kl"] == summary["kl_rtn"] > 0
    assert {entry["smoothing"] for entry in report.linears()} == {"none"}


def harmful(tensors, absmax, config):
    """Makes outliers of what were none."""
    scales = smoothquant(tensors, absmax, config).scales
    return Smoothing({g: 1 / s.square() for g, s in scales.items()}, dict.fromkeys(scales, "bad"))


def test_a_recipe_worse_than_nothing_is_not_kept(write_model, tmp_path, monkeypatch, caplog):
    source = write_model()
    monkeypatch.setattr(recipe, "smoothquant", harmful)
    monkeypatch.setattr(recipe, "LARGEST_ERROR", {8: 1e9})
    with caplog.at_level(logging.WARNING, logger="quasar"):
        report = run(source, tmp_path / "out", smooth="smoothquant")
    assert "worse than round-to-nearest" in caplog.text
    monkeypatch.undo()
    monkeypatch.setattr("quasar.quantization.calibrate.CALIBRATION_TOKENS", 800)
    monkeypatch.setattr("quasar.quantization.calibrate.MOMENT_TOKENS", 1600)
    run(source, tmp_path / "plain", smooth="none")
    kept, plain = stored(tmp_path / "out"), stored(tmp_path / "plain")
    assert set(kept) == set(plain)
    assert all(torch.equal(kept[name], plain[name]) for name in plain)
    content = report_of(tmp_path / "out")
    summary = content["summary"]
    assert summary["smooth"] == "none"
    assert summary["kl"] == summary["kl_rtn"] < content["requested"]["kl"]
    assert content["requested"]["smooth"] == "smoothquant"
    for entry in content["linears"]:
        assert entry["smoothing"] == "none"
        assert entry["relative_error"] == entry["relative_error_rtn"]
    assert not report.kept


def test_groups_that_stay_bad_are_left_alone(write_model, tmp_path, monkeypatch):
    left = ("self_attn.o_proj", "mlp.down_proj")

    def errors(tensors, layer, scales, inputs, config, workers):
        return {name: float(name in left) for name in layer.linears}

    monkeypatch.setattr(recipe, "relative_errors", errors)
    source = write_model()
    report = run(source, tmp_path / "out")
    before, after = open_checkpoint(source), open_checkpoint(tmp_path / "out")
    names = [f"model.layers.{i}.{name}" for i in range(2) for name in LINEARS]
    ignored = [name for name in names if name.endswith(left)]
    assert after.quantization["ignore"] == ["lm_head", *ignored]
    for name in names:
        weight = after.linear(name)
        assert isinstance(weight, DenseWeight if name in ignored else Int8Weight)
        if name in ignored:
            assert torch.equal(weight.weight, before.tensor(f"{name}.weight"))
    entries = {entry["name"]: entry for entry in report.linears()}
    for name in ignored:
        assert (entries[name]["scheme"], entries[name]["smoothing"]) == ("bf16", "none")
        assert entries[name]["relative_error"] < 1e-6 < entries[name]["relative_error_rtn"]
    assert parse_config(after.config) == parse_config(before.config)


class Interrupt(BaseException):
    pass


def contents(folder):
    """Every file's bytes; of the report what does not depend on the machine's day."""
    found = {path.name: path.read_bytes() for path in folder.iterdir()}
    report = json.loads(found.pop("quantization_report.json"))
    del report["summary"]["seconds"], report["summary"]["peak_rss_bytes"]
    return found, report


_WHOLE = {}


def whole(source, folder, options=None):
    """The contents that an uninterrupted run gives; made once for all tests that compare."""
    checkpoint = open_checkpoint(source)
    options = options or QuantizeOptions()
    key = (checkpoint.fingerprint(), options)
    if key not in _WHOLE:
        quantize(checkpoint, folder / "whole", options)
        _WHOLE[key] = contents(folder / "whole")
    return _WHOLE[key]


def stop_at(stage, done):
    """Progress that interrupts a run there."""

    def progress(name, step, total):
        if (name, step) == (stage, done):
            raise Interrupt

    return progress


def steps_of(stage, steps):
    return [step for name, step, _ in steps if name == stage]


@pytest.mark.parametrize("scheme", ["w8a8", "w4a8"])
@pytest.mark.parametrize(
    ("stage", "done", "first"),
    [("layers", 1, 1), ("layers", 2, 2), ("layers", 3, 3), ("measuring", VOCABULARY, 3)],
)
def test_an_interrupted_run_goes_on(
    write_model, tmp_path, caplog, monkeypatch, scheme, stage, done, first
):
    """A folder of several shards, stopped after each layer, byte for byte that of one run."""
    monkeypatch.setattr(saving, "SHARE", 1e9)
    folder = write_model(**GROUPABLE, num_hidden_layers=3)
    source, options = open_checkpoint(folder), QuantizeOptions(scheme=scheme, shard_bytes=30_000)
    expected = whole(folder, tmp_path, options)
    threads = torch.get_num_threads()
    with pytest.raises(Interrupt):
        quantize(source, tmp_path / "out", options, stop_at(stage, done))
    assert not (tmp_path / "out").exists()
    assert "the same command goes on there" in caplog.text
    assert torch.get_num_threads() == threads
    steps = []
    quantize(source, tmp_path / "out", options, lambda *step: steps.append(step))
    assert steps_of("layers", steps) == list(range(first, 4))
    assert contents(tmp_path / "out") == expected
    assert not (tmp_path / ".out.partial").exists()
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 3


def test_nothing_is_left_before_the_first_save(write_model, tmp_path):
    source = write_model()
    with pytest.raises(Interrupt):
        run(source, tmp_path / "new" / "out", progress=stop_at("layers", 0))
    assert list((tmp_path / "new").iterdir()) == []


@pytest.mark.parametrize("stage", ["round-to-nearest", "measuring"])
def test_a_run_that_falls_back_goes_on(write_model, tmp_path, monkeypatch, stage):
    """Round-to-nearest begins anew, but nothing is measured twice."""
    monkeypatch.setattr(recipe, "smoothquant", harmful)
    monkeypatch.setattr(recipe, "LARGEST_ERROR", {8: 1e9, 4: 1e9})
    folder, options = write_model(), QuantizeOptions(smooth="smoothquant")
    source, expected = open_checkpoint(folder), whole(folder, tmp_path, options)
    last = {"round-to-nearest": 1, "measuring": VOCABULARY}
    with pytest.raises(Interrupt):
        quantize(source, tmp_path / "out", options, stop_at(stage, last[stage]))
    steps = []
    quantize(source, tmp_path / "out", options, lambda *step: steps.append(step))
    assert steps_of("round-to-nearest", steps) == [0, 1, 2]
    assert (steps_of("measuring", steps) == []) == (stage == "round-to-nearest")
    assert contents(tmp_path / "out") == expected


def killed_run(source, out, options=None):
    """What a run that could not clean up leaves: no lock, a shard with more than was saved."""
    with pytest.raises(Interrupt):
        quantize(open_checkpoint(source), out, options, stop_at("layers", 1))
    partial = out.parent / f".{out.name}.partial"
    with (partial / "shard-0").open("ab") as shard:
        shard.write(b"half a tensor")
    (partial / "state.json.new").write_text("{")
    return partial


def test_a_killed_run_goes_on(write_model, tmp_path):
    source = write_model()
    killed_run(source, tmp_path / "out")
    steps = []
    run(source, tmp_path / "out", progress=lambda *step: steps.append(step))
    assert steps_of("layers", steps) == [1, 2]
    assert contents(tmp_path / "out") == whole(source, tmp_path)


@pytest.mark.parametrize("change", ["options", "calibration", "shards", "source", "version"])
def test_another_run_starts_anew_and_says_so(write_model, tmp_path, monkeypatch, caplog, change):
    source = write_model()
    killed_run(source, tmp_path / "out")
    options = QuantizeOptions()
    if change == "options":
        options = QuantizeOptions(smooth="none")
    elif change == "calibration":
        (tmp_path / "mine.txt").write_text("All that is gold does not glitter.\n" * 200)
        options = QuantizeOptions(calibration=tmp_path / "mine.txt")
    elif change == "shards":
        options = QuantizeOptions(shard_bytes=30_000)
    elif change == "source":
        tensors = stored(source)
        tensors["model.norm.weight"] *= 2
        save_file(tensors, source / "model.safetensors")
    else:
        monkeypatch.setattr("quasar.quantization.pipeline.__version__", "0.0.0")
    steps = []
    quantize(open_checkpoint(source), tmp_path / "out", options, lambda *step: steps.append(step))
    assert "another model or other options" in caplog.text
    assert steps_of("layers", steps) == [0, 1, 2]
    assert contents(tmp_path / "out") == whole(source, tmp_path, options)


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "state.json").write_text("{"),
        lambda folder: (folder / "state.json").write_text("{}"),
        lambda folder: (folder / "shard-0").unlink(),
        lambda folder: os.truncate(folder / "shard-0", 300),
        lambda folder: (folder / "point-1").unlink(),
        lambda folder: os.truncate(folder / "point-1", 300),
    ],
)
def test_a_damaged_save_starts_anew(write_model, tmp_path, caplog, damage):
    source = write_model()
    damage(killed_run(source, tmp_path / "out"))
    steps = []
    run(source, tmp_path / "out", progress=lambda *step: steps.append(step))
    assert "damaged" in caplog.text and steps_of("layers", steps) == [0, 1, 2]
    assert contents(tmp_path / "out") == whole(source, tmp_path)


def test_faults_of_the_model_leave_nothing_though_saved(write_model, tmp_path):
    """Going on would meet the same weight again."""
    source = write_model()
    tensors = stored(source)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = torch.nan
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj\.weight.* NaN"):
        run(source, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == [source.name]


def test_two_runs_into_one_folder(write_model, tmp_path):
    """The second is refused while the first works, and does it no harm."""
    source, refused = write_model(), []

    def again(name, done, total):
        if (name, done) == ("layers", 1):
            with pytest.raises(QuasarError, match="another process is writing") as error:
                run(source, tmp_path / "out")
            refused.append(error)

    run(source, tmp_path / "out", progress=again)
    assert refused
    assert contents(tmp_path / "out") == whole(source, tmp_path)


@pytest.mark.parametrize(("stage", "done"), [("layers", 1), ("measuring", VOCABULARY)])
def test_a_disk_that_fills_up(write_model, tmp_path, monkeypatch, stage, done):
    """One clear error, at a save point or at the end; with room again the run goes on."""
    monkeypatch.setattr(saving, "SHARE", math.inf)  # a save point after every layer
    source = write_model()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(name, step, total):
        if (name, step) == (stage, done):
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))

    try:
        with pytest.raises(QuasarError, match=r"cannot write .*out: File too large"):
            run(source, tmp_path / "out", progress=fill)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not (tmp_path / "out").exists()
    steps = []
    run(source, tmp_path / "out", progress=lambda *step: steps.append(step))
    assert steps_of("layers", steps)[:1] == ([1] if stage == "layers" else [2])
    assert contents(tmp_path / "out") == whole(source, tmp_path)


def test_a_full_disk_is_refused_before_work(write_model, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=100_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    steps = []
    with pytest.raises(UsageError, match="has 0 MB free, of 1 MB that are needed"):
        run(write_model(), tmp_path / "out", progress=lambda *step: steps.append(step))
    assert steps == []
    assert [path.name for path in tmp_path.iterdir()] == ["llama-model"]


def interrupt(*_):
    raise Interrupt


@pytest.mark.parametrize(
    ("place", "name", "stopped", "error"),
    [
        (shutil, "disk_usage", lambda path: SimpleNamespace(free=0), UsageError),
        (SafetensorsCheckpoint, "fingerprint", interrupt, Interrupt),
        (CheckpointWriter, "_restore", interrupt, Interrupt),
    ],
)
def test_what_was_saved_outlives_a_run_that_stops_before_it_goes_on(
    write_model, tmp_path, place, name, stopped, error
):
    """Most of all one that finds the disk still full."""
    source, steps = write_model(), []
    with pytest.raises(Interrupt):
        run(source, tmp_path / "out", progress=stop_at("layers", 1))
    with pytest.MonkeyPatch.context() as patch, pytest.raises(error):
        patch.setattr(place, name, stopped)
        run(source, tmp_path / "out")
    run(source, tmp_path / "out", progress=lambda *step: steps.append(step))
    assert steps_of("layers", steps) == [1, 2]
    assert contents(tmp_path / "out") == whole(source, tmp_path)


def test_progress_reaches_the_end_of_each_stage(write_model, tmp_path):
    steps = []
    run(write_model(), tmp_path / "out", progress=lambda *step: steps.append(step))
    assert [s for s in steps if s[0] == "layers"] == [("layers", i, 2) for i in range(3)]
    assert steps[-1] == ("measuring", VOCABULARY, VOCABULARY)


def test_a_model_with_a_link_to_nowhere_has_a_cached_copy(write_model, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = write_model()
    (source / "gone").symlink_to("nowhere")
    assert quantized_copy(open_checkpoint(source), "w8a8").precision == "w8a8"


def test_an_existing_folder_is_not_touched(write_model, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.txt").write_text("mine")
    with pytest.raises(UsageError, match="already exists"):
        run(write_model(), out)
    assert [path.name for path in out.iterdir()] == ["thesis.txt"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_place_is_refused(write_model, tmp_path):
    place = tmp_path / "locked"
    place.mkdir(mode=0o500)
    with pytest.raises(UsageError, match="cannot write"):
        run(write_model(), place / "out")


def test_a_place_that_cannot_be_is_refused(write_model, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write"):
        run(write_model(), tmp_path / "file" / "out")


def test_a_quantised_model_is_refused(write_model, tmp_path):
    run(write_model(), tmp_path / "once")
    with pytest.raises(CheckpointError, match="once is already quantised"):
        run(tmp_path / "once", tmp_path / "twice")
    assert not (tmp_path / "twice").exists()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "name", ["model.layers.1.self_attn.o_proj.weight", "model.norm.weight", "lm_head.weight"]
)
def test_weights_that_are_no_numbers_are_named(write_model, tmp_path, name, value):
    source = write_model()
    tensors = stored(source)
    tensors[name].view(-1)[5] = value
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        run(source, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["llama-model"]


@pytest.mark.parametrize("name", ["lm_head.weight", "model.layers.1.mlp.down_proj.weight"])
@pytest.mark.parametrize("smooth", ["search", "smoothquant", "none"])
def test_a_model_whose_logits_overflow_is_refused(write_model, tmp_path, name, smooth):
    """Every weight is finite, the sums are not."""
    source = write_model()
    tensors = stored(source)
    tensors[name].fill_(3e38)
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(CheckpointError, match="llama-model: the model's logits are not finite"):
        run(source, tmp_path / "out", smooth=smooth)
    assert [path.name for path in tmp_path.iterdir()] == ["llama-model"]


@pytest.mark.parametrize(
    ("linear", "named"),
    [("self_attn.o_proj", "0.self_attn.o_proj"), ("mlp.down_proj", "0.self_attn.o_proj")],
)
@pytest.mark.parametrize("smooth", ["search", "none"])
def test_moments_that_overflow_are_refused(write_model, tmp_path, linear, named, smooth):
    """The outputs are infinite, so no token of `o` counts."""
    source = write_model(**GROUPABLE)
    tensors = stored(source)
    tensors[f"model.layers.0.{linear}.weight"].fill_(3e38)
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"layers\.{named} are not finite"):
        run(source, tmp_path / "out", smooth=smooth, scheme="w4a8")
    assert [path.name for path in tmp_path.iterdir()] == ["llama-model"]


def test_outputs_whose_squares_overflow_have_an_error(write_model, tmp_path):
    """Those of `o`, behind huge values: finite themselves."""
    source = write_model(**GROUPABLE)
    tensors = stored(source)
    for name in [name for name in tensors if name.endswith("v_proj.weight")]:
        tensors[name] *= 1e18
    save_file(tensors, source / "model.safetensors")
    run(source, tmp_path / "out", scheme="w4a8")
    for linear in report_of(tmp_path / "out")["linears"]:
        assert 0 < linear["relative_error"] < 1


def test_logits_that_say_nothing_are_refused(write_model, tmp_path):
    """Finite logits so far apart that the perplexity leaves fp64."""
    source = write_model()
    tensors = stored(source)
    tensors["lm_head.weight"] *= 1e5
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(CheckpointError, match="perplexity inf"):
        run(source, tmp_path / "out")


def test_missing_tensors_are_refused_before_any_work(write_model, tmp_path):
    source = write_model()
    tensors = stored(source)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, source / "model.safetensors")

    def fail(*step):
        raise AssertionError("work has begun")

    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj"):
        run(source, tmp_path / "out", progress=fail)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scheme": "w2a8"}, "--scheme w2a8 is not available in this version.*w8a8, w4a8"),
        ({"smooth": "os+"}, "--smooth os\\+ is not available.*search, smoothquant, none"),
        ({"weights": "awq"}, "--weights awq is not available.*rtn, clip, gptq"),
        ({"group_size": 32}, "--group-size: w8a8 has one scale a row"),
        ({"int8": ("qkv",)}, "--int8: w8a8 has 8 bits everywhere"),
        ({"scheme": "w4a8", "int8": ("qkv", "")}, "--int8 '' is none of qkv, o, gate_up, down"),
        ({"scheme": "w4a8", "int8": ("v_proj",)}, "--int8 'v_proj' is none of qkv, o, gate_up"),
        ({"scheme": "w4a8", "int8": tuple(GROUPS)}, "--int8: .*this is --scheme w8a8"),
    ],
)
def test_options_of_other_versions_are_refused(options, message):
    with pytest.raises(UsageError, match=message):
        QuantizeOptions(**options)


@pytest.mark.parametrize(
    ("sizes", "options", "expected"),
    [
        ({"intermediate_size": 512}, {}, ("qkv",)),
        ({"intermediate_size": 64}, {}, ()),  # more than a sixth of the weights
        ({"intermediate_size": 512}, {"smooth": "none"}, ()),
        ({"intermediate_size": 64}, {"int8": ("down", "qkv")}, ("qkv", "down")),
        ({"intermediate_size": 512}, {"int8": ()}, ()),
        ({"intermediate_size": 512}, {"scheme": "w8a8"}, ()),
    ],
)
def test_small_groups_keep_eight_bits(write_model, sizes, options, expected):
    config = parse_config(open_checkpoint(write_model("llama", hidden_size=64, **sizes)).config)
    assert QuantizeOptions(**{"scheme": "w4a8"} | options).recipe(config).int8 == expected


def test_a_linear_in_int8_has_a_smaller_error(write_model, tmp_path):
    """On the card and in the folder; the round-to-nearest beside it has 4 bits."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16}
    source = open_checkpoint(write_model("llama", **sizes))
    options = QuantizeOptions("w4a8", "none", "rtn", int8=("o",))
    entries = quantize(source, tmp_path / "out", options).linears()
    for entry in entries:
        assert entry["relative_error_rtn"] > 0.03
        assert (entry["scheme"] == "w8a8") == entry["name"].endswith("o_proj")
        if entry["scheme"] != "bf16":  # a random linear may be too bad for 4 bits
            assert (entry["relative_error"] < 0.03) == (entry["scheme"] == "w8a8")
