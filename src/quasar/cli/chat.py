"""A conversation in the terminal, with the speed of each answer."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import TYPE_CHECKING

from quasar.cli.parts import options, terminal
from quasar.errors import QuasarError, UsageError
from quasar.types import Completion, GenerationStats, SamplingParams

if TYPE_CHECKING:
    from quasar.engine.engine import Engine
    from quasar.text.tokenizer import Tokenizer

SUMMARY = "talk with a model"

HELP = """\
/reset         forget the conversation
/system TEXT   set the system message and forget the conversation
/stats         figures of the whole session
/quit          leave (also Ctrl-D)
/help          this list
Ctrl-C stops an answer, a second one leaves."""


def configure(parser: argparse.ArgumentParser) -> None:
    options.add_model(parser)
    parser.add_argument("--system", type=options.utf8, metavar="TEXT", help="system message")
    options.add_context(parser, "tokens of conversation at most")
    options.add_engine(parser)
    options.add_sampling(parser, max_tokens=1024)


def run(args: argparse.Namespace) -> int:
    params = options.sampling_params(args)
    options.check_drafter(args)

    from quasar.cli.parts.models import check_held, check_precision, encode_chat, load_engine
    from quasar.loading import Model

    check_precision(args.verifier, "--verifier")
    check_precision(args.head, "--head")
    model = Model.open(args.model, args.revision, args.offline)
    check_held(model, args.verifier)
    if not model.tokenizer.has_chat_template:
        raise UsageError(f"{model.name} has no chat template: use `quasar generate --raw`")
    encode_chat(model, [*system_message(args.system), {"role": "user", "content": "?"}])
    context = min(args.context, model.config.context_length)
    engine = load_engine(model, args, context)
    interactive = sys.stdin.isatty()
    return Chat(engine, model.tokenizer, params, context, interactive, args.system).loop()


def system_message(text: str | None) -> list[dict[str, str]]:
    return [] if text is None else [{"role": "system", "content": text}]


@dataclass(slots=True)
class Chat:
    """The conversation so far and the commands that change it."""

    engine: Engine
    tokenizer: Tokenizer
    params: SamplingParams
    context: int
    interactive: bool
    system: str | None = None
    turns: list[dict[str, str]] = field(default_factory=list)
    answers: list[GenerationStats] = field(default_factory=list)

    def loop(self) -> int:
        """The exit code: a script must learn of a turn that failed, a person has read it."""
        code = 0
        if self.interactive:
            terminal.note("/help lists the commands")
        for line in typed_lines(self.interactive):
            if line == "/quit":
                break
            try:
                if line.startswith("/"):
                    self.command(*line.partition(" ")[::2])
                elif line:
                    self.reply(line)
            except QuasarError as error:
                terminal.note(f"quasar: {error}")
                code = 0 if self.interactive else 1
        return code

    def command(self, name: str, rest: str) -> None:
        if name == "/reset":
            self.turns.clear()
        elif name == "/system" and rest.strip():
            self.system = rest.strip()
            self.turns.clear()
        elif name == "/stats":
            terminal.note(self.session_line())
        elif name in ("/help", "/system"):
            terminal.note(HELP)
        else:
            terminal.note(f"unknown command {name}\n{HELP}")

    def reply(self, question: str) -> None:
        """Ask, stream the answer, keep both; a question that cannot be served is not kept."""
        asked = [*self.turns, {"role": "user", "content": question}]
        prompt, room = self.prompt(asked)
        params = replace(self.params, max_tokens=min(self.params.max_tokens, room))
        request = self.engine.submit(prompt, params)
        completion = request.completion
        with interruptible() if self.interactive else nullcontext(bool) as interrupted:
            for step in self.engine.stream(request):
                terminal.write_text(step.text)
                if interrupted():
                    break
        terminal.write_text("\n")
        self.turns = [*asked, {"role": "assistant", "content": completion.text}]
        self.answers.append(completion.stats)
        terminal.note(answer_line(completion))

    def prompt(self, messages: list[dict[str, str]]) -> tuple[list[int], int]:
        """Token ids of the conversation, and how many tokens of answer still fit."""
        tokens = self.tokenizer.chat([*system_message(self.system), *messages])
        room = self.context - len(tokens)
        if room < 1:
            raise UsageError(
                f"the conversation has {len(tokens)} tokens, the context holds {self.context}: "
                "/reset forgets it"
            )
        return tokens, room

    def session_line(self) -> str:
        tokens = sum(stats.completion_tokens for stats in self.answers)
        decoded = sum(max(stats.completion_tokens - 1, 0) for stats in self.answers)
        passes = sum(stats.verify_passes for stats in self.answers)
        seconds = sum(stats.decode_seconds for stats in self.answers)
        speed = decoded / seconds if seconds else 0.0
        length = decoded / passes if passes else 0.0
        return (
            f"{len(self.answers)} answers, {tokens} tokens, {speed:.1f} tokens/s, "
            f"acceptance length {length:.2f}, conversation of {len(self.turns)} messages"
        )


def answer_line(completion: Completion) -> str:
    stats = completion.stats
    reasons = {"stop": "", "length": ", cut at the limit", "cancelled": ", stopped"}
    return (
        f"[{stats.completion_tokens} tokens, {stats.decode_tokens_per_second:.1f} tokens/s, "
        f"acceptance length {stats.mean_acceptance_length:.2f}"
        f"{reasons[completion.finish_reason]}]"
    )


def typed_lines(interactive: bool) -> Iterator[str]:
    """Lines of standard input, stripped; with editing and a prompt where a person types them."""
    if not interactive:
        for number, line in enumerate(sys.stdin.buffer, 1):
            try:
                yield line.decode().strip()
            except UnicodeDecodeError as error:
                raise UsageError(f"standard input, line {number}: not UTF-8") from error
        return
    import readline  # noqa: F401  gives input() editing and a history

    while True:
        try:
            yield input("> ").strip()
        except EOFError:
            return


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C was pressed, to ask between steps. The second press interrupts at once."""
    pressed = threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        if pressed.is_set():
            raise KeyboardInterrupt
        pressed.set()

    previous = signal.signal(signal.SIGINT, handle)
    try:
        yield pressed.is_set
    finally:
        signal.signal(signal.SIGINT, previous)
