"""`kvcore chat`: a conversation on a terminal, or line by line from a pipe."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from collections.abc import Iterator
from types import FrameType

import typer

from kvcore.cli import INTERRUPTED
from kvcore.cli.conversation import Conversation
from kvcore.cli.generate import explain, stream
from kvcore.cli.prompt import decode_stdin, without_line_break
from kvcore.cli.ranks import leads, note_ranks, work
from kvcore.cli.result import Result, cache_line, kernel_line
from kvcore.cli.session import Settings, choose_mode, load_model, note_cap, uses_template
from kvcore.cli.terminal import note
from kvcore.errors import InputError, KvcoreError
from kvcore.generate import Generation
from kvcore.runtime import Model

COMMANDS = "/reset starts a new conversation, /stats shows the cache, /exit leaves"


def chat(settings: Settings) -> None:
    """Read a line, answer it, until /exit or the end of input."""
    if not leads(settings.parallel):
        work(lambda: load_model(settings, choose_mode(settings.mode).mode))
    params = settings.sampling_params()
    choice, cap = choose_mode(settings.mode), settings.cap()
    settings.check_life()
    raw, system = settings.text.raw, settings.text.system
    model = load_model(settings, choice.mode)
    raw = not uses_template(model, raw)
    if raw and system is not None:
        raise InputError("--system needs a chat template: leave out --raw, or give --chat-template FILE")
    step = settings.text.prefill_step_size
    note_cap(settings, choice.mode)
    note_ranks(model)
    conversation = Conversation(
        model,
        params,
        system=system,
        raw=raw,
        prefill_step=step,
        cap=cap,
        shifts=settings.shifts,
        prompt_cache=settings.life.prompt_cache,
    )
    Chat(settings, model, conversation, choice.requested).run()


class Chat:
    """The loop around a conversation."""

    def __init__(self, settings: Settings, model: Model, conversation: Conversation, requested: str) -> None:
        self._settings, self._model, self._requested = settings, model, requested
        self._conversation = conversation
        self._lines = Lines()
        self._interrupted = False  # by the last thing that happened: Ctrl-C once more then leaves

    def run(self) -> None:
        if self._lines.interactive:
            note(f"{self._model.name}, {self._model.backend.describe()}; {COMMANDS}")
        while True:
            try:
                line = self._lines.read()
            except KeyboardInterrupt:
                self._leave_or_hint()
                continue
            if line is None or line.strip() == "/exit":
                return
            self._interrupted = False
            self._handle(line)

    def _leave_or_hint(self) -> None:
        print(file=sys.stderr)
        if self._interrupted:
            raise typer.Exit(INTERRUPTED)
        self._interrupted = True
        note("Ctrl-C once more leaves")

    def _handle(self, line: str) -> None:
        match line.strip():
            case "":
                pass
            case "/reset":
                self._conversation.reset()
                note("a new conversation begins")
            case "/stats":
                note(cache_line(self._conversation.cache, self._requested))
                note(kernel_line(self._model, self._conversation.cache))
            case command if command.startswith("/"):
                note(f"unknown command {command.split()[0]}: {COMMANDS}")
            case _:
                self._answer(line)

    def _answer(self, line: str) -> None:
        quiet = self._settings.common.json
        try:
            with self._conversation.turn(line) as generation:
                if self._settings.text.verbose:
                    explain(self._settings, generation)
                with _ctrl_c_cancels(generation):
                    stream(generation, quiet=quiet)
        except KeyboardInterrupt:
            self._interrupted = True
            note("interrupted: this turn is forgotten")
            return
        except KvcoreError as error:
            note(f"error: {error}")
            return
        self._interrupted = generation.finish_reason == "cancelled"
        self._report(Result(self._model, generation, self._requested))

    def _report(self, result: Result) -> None:
        if self._settings.common.json:
            print(json.dumps(result.to_dict(), ensure_ascii=False), flush=True)
        note(result.lines()[0])
        if result.generation.notice is not None:
            note(result.generation.notice)
        if self._conversation.full:
            name, limit = self._conversation.limit_name, self._conversation.limit
            note(f"{name} of {limit} tokens is full: /reset starts a new one")


class Lines:
    """Lines from a terminal, with editing and history where Python has readline, or from a pipe."""

    def __init__(self) -> None:
        self.interactive = sys.stdin.isatty()
        self._read_bytes = 0
        if self.interactive:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  (its import is what gives input() its editing)

    def read(self) -> str | None:
        """The next line without its line break; None at the end of input."""
        if self.interactive:
            try:
                return input("> ")
            except EOFError:
                print(file=sys.stderr)
                return None
        data = sys.stdin.buffer.readline()
        if not data:
            return None
        text = decode_stdin(data, self._read_bytes)
        self._read_bytes += len(data)
        return without_line_break(text)


@contextlib.contextmanager
def _ctrl_c_cancels(generation: Generation) -> Iterator[None]:
    """The first Ctrl-C ends the answer after the step that runs, so that the cache stays whole; the second one
    raises KeyboardInterrupt at once."""

    def handle(_signal: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        generation.cancel()

    previous = signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
