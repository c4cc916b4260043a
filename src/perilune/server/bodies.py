"""The bytes that the server holds of request bodies, and of answers made of them: bounded, counted, given back.

A body is held while it arrives, while it waits to be read, and until the process that reads it has answered; an answer
until its client has it, each piece for itself. Both have a budget of their own: who doesn't read answers must not keep
others from asking. Knows neither HTTP nor JSON. Belongs to one event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

from perilune import memory
from perilune.server.replies import HttpError, unavailable

FREE_BYTES: Final = 64 << 10
"""So much of every body and answer counts for nothing: large ones can't lock small ones out. The bound on requests in
flight bounds it too."""

_TRIM_AFTER_S: Final = 1.0
_TRIM_BYTES: Final = 1 << 20


class Budget:
    """What a server may hold of one kind.

    What counts is what has arrived, not what was announced: announcing costs a client nothing, and a few that announce
    much and send nothing would otherwise shut everybody else out. An announced length is compared with what is free
    before the first byte is read; several that were let in together may still not all fit, and then the one whose
    bytes no longer fit is refused in the middle. Nobody waits for room, so no two can wait for each other.

    Args:
        limit: bytes. A body that is alone must fit: no body may be larger.
        kind: what is held, for messages.

    Attributes:
        held: bytes that count now. refused: those that did not fit, since the start.
    """

    def __init__(self, limit: int, kind: str = "request bodies", trim: Callable[[], object] = memory.trim) -> None:
        self.held = 0
        self.refused = 0
        self._limit, self._kind = limit, kind
        self._trim = trim
        self._freed = 0
        self._trimming = False

    @contextmanager
    def body(self) -> Iterator[Body]:
        """An empty body, closed at the end of the block at the latest."""
        body = Body(self)
        try:
            yield body
        finally:
            body.close()

    @contextmanager
    def answer(self) -> Iterator[Answer]:
        """An empty answer, closed at the end of the block at the latest."""
        answer = Answer(self)
        try:
            yield answer
        finally:
            answer.close()

    def require(self, more: int) -> None:
        """There must be room for so many more bytes.

        Raises:
            HttpError: 503, there is none.
        """
        if more > 0 and self.held + more > self._limit:
            self.refused += 1
            raise self._full()

    def count(self, more: int) -> None:
        """So many more bytes are held, or fewer if it is negative."""
        self.held += more

    def freed(self, size: int) -> None:
        """So many bytes were let go, counted or not: enough of them are given back to the system.

        Once for all that go within a second, in a thread: the allocator may take some milliseconds.
        """
        self._freed += size
        if self._freed >= _TRIM_BYTES and not self._trimming:
            self._trimming = True
            asyncio.get_running_loop().call_later(_TRIM_AFTER_S, self._trim_now)

    def _full(self) -> HttpError:
        return unavailable(f"{self.held >> 20} MiB of {self._kind} are held, no more are taken", "overloaded")

    def _trim_now(self) -> None:
        self._trimming = False
        self._freed = 0
        with suppress(RuntimeError):  # the server ends just now
            asyncio.get_running_loop().run_in_executor(None, self._trim)


class Body:
    """One request's body. Closed, it is empty and counts for nothing."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._data = bytearray()
        self._counted = 0

    def __len__(self) -> int:
        return len(self._data)

    def expect(self, size: int) -> None:
        """It will have so many bytes.

        Raises:
            HttpError: 503, there is no room for them.
        """
        self._budget.require(_counting(size) - self._counted)

    def add(self, data: bytes) -> None:
        """The next bytes.

        Raises:
            HttpError: 503, there is no room for them.
        """
        size = len(self._data) + len(data)
        self.expect(size)
        self._count(size)
        self._data += data

    def whole(self) -> bytes:
        """A copy: for short ones."""
        return bytes(self._data)

    def view(self) -> memoryview:
        """The bytes themselves. They can't grow any more."""
        return memoryview(self._data)

    def empty(self) -> None:
        """Forgets the bytes. Counts as before: they are elsewhere now, and that is not over."""
        size = len(self._data)
        self._data = bytearray()
        if size:
            self._budget.freed(size)

    def close(self) -> None:
        """It is over."""
        self.empty()
        self._count(0)

    def _count(self, size: int) -> None:
        counted, self._counted = self._counted, _counting(size)
        self._budget.count(self._counted - counted)


class Answer:
    """A result on its way to a client. Each piece counts until it has left."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._pieces: deque[bytes] = deque()
        self._left = 0
        self.size = 0

    def expect(self, size: int) -> None:
        """It has so many bytes; they count from now on. One beside which nothing counts may be of any size.

        Raises:
            HttpError: 503, there is no room for them.
        """
        if self._budget.held:
            self._budget.require(_counting(size))
        self.size = size
        self._leave(size)

    def add(self, piece: bytes) -> None:
        """The next piece of what was expected."""
        self._pieces.append(piece)

    def pieces(self) -> Iterator[bytes]:
        """Each once; asked for the next one, the last one has left."""
        while self._pieces:
            piece = self._pieces.popleft()
            yield piece
            self._leave(self._left - len(piece))
            self._budget.freed(len(piece))

    def close(self) -> None:
        """It is over."""
        self._pieces.clear()
        self._budget.freed(self._left)
        self._leave(0)

    def _leave(self, left: int) -> None:
        self._budget.count(_counting(left) - _counting(self._left))
        self._left = left


def _counting(size: int) -> int:
    return max(size - FREE_BYTES, 0)
