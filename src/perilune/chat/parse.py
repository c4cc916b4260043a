"""A model's output, as it comes, to reasoning, content and tool calls.

``OutputParser`` reads ids, where a marker is a marker and text that imitates one is text. ``TextParser`` reads the text
of engines that send no ids. Both feed one machine (``chat.machine``), and for both holds: the events of a stream, put
together, are those of the whole output, however it was cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, Literal

from perilune.chat.lexer import MarkerLexer
from perilune.chat.machine import CallDelta, CallStart, ContentDelta, Event, Machine, ReasoningDelta, State
from perilune.chat.markers import Marker
from perilune.chat.messages import Tool
from perilune.text.detok import Utf8Stream
from perilune.text.tokenizer import Tokenizer
from perilune.types import FinishReason

__all__ = ["CallDelta", "CallStart", "ContentDelta", "Event", "OutputParser", "ReasoningDelta", "TextParser"]

WireReason = Literal["stop", "length", "tool_calls"]


class OutputParser:
    """Parses one answer from its ids.

    Ids that are neither text nor a marker of the answer's format (``[EOS]``, reserved and unknown ones) are dropped.

    Args:
        tokenizer: gives ids their bytes and markers their ids.
        tools: the request's tools.
        history_calls: calls in the prompt's messages, from ``Rendered``.
        starts_in_think: the prompt ends with THINK, from ``Rendered``; or the caller expects reasoning first.
        allow_calls: whether calls are told at all; None means where tools are declared.

    Attributes:
        reasoning_tokens: ids strictly between the think marks.

    Raises:
        ConfigError: the vocabulary lacks a marker.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        tools: Sequence[Tool],
        history_calls: int,
        starts_in_think: bool = False,
        allow_calls: bool | None = None,
    ) -> None:
        self.reasoning_tokens = 0
        self._tokenizer: Final = tokenizer
        self._markers: Final = {tokenizer.special(marker): marker for marker in Marker}
        self._utf8: Final = Utf8Stream()
        allow_calls = bool(tools) if allow_calls is None else allow_calls
        self._machine: Final = Machine(tools, history_calls, in_think=starts_in_think, allow_calls=allow_calls)
        self._reason = FinishReason.STOP

    def feed(self, ids: Iterable[int]) -> list[Event]:
        """What the next ids make certain."""
        events: list[Event] = []
        run: list[bytes] = []
        for token in ids:
            data = self._tokenizer.token_bytes(token)
            marker = self._markers.get(token)
            if self._machine.state is State.REASON and marker is None:
                self.reasoning_tokens += 1
            if data:
                run.append(data)
                continue
            events += self.feed_tail(b"".join(run))
            run.clear()
            events += self._machine.accept(self._utf8.flush())
            if marker is not None:
                events += self._machine.accept(marker)
        return events + self.feed_tail(b"".join(run))

    def feed_tail(self, data: bytes) -> list[Event]:
        """Takes bytes of text that are no whole token: what stands before a stop string."""
        return self._machine.accept(self._utf8.feed(data))

    def finish(self, reason: FinishReason) -> list[Event]:
        """Ends the answer and closes what is open. Where a limit cut it, an unfinished character vanishes."""
        self._reason = reason
        cut = reason is not FinishReason.STOP
        return [*self._machine.accept(self._utf8.flush(cut=cut)), *self._machine.finish(cut=cut)]

    @property
    def place(self) -> State:
        """Where the next text goes."""
        return self._machine.state

    @property
    def finish_reason(self) -> WireReason:
        """As clients read it, once the answer is finished."""
        return _wire_reason(self._reason, self._machine.calls)

    @property
    def dropped_calls(self) -> int:
        """Half calls, and calls that name no tool."""
        return self._machine.dropped_calls

    @property
    def invalid_arguments(self) -> int:
        """Calls whose arguments are no JSON, passed on as they are."""
        return self._machine.invalid_arguments


class TextParser:
    """Parses one answer from text that spells its markers out. Arguments as for ``OutputParser``."""

    def __init__(
        self,
        tools: Sequence[Tool],
        history_calls: int,
        starts_in_think: bool = False,
        allow_calls: bool | None = None,
    ) -> None:
        self._lexer: Final = MarkerLexer()
        allow_calls = bool(tools) if allow_calls is None else allow_calls
        self._machine: Final = Machine(tools, history_calls, in_think=starts_in_think, allow_calls=allow_calls)
        self._reason = FinishReason.STOP

    def feed(self, text: str) -> list[Event]:
        """What the next text makes certain."""
        return [event for piece in self._lexer.feed(text) for event in self._machine.accept(piece)]

    def finish(self, reason: FinishReason) -> list[Event]:
        """Ends the answer and closes what is open. The beginning of a marker that never came is text."""
        self._reason = reason
        cut = reason is not FinishReason.STOP
        return [*self._machine.accept(self._lexer.flush()), *self._machine.finish(cut=cut)]

    @property
    def finish_reason(self) -> WireReason:
        """As clients read it, once the answer is finished."""
        return _wire_reason(self._reason, self._machine.calls)


def _wire_reason(reason: FinishReason, calls: int) -> WireReason:
    """A limit wins, since it may have cut a call; calls need an answer that ended by itself."""
    if reason is FinishReason.LENGTH:
        return "length"
    return "tool_calls" if calls else "stop"
