"""Canonical tool-call ids for a history.

The model was trained on ids ``functions.{name}:{n}`` with n counted over the whole conversation, and imitates any
other spelling it sees. Clients send what other servers gave them (``call_…``, ``toolu_…``, repeated counters), so
every id is written anew before rendering. Renumbering depends on nothing but the messages, so a prompt that grows by
appending keeps its prefix, and with it its place in the prefix cache.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from perilune.chat.messages import Message


@dataclass(frozen=True, slots=True)
class CallIds:
    """Ids of a conversation.

    Attributes:
        calls: by index of the assistant message, one id per call.
        results: by index of the tool message.
        count: calls in the history; the next answer's first call gets this number.
    """

    calls: dict[int, tuple[str, ...]]
    results: dict[int, str]
    count: int


def call_id(name: str, number: int) -> str:
    """The canonical id of a conversation's call ``number``, counted from 0."""
    return f"functions.{name}:{number}"


def canonical_ids(messages: Sequence[Message]) -> CallIds:
    """Numbers the calls in order and pairs results with them.

    A result belongs to the latest turn with calls: to the first call there with its old id that has no result yet,
    else to an unanswered call of an earlier turn with that id, else (a missing or unknown id) to the turn's first call
    without a result. What is left over repeats the newest call of its old id, or keeps the id that it came with.
    """
    pairing = _Pairing()
    calls: dict[int, tuple[str, ...]] = {}
    results: dict[int, str] = {}
    count = 0
    waiting: list[tuple[int, str | None]] = []
    for index, message in enumerate(messages):
        if message.role == "tool":
            waiting.append((index, message.tool_call_id))
        elif message.tool_calls:
            results.update(pairing.resolve(waiting))
            waiting = []
            names = [call.function.name for call in message.tool_calls]
            calls[index] = tuple(call_id(name, number) for number, name in enumerate(names, count))
            count += len(names)
            pairing.open_turn((call.id, new) for call, new in zip(message.tool_calls, calls[index], strict=True))
    results.update(pairing.resolve(waiting))
    return CallIds(calls, results, count)


class _Pairing:
    """Calls that wait for their results. Linear: a call enters and leaves each queue once."""

    def __init__(self) -> None:
        self._turn: dict[str | None, deque[str]] = {}
        self._order: list[str] = []
        self._earlier: dict[str | None, deque[str]] = {}
        self._newest: dict[str | None, str] = {}
        self._answered: set[str] = set()

    def open_turn(self, calls: Iterable[tuple[str | None, str]]) -> None:
        """Starts a turn with ``(old id, new id)`` of its calls; what is unanswered so far counts as earlier."""
        for old, queue in self._turn.items():
            self._earlier.setdefault(old, deque()).extend(new for new in queue if new not in self._answered)
        self._turn, self._order = {}, []
        for old, new in calls:
            self._order.append(new)
            self._newest[old] = new
            self._turn.setdefault(old, deque()).append(new)

    def resolve(self, results: Sequence[tuple[int, str | None]]) -> dict[int, str]:
        """New ids of all results (message index, old id) of the open turn."""
        paired: dict[int, str] = {}
        for queues in (self._turn, self._earlier):
            for index, old in results:
                queue = queues.get(old)
                if old is not None and index not in paired and queue:
                    paired[index] = queue.popleft()
        self._answered.update(paired.values())
        unanswered = deque(new for new in self._order if new not in self._answered)
        for index, old in results:
            if index not in paired:
                paired[index] = unanswered.popleft() if unanswered else self._newest.get(old, old or "")
        self._answered.update(paired.values())
        return paired
