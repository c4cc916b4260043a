"""``perilune chat``: a conversation in the terminal, or one question from a pipe.

The answer goes to stdout; thinking, tool calls and notes go to stderr. Tools run here, on the client's side.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from perilune.cli.start import (
    KEY_VARIABLE,
    Device,
    DeviceOption,
    DtypeOption,
    Launch,
    MaxModelLen,
    ModelArgument,
    ModelChoice,
    ThreadsOption,
    loader,
)
from perilune.errors import PeerError, UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from perilune.cli.client import Answer, Call, ChatClient

MAX_ROUNDS: Final = 16
"""Answers to one question, tool calls included: a model that calls for ever is stopped."""
_MAX_STDIN: Final = 4 << 20
_COMMANDS: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""What a terminal would obey rather than show: control characters, and those that turn the direction of text."""

EPILOG: Final = """\b
Examples:
  perilune chat
  perilune chat --tools calculator
  perilune chat --url http://127.0.0.1:8000
  PERILUNE_API_KEY=sk-… perilune chat --url https://k2.example.org
  echo "12+30?" | perilune chat

In a conversation, /new forgets it and /exit or Ctrl-D ends it.
"""


class ToolName(StrEnum):
    """Tools that this client can run."""

    CALCULATOR = "calculator"


class Thinking(StrEnum):
    """How thinking is shown."""

    AUTO = "auto"
    SHOW = "show"
    FOLD = "fold"
    HIDE = "hide"


def chat(
    model: ModelArgument = None,
    url: Annotated[str | None, typer.Option(help="A running server, instead of a model.")] = None,
    name: Annotated[str | None, typer.Option(help="The model's name there.  [default: the first it lists]")] = None,
    tools: Annotated[list[ToolName] | None, typer.Option(help="Tools the model may call; may be repeated.")] = None,
    system: Annotated[str | None, typer.Option(help="A system message.")] = None,
    thinking: Annotated[
        Thinking, typer.Option(help="How to show thinking; auto: shown on a terminal, else hidden.")
    ] = Thinking.AUTO,
    temperature: Annotated[
        float | None, typer.Option(min=0, max=2, help="0 is greedy.  [default: the server's]")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Makes answers repeatable.  [default: a new one each time]")
    ] = None,
    max_model_len: MaxModelLen = None,
    device: DeviceOption = Device.CPU,
    dtype: DtypeOption = None,
    threads: ThreadsOption = None,
) -> None:
    """Talk to a model: one on a running server, or one that is started here."""
    if url is not None and model is not None:
        raise UsageError("both a model and --url are given", hint="--url talks to the model that runs there")
    from perilune.cli.client import ChatClient

    choice = ModelChoice(model, max_model_len, device, dtype, threads)
    with _server(choice, url) as base:
        fields = {"temperature": temperature, "seed": seed}
        given = {key: value for key, value in fields.items() if value is not None}
        client = ChatClient(base, name, given, None if url is None else os.environ.get(KEY_VARIABLE))
        try:
            talk = Conversation(client, View(thinking), tuple(tools or ()), system)
            if sys.stdin.isatty():
                _converse(talk)
            else:
                talk.ask(_piped_question())
        finally:
            client.close()


class Conversation:
    """Messages so far, and what happens for the next one."""

    def __init__(self, client: ChatClient, view: View, tools: tuple[ToolName, ...], system: str | None) -> None:
        self._client, self._view, self._tools = client, view, tools
        self._opening: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]
        self._messages = list(self._opening)

    def ask(self, question: str) -> None:
        """Asks, runs the tools that the model calls, and lets it go on until it has answered.

        Raises:
            PeerError: the server failed, or the model calls tools without end. The question is then forgotten.
        """
        from perilune.cli.client import Answer

        before = len(self._messages)
        self._messages.append({"role": "user", "content": question})
        try:
            for _ in range(MAX_ROUNDS):
                answer = Answer()
                self._view.begin()
                for delta in self._client.stream(self._messages, self._declarations(), answer):
                    self._view.show(delta.reasoning_content or "", delta.content or "")
                self._view.end(answer)
                self._messages.append(answer.message())
                if not answer.calls:
                    return
                self._run_tools(answer)
            raise PeerError(f"the model still calls tools after {MAX_ROUNDS} rounds")
        except BaseException:
            del self._messages[before:]
            raise

    def forget(self) -> None:
        """Starts anew."""
        self._messages = list(self._opening)

    def _declarations(self) -> list[Any]:
        from perilune.cli.calculator import DECLARATION

        declarations = {ToolName.CALCULATOR: DECLARATION}
        return [dict(declarations[tool]) for tool in self._tools]

    def _run_tools(self, answer: Answer) -> None:
        from perilune.cli.calculator import NAME, run_call

        for call in answer.calls:
            known = call.name == NAME and ToolName.CALCULATOR in self._tools
            result = run_call(call.arguments) if known else f"error: there is no tool {call.name!r}"
            self._view.call(call, result)
            self._messages.append({"role": "tool", "tool_call_id": call.id, "name": call.name, "content": result})


