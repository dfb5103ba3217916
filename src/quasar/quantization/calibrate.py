"""The text that shows a quantiser what activations look like, and what it learns from it.

The built-in text was written for this purpose and comes from no evaluation set. Some passages are
conversations: they go through the model's chat template, because the largest activations of a chat
model sit on the tokens that the template adds and on the first token of a sequence.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from importlib import resources
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from quasar.errors import UsageError
from quasar.memory import trim_heap
from quasar.models.layer import Layer
from quasar.models.tensors import GROUPS
from quasar.quantization.hadamard import rotate_with_matrix
from quasar.quantization.moments import MomentSums, moments_over
from quasar.text.tokenizer import Tokenizer

CALIBRATION_TOKENS = 8192
MOMENT_TOKENS = 32768
"""As many of them for GPTQ, whose moments would overfit to fewer."""
HELD_OUT_TOKENS = 2048
SEQUENCE_TOKENS = 512
LEAST_CALIBRATION_TOKENS = 512
LEAST_HELD_OUT_TOKENS = 128
LARGEST_FILE = 32 * 2**20
SAMPLED_TOKENS = 1024
"""Inputs kept of the calibration text for the search of scales, about, half of them to check."""
SMALLEST_ENERGY = torch.finfo(torch.float32).tiny
SAMPLED_ROWS = 16
"""Inputs kept a held-out sequence, to measure the errors of linears on."""
PORTION_TOKENS = 4096
"""Whose inputs are held until they are in the moments, about: 400 MB in an 8B model's layer."""
PASSAGE_CHARACTERS = 1500
"""A calibration file is cut into passages of this length: 300 to 400 tokens of English."""

Turn = dict[str, str]
"""`role` and `content`, as chat templates take them."""


@dataclass(frozen=True, slots=True)
class Passage:
    """A piece of text, or a conversation."""

    kind: str
    text: str
    turns: tuple[Turn, ...] = ()

    def encode(self, tokenizer: Tokenizer) -> list[int]:
        """Token ids; without a template a conversation is the text of its turns."""
        if self.turns and tokenizer.has_chat_template:
            return tokenizer.chat(self.turns, add_generation_prompt=False)
        return tokenizer.encode(self.text, add_special_tokens=True)


@dataclass(frozen=True, slots=True)
class CalibrationText:
    """Token sequences, each [tokens] int64: some to calibrate on, others to measure on."""

    name: str
    calibration: list[Tensor]
    held_out: list[Tensor]


def calibration_text(
    tokenizer: Tokenizer,
    file: Path | None = None,
    longest: int = SEQUENCE_TOKENS,
    moments: bool = False,
) -> CalibrationText:
    """The built-in text, or a UTF-8 file whose last quarter is held out.

    No sequence is longer than `longest` tokens. `moments` says that second moments are wanted:
    MOMENT_TOKENS are taken then, as far as there are so many, CALIBRATION_TOKENS otherwise. Raises
    UsageError for a file that cannot serve.
    """
    name = "builtin" if file is None else file.name
    kept, held_out = builtin_passages() if file is None else file_passages(file)
    parts = (
        (kept, MOMENT_TOKENS if moments else CALIBRATION_TOKENS, LEAST_CALIBRATION_TOKENS),
        (held_out, HELD_OUT_TOKENS, LEAST_HELD_OUT_TOKENS),
    )
    taken = []
    for passages, budget, least in parts:
        sequences = encode(passages, tokenizer, budget, longest)
        tokens = sum(s.shape[0] for s in sequences)
        if tokens < least:
            raise UsageError(
                f"--calib {file or name}: too short: a part has {tokens} tokens of {least} needed "
                "(three quarters are for calibration, the last is for measuring)"
            )
        taken.append(sequences)
    return CalibrationText(name, *taken)


def encode(
    passages: Sequence[Passage], tokenizer: Tokenizer, budget: int, longest: int
) -> list[Tensor]:
    """Sequences of 2 to `longest` tokens, `budget` in all, from a fixed random choice.

    What a smaller budget gives comes first.
    """
    sequences = []
    for passage in mixed(passages):
        ids = torch.tensor(passage.encode(tokenizer)[:budget], dtype=torch.int64)
        sequences += [part for part in torch.split(ids, longest) if part.shape[0] > 1]
        budget -= ids.shape[0]
        if budget <= 1:
            break
    return sequences


def mixed(passages: Sequence[Passage]) -> list[Passage]:
    """In a fixed random order, of which every stretch has its share of each kind."""
    order, kinds = list(passages), defaultdict(list)
    random.Random(0).shuffle(order)
    for passage in order:
        kinds[passage.kind].append(passage)
    places = [((i + 0.5) / len(kind), p) for kind in kinds.values() for i, p in enumerate(kind)]
    return [passage for _, passage in sorted(places, key=lambda place: place[0])]


