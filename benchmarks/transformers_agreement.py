"""Our BF16 verifier against transformers in BF16, on transformers' own greedy text.

    python benchmarks/transformers_agreement.py MODEL --data FILE.jsonl [--tokens 2000]

transformers continues chat prompts greedily, token by token; our verifier then scores the same text
in passes of up to 64 rows. A disagreement is a near tie when transformers' two best logits differ
by at most 0.25 (BF16 logits between 16 and 32 lie 0.125 apart).
"""

import argparse
import json
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from quasar.kernels.base import RaggedBatch
from quasar.loading import load_model, open_model
from quasar.text.tokenizer import load_tokenizer

NEAR_TIE = 0.25


def transformers_model(checkpoint):
    """The checkpoint's BF16 target, loaded by transformers from a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        config = dict(checkpoint.config) | {"dtype": "bfloat16"}
        Path(folder, "config.json").write_text(json.dumps(config))
        tensors = {name: checkpoint.tensor(name).clone() for name in checkpoint.names()}
        save_file(tensors, Path(folder, "model.safetensors"), metadata={"format": "pt"})
        del tensors
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()


@torch.inference_mode()
def greedy(model, prompt, count, eos_ids):
    """Tokens and, for each, the gap between the two best logits."""
    tokens, gaps, cache, ids = [], [], None, torch.tensor([prompt])
    while len(tokens) < count and not (tokens and tokens[-1] in eos_ids):
        output = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = output.past_key_values
        best = output.logits[0, -1].float().topk(2)
        tokens.append(int(best.indices[0]))
        gaps.append(float(best.values[0] - best.values[1]))
        ids = torch.tensor([tokens[-1:]])
    return tokens, gaps


def our_choices(verifier, prompt, tokens):
    """Our argmax at each position of `tokens`."""
    text = (prompt + tokens)[:-1]
    cache = verifier.new_cache(len(text))
    sequence = cache.open(len(text))
    chosen = []
    while sequence.length < len(text):
        chunk = text[sequence.length : sequence.length + 64]
        batch = RaggedBatch.chunk(chunk, sequence.length, sequence)
        logits = verifier.verify(batch, cache).logits
        chosen += verifier.backend.argmax(len(chunk), logits)
        cache.keep(sequence, range(len(chunk)))
    return chosen[len(prompt) - 1 :]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--data", required=True)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--answer", type=int, default=125, help="tokens of one answer at most")
    args = parser.parse_args()
    checkpoint = open_model(args.model)
    tokenizer = load_tokenizer(checkpoint)
    model = transformers_model(checkpoint)
    lines = Path(args.data).read_text().splitlines()
    texts = []
    for line in lines[:: max(1, len(lines) // 40)]:
        question = json.loads(line)["turns"][0]
        prompt = tokenizer.chat([{"role": "user", "content": question}])
        if len(prompt) <= 600 and sum(len(t[1]) for t in texts) < args.tokens:
            texts.append((prompt, *greedy(model, prompt, args.answer, tokenizer.eos_ids)))
    del model
    verifier = load_model(args.model, "bf16").verifier
    agree, disagreements = 0, []
    for prompt, tokens, gaps in texts:
        for theirs, mine, gap in zip(
            tokens, our_choices(verifier, prompt, tokens), gaps, strict=True
        ):
            agree += theirs == mine
            disagreements += [] if theirs == mine else [gap]
    total = agree + len(disagreements)
    print(
        json.dumps(
            {
                "tokens": total,
                "top1": agree / total,
                "disagreement_gaps": sorted(disagreements),
                "disagreements_beyond_near_ties": sum(gap > NEAR_TIE for gap in disagreements),
            }
        )
    )


main()
