"""Stop strings over a stream of ids.

Stop strings are matched on the UTF-8 bytes of ordinary tokens, so a match may begin and end inside a token; a special
token ends every match begun before it. An id is released as soon as none of its bytes can be the start of a match.
The stop string that ends first wins; of several that end at the same byte, the longest.

The search is an Aho-Corasick automaton over bytes (Aho and Corasick, CACM 18(6), 1975): linear in the output, whatever
the number and shape of the stop strings. Owns no sampling and no finish reason: the engine decides what a match means.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from perilune.errors import RequestError
from perilune.text.tokenizer import Tokenizer, check_text


@dataclass(frozen=True, slots=True)
class StopStep:
    """What a feed made certain.

    Attributes:
        tokens: ids that are output now and for good.
        tail: bytes that follow them and precede the match, when it begins inside a token.
        matched: the stop string that was found; nothing comes after it.
    """

    tokens: tuple[int, ...] = ()
    tail: bytes = b""
    matched: str | None = None


class _Automaton:
    """States are prefixes of the stop strings; state 0 is the empty one.

    ``depth[s]``: bytes of the prefix. ``stop[s]``: the longest stop string that ends in ``s``, or None.
    """

    __slots__ = ("_fail", "_next", "depth", "stop")

    def __init__(self, stops: Sequence[str]) -> None:
        self._next: list[dict[int, int]] = [{}]
        self.depth = [0]
        self.stop: list[str | None] = [None]
        for text in stops:
            self._insert(text)
        self._fail = [0] * len(self._next)
        # Breadth first: a state's fallback is shorter than the state, so it is complete when it is needed.
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            if self.stop[state] is None:
                self.stop[state] = self.stop[self._fail[state]]
            for byte, child in self._next[state].items():
                self._fail[child] = self.step(self._fail[state], byte)
                queue.append(child)

    def _insert(self, text: str) -> None:
        state = 0
        for byte in text.encode():
            child = self._next[state].get(byte)
            if child is None:
                child = len(self._next)
                self._next[state][byte] = child
                self._next.append({})
                self.depth.append(self.depth[state] + 1)
                self.stop.append(None)
            state = child
        self.stop[state] = text

    def step(self, state: int, byte: int) -> int:
        """The longest suffix of the text so far that begins a stop string. Amortised constant time."""
        while state and byte not in self._next[state]:
            state = self._fail[state]
        return self._next[state].get(byte, 0)


class StopMatcher:
    """Holds back what may belong to a stop string. One request's state; feed it every id, stop ids excepted.

    Args:
        stops: the stop strings; none means that every id passes at once.
        tokenizer: gives the bytes of ids.

    Raises:
        RequestError: a stop string is empty or has no UTF-8.
    """

    __slots__ = ("_automaton", "_held", "_held_bytes", "_matched", "_state", "_tokenizer")

    def __init__(self, stops: Sequence[str], tokenizer: Tokenizer) -> None:
        for index, text in enumerate(stops):
            if not text:
                raise RequestError(f"stop string {index} is empty, at least one character is needed", param="stop")
            check_text(text, param="stop")
        self._automaton = _Automaton(stops) if stops else None
        self._tokenizer = tokenizer
        self._held: deque[tuple[int, bytes]] = deque()
        self._held_bytes = 0
        self._state = 0
        self._matched = False

    def feed(self, ids: Iterable[int]) -> StopStep:
        """Takes generated ids in order. After a match everything is ignored."""
        if self._matched:
            return StopStep()
        if self._automaton is None:
            return StopStep(tuple(ids))
        certain: list[int] = []
        for token in ids:
            data = self._tokenizer.token_bytes(token)
            if not data:
                certain += self.flush()
                certain.append(token)
                continue
            self._held.append((token, data))
            self._held_bytes += len(data)
            stop, unread = self._search(self._automaton, data)
            # Kept: the match, or the longest suffix that may still become one. What ends before it is certain.
            kept = self._automaton.depth[self._state] if stop is None else unread + len(stop.encode())
            while self._held and self._held_bytes - len(self._held[0][1]) >= kept:
                token, data = self._held.popleft()
                self._held_bytes -= len(data)
                certain.append(token)
            if stop is not None:
                self._matched = True
                return StopStep(tuple(certain), self._held[0][1][: self._held_bytes - kept], stop)
        return StopStep(tuple(certain))

    def flush(self) -> tuple[int, ...]:
        """The ids that are still held: the answer ended, so they begin no stop string."""
        ids = () if self._matched else tuple(token for token, _ in self._held)
        self._held.clear()
        self._held_bytes = 0
        self._state = 0
        return ids

    def _search(self, automaton: _Automaton, data: bytes) -> tuple[str | None, int]:
        """Walks ``data``; the stop string that ends in it, and how many bytes of ``data`` follow that end."""
        for index, byte in enumerate(data, 1):
            self._state = automaton.step(self._state, byte)
            stop = automaton.stop[self._state]
            if stop is not None:
                return stop, len(data) - index
        return None, 0