def builtin_passages() -> tuple[list[Passage], list[Passage]]:
    """The built-in text: three passages of each kind to calibrate on, then one to hold out."""
    source = resources.files("quasar.quantization").joinpath("calibration.txt")
    kept: list[Passage] = []
    held_out: list[Passage] = []
    seen: dict[str, int] = defaultdict(int)
    for passage in parse_passages(source.read_text(encoding="utf-8")):
        seen[passage.kind] += 1
        (held_out if seen[passage.kind] % 4 == 2 else kept).append(passage)
    return kept, held_out


def parse_passages(text: str) -> list[Passage]:
    """Passages begin with a line `=== kind`; in a chat, turns begin with a line `--- role`."""
    passages = []
    for block in ("\n" + text).split("\n=== ")[1:]:
        kind, _, body = block.partition("\n")
        turns = []
        if kind == "chat":
            for turn in ("\n" + body).split("\n--- ")[1:]:
                role, _, content = turn.partition("\n")
                turns.append({"role": role, "content": content.strip("\n")})
            body = "\n\n".join(turn["content"] for turn in turns)
        passages.append(Passage(kind, body.strip("\n"), tuple(turns)))
    return passages


def file_passages(file: Path) -> tuple[list[Passage], list[Passage]]:
    """A user's text: every fourth passage is asked as a chat turn, the last quarter is held out."""
    pieces = cut(read_text(file))
    passages = [
        Passage("file", piece, ({"role": "user", "content": piece},) if i % 4 == 3 else ())
        for i, piece in enumerate(pieces)
    ]
    # By characters: the last piece is what was left, and may be a few words.
    boundary, held_out, total = len(pieces), 0, sum(map(len, pieces))
    while 4 * held_out < total:
        boundary -= 1
        held_out += len(pieces[boundary])
    return passages[:boundary], passages[boundary:]


