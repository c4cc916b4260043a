"""Responses of ``/v1/chat/completions``: their structs, server-sent events, and the two ways an answer is told.

``ChunkWriter`` tells it in deltas, ``MessageBuilder`` as one message; both eat the same parser events, so that deltas
put together equal the message. Rules that clients rely on: an event is ``data: `` + JSON + two LF; the role comes with
the first delta and never before; reasoning deltas stand before content deltas as the model wrote them; a call's first
delta has index, id, type and the whole name; exactly one chunk has a ``finish_reason``; usage stands in that chunk's
choice (Moonshot's clients) and, when asked for, in a last chunk without choices (OpenAI's). Knows no HTTP.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import msgspec
from msgspec import UNSET, UnsetType

from perilune.chat.parse import CallDelta, CallStart, ContentDelta, Event, ReasoningDelta
from perilune.server.logprobs import ChatLogprobs, joined

DONE: Final = b"data: [DONE]\n\n"

Finish = Literal["stop", "length", "tool_calls"]


class PromptDetails(msgspec.Struct, frozen=True):
    """Part of usage."""

    cached_tokens: int


class CompletionDetails(msgspec.Struct, frozen=True):
    """Part of usage: tokens strictly between the think marks."""

    reasoning_tokens: int


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of one request. ``cached_tokens`` at the top is where Moonshot's clients read it."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    cached_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


def usage(prompt: int, completion: int, reasoning: int, cached: int) -> Usage:
    """Usage of ``prompt`` tokens, ``cached`` of them from the prefix cache, and ``completion`` generated ones."""
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        cached_tokens=cached,
        prompt_tokens_details=PromptDetails(cached),
        completion_tokens_details=CompletionDetails(reasoning),
    )


class FunctionPart(msgspec.Struct, frozen=True, kw_only=True):
    """Name (first delta, or the whole message) and a piece of the arguments."""

    name: str | UnsetType = UNSET
    arguments: str = ""


class CallPart(msgspec.Struct, frozen=True, kw_only=True):
    """A tool call, or a fragment of one."""

    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionPart


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """What one chunk adds."""

    role: Literal["assistant"] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: tuple[CallPart, ...] | UnsetType = UNSET


class ChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    """The choice of a chunk: never more than one."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: Finish | None = None
    usage: Usage | UnsetType = UNSET


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """One ``chat.completion.chunk``."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: tuple[ChunkChoice, ...]
    usage: Usage | UnsetType | None = UNSET


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """The assistant's message. ``content`` is null when there is none, as after a call."""

    role: Literal["assistant"] = "assistant"
    content: str | None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: tuple[CallPart, ...] | UnsetType = UNSET
    refusal: None = None


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """One choice of a completion."""

    index: int
    message: Message
    logprobs: ChatLogprobs | None = None
    finish_reason: Finish


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """One ``chat.completion``."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: tuple[Choice, ...]
    usage: Usage


def sse(value: object) -> bytes:
    """One server-sent event. JSON has no raw line feed, so the event is one line."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def merged(events: Sequence[Event]) -> Iterator[Event]:
    """Joins neighbouring text of one kind, so that one engine step makes one event of it."""
    last: Event | None = None
    for event in events:
        match last, event:
            case ReasoningDelta(a), ReasoningDelta(b):
                last = ReasoningDelta(a + b)
            case ContentDelta(a), ContentDelta(b):
                last = ContentDelta(a + b)
            case CallDelta(i, a), CallDelta(j, b) if i == j:
                last = CallDelta(i, a + b)
            case _:
                if last is not None:
                    yield last
                last = event
    if last is not None:
        yield last


@dataclass(frozen=True, slots=True)
class ChunkHead:
    """What all chunks of a response have in common.

    Args:
        include_usage: with it OpenAI's chunks carry ``usage: null``, without it they have no such key.
    """

    id: str
    created: int
    model: str
    include_usage: bool = False

    def chunk(self, choice: ChunkChoice) -> bytes:
        """An event of one choice."""
        used = None if self.include_usage else UNSET
        return sse(Chunk(id=self.id, created=self.created, model=self.model, choices=(choice,), usage=used))

    def end(self, used: Usage) -> Iterator[bytes]:
        """What follows when every choice has ended."""
        if self.include_usage:
            yield sse(Chunk(id=self.id, created=self.created, model=self.model, choices=(), usage=used))
        yield DONE


class ChunkWriter:
    """Events of one streamed choice, as bytes to send, one item per event."""

    def __init__(self, head: ChunkHead, index: int = 0) -> None:
        self._head, self._index = head, index
        self._role: Literal["assistant"] | UnsetType = "assistant"
        self._logprobs: ChatLogprobs | None = None

    def deltas(self, events: Sequence[Event], logprobs: ChatLogprobs | None = None) -> Iterator[bytes]:
        """The chunks of what the parser made of one engine step. Logprobs go with the next chunk there is."""
        self._logprobs = joined(self._logprobs, logprobs)
        for event in merged(events) if len(events) > 1 else events:
            choice = ChunkChoice(index=self._index, delta=self._delta(event), logprobs=self._logprobs)
            self._role, self._logprobs = UNSET, None
            yield self._head.chunk(choice)

    def finish(self, reason: Finish, used: Usage) -> bytes:
        """The last chunk of the choice."""
        # An answer without any delta still has a role and, for clients that concatenate, a string.
        delta = Delta() if self._role is UNSET else Delta(role=self._role, content="")
        choice = ChunkChoice(index=self._index, delta=delta, logprobs=self._logprobs, finish_reason=reason, usage=used)
        return self._head.chunk(choice)

    def _delta(self, event: Event) -> Delta:
        match event:
            case ReasoningDelta(text):
                return Delta(role=self._role, reasoning_content=text)
            case ContentDelta(text):
                return Delta(role=self._role, content=text)
            case CallStart(index, call_id, name):
                function = FunctionPart(name=name)
                part = CallPart(index=index, id=call_id, type="function", function=function)
            case CallDelta(index, arguments):
                part = CallPart(index=index, function=FunctionPart(arguments=arguments))
        return Delta(role=self._role, tool_calls=(part,))


class MessageBuilder:
    """The same events, put together."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[tuple[CallStart, list[str]]] = []

    def add(self, events: Iterable[Event]) -> None:
        """Takes what the parser made of one engine step."""
        for event in events:
            match event:
                case ReasoningDelta(text):
                    self._reasoning.append(text)
                case ContentDelta(text):
                    self._content.append(text)
                case CallStart():
                    self._calls.append((event, []))
                case CallDelta(index, arguments):
                    self._calls[index][1].append(arguments)

    def message(self) -> Message:
        """The whole message. Reasoning that was empty but there is an empty string: clients tell it from none."""
        calls = tuple(
            CallPart(id=start.id, type="function", function=FunctionPart(name=start.name, arguments="".join(pieces)))
            for start, pieces in self._calls
        )
        return Message(
            content="".join(self._content) or None,
            reasoning_content="".join(self._reasoning) if self._reasoning else UNSET,
            tool_calls=calls or UNSET,
        )