class View:
    """Shows an answer as it comes."""

    def __init__(self, thinking: Thinking) -> None:
        from perilune.cli.terminal import console

        self._out: Console = console()
        self._err: Console = console(stderr=True)
        if thinking is Thinking.AUTO:
            thinking = Thinking.SHOW if self._err.is_terminal else Thinking.HIDE
        self._thinking = thinking
        self._thought_since: float | None = None
        self._in_thought = False

    def begin(self) -> None:
        """A new answer."""
        self._thought_since = None
        self._in_thought = False

    def show(self, reasoning: str, content: str) -> None:
        """More of it."""
        if reasoning:
            if self._thought_since is None:
                self._thought_since = time.monotonic()
            self._in_thought = True
            if self._thinking is Thinking.SHOW:
                self._err.print(_shown(reasoning, self._err), end="", style="dim")
        if content:
            self._end_thought()
            self._out.file.write(_shown(content, self._out))  # print() would drop a pipe's control characters
            self._out.file.flush()

    def end(self, answer: Answer) -> None:
        """The answer is whole."""
        self._end_thought()
        if answer.content:
            self._out.print()
        if answer.finish_reason == "length":
            self._err.print("(the answer was cut: the context is full)", style="yellow")
        elif not answer.content and not answer.calls:
            self._err.print("(the model said nothing)", style="yellow")

    def call(self, call: Call, result: str) -> None:
        """A tool was called and has answered."""
        self._err.print(_shown(f"┌ {call.name} {call.arguments}", self._err), style="cyan")
        self._err.print(_shown(f"└ {result}", self._err), style="cyan")

    def _end_thought(self) -> None:
        if not self._in_thought:
            return
        self._in_thought = False
        if self._thinking is Thinking.SHOW:
            self._err.print()
        elif self._thinking is Thinking.FOLD and self._thought_since is not None:
            self._err.print(f"(thought for {time.monotonic() - self._thought_since:.1f} s)", style="dim")


def _shown(text: str, console: Console) -> str:
    """The same, but a terminal gets escapes of what it would obey; a pipe gets every byte."""
    return _COMMANDS.sub(lambda found: f"\\x{ord(found[0]):02x}", text) if console.is_terminal else text


@contextmanager
def _server(choice: ModelChoice, url: str | None) -> Iterator[str]:
    """The URL to talk to: the given one, or that of a server that lives as long as the block."""
    if url is not None:
        yield url
        return
    from perilune import logs
    from perilune.cli.terminal import LoadView
    from perilune.server.runner import Running, background, bind
    from perilune.server.state import ServerState

    logs.configure("text", "error")
    state = ServerState((choice.name,))
    view = LoadView(terminal_only=True)
    launch = Launch(choice.path, choice.engine_options)
    try:
        with background(Running(state, bind("127.0.0.1", 0), loader(launch, state, view), grace_s=0)) as base:
            view.phase(f"{choice.name} is ready")
            yield base
    finally:
        view.close()


def _converse(talk: Conversation) -> None:
    import readline  # noqa: F401 - gives input() a history and line editing

    from perilune.cli.terminal import print_error

    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            print()
            return
        if line == "/exit":
            return
        if line == "/new":
            talk.forget()
        elif line:
            try:
                talk.ask(line)
            except PeerError as error:
                print_error(error)
            except KeyboardInterrupt:
                print()  # stops this answer, not the conversation


def _piped_question() -> str:
    """All of stdin.

    Raises:
        UsageError: nothing there, too much, or no UTF-8.
    """
    data = sys.stdin.buffer.read(_MAX_STDIN + 1)
    if len(data) > _MAX_STDIN:
        raise UsageError(f"stdin has more than {_MAX_STDIN} bytes")
    try:
        question = data.decode().strip()
    except UnicodeDecodeError as error:
        raise UsageError(f"stdin is not UTF-8: byte {error.start}") from None
    if not question:
        raise UsageError("stdin is empty, a question is needed", hint='echo "12+30?" | perilune chat')
    return question
