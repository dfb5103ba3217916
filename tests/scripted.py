"""A verifier that follows a script and a tokenizer of single characters: the engine runs alone."""

from __future__ import annotations

import torch

from quasar.cache import KVCache
from quasar.kernels.base import AttentionSpec, Buffer
from quasar.kernels.reference import ReferenceBackend
from quasar.models.config import ModelConfig
from quasar.verification.verifier import Verification

VOCABULARY = 200
CONFIG = ModelConfig("llama", 8, 8, 1, 1, 1, 4, VOCABULARY, 64, 1e-5, 1e4, tied_embeddings=True)
SPEC = AttentionSpec(1, 1, 4, 0.5, torch.ones(64, 2), torch.zeros(64, 2))


class Scripted:
    """After the token at position p comes `script[p]`, whatever the token was."""

    config = CONFIG

    def __init__(self, script):
        self.script = script
        self.backend = ReferenceBackend()
        self.passes = []

    def new_cache(self, tokens):
        return KVCache(self.backend, [SPEC], tokens)

    def verify(self, batch, cache, rows=None):
        self.passes.append(batch.tokens.tolist())
        positions = batch.positions.tolist()
        wanted = range(len(positions)) if rows is None else rows.tolist()
        logits = torch.zeros(max(1, len(wanted)), VOCABULARY)
        for row, index in enumerate(wanted):
            logits[row, self.script[positions[index]]] = 5.0
        return Verification(Buffer.of(logits), [])


class Letters:
    """A tokenizer whose token i is the character chr(i)."""

    eos_ids = frozenset({0})
    special_ids = frozenset()
    strips_space = False

    def __init__(self):
        self.pieces = [chr(i).encode() if i < 128 else b"" for i in range(VOCABULARY)]

    def piece(self, token, skip_special_tokens=True):
        return self.pieces[token]

    def decode(self, ids, skip_special_tokens=True):
        return "".join(chr(i) for i in ids)


def text_script(text, prompt):
    """A script whose answer to a prompt of this many tokens is `text`, then end of text."""
    return [1] * (prompt - 1) + [ord(c) for c in text] + [0] * 100