def read_text(file: Path) -> str:
    """The text of a calibration file; refuses what is missing, empty, huge or not text."""
    try:
        with file.open("rb") as source:  # a pipe or device does not say how much it has
            content = source.read(LARGEST_FILE + 1)
        if len(content) > LARGEST_FILE:
            raise UsageError(f"--calib {file}: give an excerpt of at most {LARGEST_FILE:,} bytes")
        text = content.decode("utf-8-sig")
    except OSError as error:
        raise UsageError(f"--calib {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"--calib {file}: not UTF-8 text (byte {error.start})") from error
    if "\0" in text:
        raise UsageError(f"--calib {file}: binary, not text (it contains a NUL byte)")
    if not text.strip():
        raise UsageError(f"--calib {file}: empty")
    return text


def cut(text: str) -> list[str]:
    """Pieces of about PASSAGE_CHARACTERS (fewer in a short text), cut after a line or a word."""
    size = min(PASSAGE_CHARACTERS, max(1, len(text) // 4))
    pieces, start = [], 0
    while start < len(text):
        end = min(start + size, len(text))
        if end < len(text):
            half = start + size // 2
            end = text.rfind("\n", half, end) + 1 or text.rfind(" ", half, end) + 1 or end
        pieces.append(text[start:end])
        start = end
    return [piece for piece in pieces if piece.strip()]


@dataclass(frozen=True, slots=True)
class Inputs:
    """Some inputs of a group of linears: rows [tokens, in] fp32, and weights [tokens], sum 1."""

    rows: Tensor
    token_weight: Tensor

    @classmethod
    def of(cls, parts: Sequence[Tensor], token_weights: Sequence[Tensor]) -> Inputs:
        """The rows of several sequences."""
        weight = torch.cat(list(token_weights))
        return cls(torch.cat(list(parts)), weight / weight.sum())

    def thinned(self, tokens: int) -> Inputs:
        """About so many of the rows, evenly spaced."""
        step = max(1, len(self.rows) // tokens)
        return Inputs.of([self.rows[::step]], [self.token_weight[::step]])

    def rotated(self, divisor: Tensor, block: int) -> Inputs:
        """Of channels over divisor [in], in blocks of so many."""
        rows = self.rows / divisor
        rotate_with_matrix(rows, block)
        return Inputs(rows, self.token_weight)

    def energy(self) -> Tensor:
        """Mean square of each channel, [in]."""
        return self.token_weight @ self.rows.square()


@dataclass(frozen=True, slots=True)
class GroupSample:
    """What the inputs of a group of linears look like on the calibration text.

    Half of the sequences go into `fitting`, the others into `checking`.
    """

    absmax: Tensor
    """The largest |x| of each channel, [in], over all tokens."""
    fitting: Inputs
    checking: Inputs
    moments: Tensor | None = None
    """H [in, in] of all tokens, for GPTQ (`moments.py`)."""

    def rotated(self, divisor: Tensor, block: int) -> GroupSample:
        """As `Inputs.rotated`; absmax is that of the rows kept."""
        fitting, checking = (x.rotated(divisor, block) for x in (self.fitting, self.checking))
        absmax = torch.maximum(*(part.rows.abs().amax(dim=0) for part in (fitting, checking)))
        moments = self.moments
        if moments is not None:
            moments = moments_over(moments, divisor, block)
        return GroupSample(absmax, fitting, checking, moments)

    def energy(self) -> Tensor:
        """Mean square of each channel, [in]: of all tokens, or else of both halves."""
        if self.moments is not None:
            return self.moments.diagonal()
        return (self.fitting.energy() + self.checking.energy()) / 2


LayerSample = Mapping[str, GroupSample]
"""By group of linears."""


class LayerInputs(dict[str, Tensor]):
    """Observes one sequence in a layer: by group, every `stride`-th input [rows, in] from the
    first on, and in `absmax` the largest |x| of each channel [in]. With stride 0 no input is kept.

    `whole` holds all inputs [tokens, in] where moments are wanted, until they are taken.
    """

    def __init__(self, stride: int, moments: bool = False) -> None:
        super().__init__()
        self.stride, self._moments = stride, moments
        self.absmax: dict[str, Tensor] = {}
        self.whole: dict[str, Tensor] = {}

    def __call__(self, group: str, x: Tensor) -> None:
        if self.stride:
            self[group] = x[:: self.stride].clone()
        if self._moments:
            self.whole[group] = x
        self.absmax[group] = x.abs().amax(dim=0)


class SampledRows(dict[str, Tensor]):
    """Observes one sequence in a layer: by group, evenly spaced rows of the input [rows, in]."""

    def __call__(self, group: str, x: Tensor) -> None:
        step = max(1, x.shape[0] // SAMPLED_ROWS)
        self[group] = x[::step][:SAMPLED_ROWS].clone()


def strides(lengths: Sequence[int]) -> list[int]:
    """Of what is sampled of each sequence: about SAMPLED_TOKENS, from the first CALIBRATION_TOKENS.

    So the search of scales sees the same inputs whether or not GPTQ has more text.
    """
    before = [0, *accumulate(lengths)]
    sampled = sum(start < CALIBRATION_TOKENS for start in before[:-1])
    stride = max(1, before[sampled] // SAMPLED_TOKENS)
    return [stride] * sampled + [0] * (len(lengths) - sampled)


def portions(lengths: Sequence[int]) -> Iterator[list[int]]:
    """The numbers of the sequences, in order, by PORTION_TOKENS or a little more."""
    portion, tokens = [], 0
    for number, length in enumerate(lengths):
        portion.append(number)
        tokens += length
        if tokens >= PORTION_TOKENS:
            yield portion
            portion, tokens = [], 0
    if portion:
        yield portion


def sample_layer(
    layer: Layer, states: list[Tensor], workers: Executor, moments: bool = False
) -> LayerSample:
    """Move the calibration text through a layer; what its inputs look like there.

    states: the residual stream [tokens, hidden] of each sequence, which is replaced.
    """
    lengths = [len(x) for x in states]
    stride, sums, seen = strides(lengths), MomentSums(), []

    def run(number: int) -> LayerInputs:
        inputs = LayerInputs(stride[number], moments)
        states[number] = layer(states[number], inputs)
        return inputs

    for portion in portions(lengths) if moments else [range(len(states))]:
        found = list(workers.map(run, portion))
        if moments:
            outputs = [states[number] for number in portion]
            rows = {group: [inputs.whole.pop(group) for inputs in found] for group in GROUPS}
            weights = {group: token_weights(group, outputs) for group in GROUPS}
            sums.add(rows, weights, workers)
            del rows
        trim_heap()
        seen += found
    return sample_groups(seen, states, sums.means())


def token_weights(group: str, outputs: Sequence[Tensor]) -> list[Tensor]:
    """By sequence: what noise in a token's output of this group counts, [tokens].

    outputs [tokens, hidden]: the layer's. The norms that read them divide by their size, so noise
    in the outputs of `o` and `down` matters in relation to it; all inputs of the other groups are
    normed.
    """
    if group not in ("o", "down"):
        return [torch.ones(len(x)) for x in outputs]
    return [1 / x.square().mean(dim=1).clamp_min(SMALLEST_ENERGY) for x in outputs]


def sample_groups(
    seen: Sequence[LayerInputs], outputs: Sequence[Tensor], moments: Mapping[str, Tensor]
) -> LayerSample:
    """What the observers of all sequences saw, taken from them; `moments` H where there are any.

    outputs: as for `token_weights`.
    """
    pairs = [pair for pair in zip(seen, outputs, strict=True) if pair[0].stride]
    found = {}
    for group in GROUPS:
        absmax = torch.stack([inputs.absmax[group] for inputs in seen]).amax(dim=0)
        weights = token_weights(group, [x[:: inputs.stride] for inputs, x in pairs])
        parts = [inputs.pop(group) for inputs, _ in pairs]
        if len(parts) == 1:
            parts, weights = list(parts[0].chunk(2)), list(weights[0].chunk(2))
        fitting, checking = (Inputs.of(parts[i::2], weights[i::2]) for i in (0, 1))
        found[group] = GroupSample(absmax, fitting, checking, moments.get(group))
    return found
