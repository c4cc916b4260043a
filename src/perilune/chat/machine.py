"""The state machine from markers and text to reasoning, content and tool calls.

    CONTENT   --THINK--> REASON             text is content; blank text before the first word is held (see below)
    REASON    --THINK_END--> CONTENT
    CONTENT, REASON --SECTION--> TOOLS      also --CALL--> HEADER, where the section's marker is missing
    TOOLS     --CALL--> HEADER              text outside a call is noise
    HEADER    --ARGUMENTS--> ARGUMENTS      another CALL, CALL_END or SECTION_END discards the half call
    ARGUMENTS --CALL_END--> TOOLS           SECTION_END and another CALL close the call too
    TOOLS     --SECTION_END--> CONTENT

Every other marker is dropped where it stands, so no marker ever becomes text, and the machine is total: any sequence
is some answer. An answer starts in CONTENT, or in REASON when the prompt ends inside the reasoning. Before the first
THINK, and behind a section, text is content only once it holds something visible: blank text there is an ornament of
the format. Everywhere else text is kept to the letter, since a client sends it back and the prefix cache compares.

Works on pieces, each marker once and text in any split: the events put together are the same for every split.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from perilune.chat.calls import by_name, is_json, name_from_arguments, name_from_header
from perilune.chat.ids import call_id
from perilune.chat.markers import Marker, Piece
from perilune.chat.messages import Tool

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More reasoning. Reasoning that ends without any text gives one empty delta: it was there, and empty."""

    text: str


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More content."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool call begins; ``index`` counts from 0 in this answer, ``name`` is whole."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallDelta:
    """More of the arguments of call ``index``, the newest one."""

    index: int
    arguments: str


Event = ReasoningDelta | ContentDelta | CallStart | CallDelta


class State(Enum):
    """Where the next text goes."""

    CONTENT = auto()
    REASON = auto()
    TOOLS = auto()
    HEADER = auto()
    ARGUMENTS = auto()


class _Arguments:
    """Arguments of one call: outer whitespace stripped, the rest to the letter."""

    __slots__ = ("_gap", "_parts")

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._gap: list[str] = []

    def add(self, text: str) -> str:
        """What of ``text``, and of whitespace held before it, certainly belongs to the arguments."""
        if not self._parts:
            text = text.lstrip()
        body = text.rstrip()
        space = text[len(body) :]
        if body:
            body = "".join((*self._gap, body))
            self._parts.append(body)
            self._gap.clear()
        self._gap.append(space)
        return body

    def text(self) -> str:
        return "".join(self._parts)


class Machine:
    """One answer's state.

    Args:
        tools: the request's tools; they decide what a call's header may mean.
        first_call: number of the answer's first call in the conversation.
        in_think: start in REASON.
        allow_calls: off, calls are parsed and dropped.

    Attributes:
        calls: calls told so far.
        dropped_calls: half calls, and calls whose header and arguments name no tool.
        invalid_arguments: calls whose arguments are no JSON; they are passed on as they are.
    """

    def __init__(self, tools: Sequence[Tool], first_call: int, *, in_think: bool, allow_calls: bool) -> None:
        self.state = State.REASON if in_think else State.CONTENT
        self.calls = 0
        self.dropped_calls = 0
        self.invalid_arguments = 0
        self._tools: Final = by_name(tools)
        self._first_call: Final = first_call
        self._allow_calls: Final = allow_calls
        self._blank: list[str] | None = []  # held blank text; None once content is kept to the letter
        self._reasoned = False
        self._header: list[str] = []
        self._first_dropped = ""
        self._name: str | None = None
        self._arguments = _Arguments()

    def accept(self, piece: Piece) -> list[Event]:
        """Takes the next piece."""
        return self._marker(piece) if isinstance(piece, Marker) else self._text(piece)

    def finish(self, *, cut: bool) -> list[Event]:
        """Ends the answer and closes what is open. ``cut``: by a limit, so what the model left open stays as it is."""
        events = self._leave_reason() if self.state is State.REASON else self._leave_call(complete=not cut)
        self.state = State.TOOLS
        if self.dropped_calls and self._allow_calls:  # once per answer: a model can drop thousands
            logger.warning(
                "dropped %d tool calls that are unfinished or name no tool, the first with header %r",
                self.dropped_calls,
                self._first_dropped,
            )
        return events

    def _text(self, text: str) -> list[Event]:
        if not text:
            return []
        match self.state:
            case State.CONTENT:
                return self._content(text)
            case State.REASON:
                self._reasoned = True
                return [ReasoningDelta(text)]
            case State.HEADER:
                self._header.append(text)
            case State.ARGUMENTS:
                known = self._arguments.add(text)
                if known and self._name is not None:
                    return [CallDelta(self.calls - 1, known)]
            case State.TOOLS:
                pass
        return []

    def _content(self, text: str) -> list[Event]:
        if self._blank is not None:
            self._blank.append(text)
            if text.isspace():
                return []
            text = "".join(self._blank)
            self._blank = None
        return [ContentDelta(text)]

    def _marker(self, marker: Marker) -> list[Event]:
        match marker, self.state:
            case Marker.THINK, State.CONTENT:
                self.state = State.REASON
            case Marker.THINK_END, State.REASON:
                self._blank = None
                return self._leave(State.CONTENT)
            case Marker.SECTION, _:
                return self._leave(State.TOOLS)
            case Marker.CALL, _:
                events = self._leave(State.HEADER)
                self._header.clear()
                return events
            case Marker.ARGUMENTS, State.HEADER:
                return self._begin_arguments()
            case Marker.CALL_END, State.HEADER | State.ARGUMENTS:
                return self._leave(State.TOOLS)
            case Marker.SECTION_END, State.TOOLS | State.HEADER | State.ARGUMENTS:
                self._blank = []
                return self._leave(State.CONTENT)
        return []

    def _leave(self, state: State) -> list[Event]:
        events = self._leave_reason() if self.state is State.REASON else self._leave_call(complete=True)
        self.state = state
        return events

    def _leave_reason(self) -> list[Event]:
        if self._reasoned:
            return []
        self._reasoned = True
        return [ReasoningDelta("")]

    def _begin_arguments(self) -> list[Event]:
        self.state = State.ARGUMENTS
        self._arguments = _Arguments()
        self._name = name_from_header("".join(self._header), self._tools) if self._allow_calls else None
        return [] if self._name is None else [self._start(self._name)]

    def _start(self, name: str) -> CallStart:
        index = self.calls
        self.calls += 1
        return CallStart(index, call_id(name, self._first_call + index), name)

    def _leave_call(self, *, complete: bool) -> list[Event]:
        if self.state is State.HEADER:
            self._drop()
        if self.state is not State.ARGUMENTS:
            return []
        arguments = self._arguments.text()
        events: list[Event] = []
        if self._name is None:
            name = name_from_arguments(arguments, self._tools) if self._allow_calls and complete else None
            if name is None:
                self._drop()
                return []
            events += (self._start(name), CallDelta(self.calls - 1, arguments))
        elif not arguments and complete:
            arguments = "{}"
            events.append(CallDelta(self.calls - 1, arguments))
        self.invalid_arguments += complete and not is_json(arguments)
        return events

    def _drop(self) -> None:
        if not self.dropped_calls:
            self._first_dropped = "".join(self._header).strip()[:80]
        self.dropped_calls += 1
