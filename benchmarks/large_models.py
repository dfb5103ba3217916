"""Memory and pass time of 7B and 8B models, from checkpoints of their shapes with few layers.

    python benchmarks/large_models.py FOLDER [--shape qwen3-8b openpangu-7b] [--layers 1 3]

Writes random weights into FOLDER, quantises each checkpoint, generates from the result and times
passes. Every layer costs the same, so the difference between two depths is the cost of a layer, and
the whole model follows from it: its figures are arithmetic, not measurements.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

SHAPES = {
    "qwen3-8b": {
        "model_type": "qwen3",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "attention_bias": False,
        "torch_dtype": "bfloat16",
    },
    "openpangu-7b": {
        "model_type": "PanguEmbedded",
        "hidden_size": 4096,
        "intermediate_size": 12800,
        "num_hidden_layers": 34,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 153376,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1.6e7,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bias": True,
        "torch_dtype": "bfloat16",
    },
}


def tensors(config: dict, layer: int | None) -> dict[str, torch.Tensor]:
    """Random weights of one layer, or of what lies around the layers (None)."""

    def normal(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape) * 0.5 * shape[-1] ** -0.5).bfloat16()

    hidden, inner = config["hidden_size"], config["intermediate_size"]
    if layer is None:
        vocabulary = config["vocab_size"]
        return {
            "model.embed_tokens.weight": normal(vocabulary, hidden),
            "model.norm.weight": torch.ones(hidden).bfloat16(),
            "lm_head.weight": normal(vocabulary, hidden),
        }
    dim = config.get("head_dim", hidden // config["num_attention_heads"])
    width, kv_width = (config[f"num_{kind}_heads"] * dim for kind in ("attention", "key_value"))
    shapes = {
        "self_attn.q_proj": (width, hidden),
        "self_attn.k_proj": (kv_width, hidden),
        "self_attn.v_proj": (kv_width, hidden),
        "self_attn.o_proj": (hidden, width),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    found = {f"{name}.weight": normal(*shape) for name, shape in shapes.items()}
    if config.get("bias"):
        biased = [name for name in shapes if name.startswith("self_attn")]
        found |= {f"{name}.bias": normal(shapes[name][0], 1)[:, 0] for name in biased}
        found["self_attn.rotary_emb.inv_freq"] = torch.ones(dim // 2)
    if config["model_type"] == "qwen3":
        found |= {f"self_attn.{x}_norm.weight": torch.ones(dim).bfloat16() for x in "qk"}
    for norm in ("input_layernorm", "post_attention_layernorm"):
        found[f"{norm}.weight"] = torch.ones(hidden).bfloat16()
    return {f"model.layers.{layer}.{name}": tensor for name, tensor in found.items()}


def write_checkpoint(folder: Path, config: dict) -> Path:
    """A sharded Hugging Face folder, one shard in memory at a time."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from byte_tokenizer import write_tokenizer

    folder.mkdir(parents=True)
    torch.manual_seed(0)
    index = {}
    for shard, layer in enumerate([None, *range(config["num_hidden_layers"])]):
        part = tensors(config, layer)
        index |= dict.fromkeys(part, f"model-{shard:05}.safetensors")
        save_file(part, folder / f"model-{shard:05}.safetensors")
    listing = {"metadata": {}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(listing))
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder)
    return folder


def quasar(*arguments: str) -> str:
    command = [sys.executable, "-m", "quasar", *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def measure(shape: str, layers: int, folder: Path) -> dict[str, float]:
    """Megabytes and milliseconds of one checkpoint: quantised, then generated from."""
    config = SHAPES[shape] | {"num_hidden_layers": layers}
    source, target = folder / f"{shape}-{layers}", folder / f"{shape}-{layers}-w8a8"
    write_checkpoint(source, config)
    quasar("quantize", str(source), str(target))
    summary = json.loads((target / "quantization_report.json").read_text())["summary"]
    prompt = ("-p", "Once upon a time", "--max-tokens", "24", "--drafter", "none", "--json")
    answer = json.loads(quasar("generate", str(target), *prompt))
    drafted = json.loads(quasar("generate", str(target), *prompt[:-2], "ngram", "--json"))
    assert drafted["token_ids"] == answer["token_ids"]
    passes = json.loads(quasar("doctor", str(target), "--json"))["passes"]
    short = {p["rows"]: p["milliseconds"] for p in passes if p["context"] == 128}
    return {
        "quantize_seconds": summary["seconds"],
        "quantize_peak_mb": summary["peak_rss_bytes"] / 1e6,
        "generate_peak_mb": answer["peak_rss_bytes"] / 1e6,
        "file_mb": sum(file.stat().st_size for file in target.iterdir()) / 1e6,
        "pass_ms_1": short[1],
        "pass_ms_6": short[6],
        "pass_ms_16": short[16],
    }


def extrapolate(few: dict, many: dict, depths: tuple[int, int], layers: int) -> dict[str, tuple]:
    """By figure: at both depths, a layer's share, and the whole model's by a straight line."""
    found = {}
    for name in few:
        slope = (many[name] - few[name]) / (depths[1] - depths[0])
        found[name] = (few[name], many[name], slope, many[name] + slope * (layers - depths[1]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--layers", nargs=2, type=int, default=(1, 3))
    args = parser.parse_args()
    for shape in args.shape:
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            few, many = (measure(shape, layers, Path(folder)) for layers in args.layers)
        layers = SHAPES[shape]["num_hidden_layers"]
        print(f"{shape}: {args.layers[0]} layers, {args.layers[1]} layers, a layer, all {layers}")
        for name, values in extrapolate(few, many, tuple(args.layers), layers).items():
            assert all(math.isfinite(value) for value in values)
            print(f"  {name:18}" + "".join(f"{value:12,.1f}" for value in values), flush=True)


if __name__ == "__main__":
    main()
