"""The bytes of request bodies that the server holds, all together: bounded, counted, given back.

A body is held while it arrives, while it waits for a process that reads it, and until that process has answered. Knows
neither HTTP nor JSON. Belongs to one event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

from perilune import memory
from perilune.server.replies import HttpError, unavailable

FREE_BYTES: Final = 64 << 10
"""So much of every body counts for nothing: large bodies can't lock small ones out. The bound on requests in flight
bounds it too."""

_TRIM_AFTER_S: Final = 1.0


class Bodies:
    """The budget of a server.

    What counts is what has arrived, not what was announced: announcing costs a client nothing, and a few that announce
    much and send nothing would otherwise shut everybody else out. An announced length is compared with what is free
    before the first byte is read; several that were let in together may still not all fit, and then the one whose
    bytes no longer fit is refused in the middle. Nobody waits for room, so no two can wait for each other.

    Args:
        limit: bytes. A body that is alone must fit: no body may be larger.

    Attributes:
        held: bytes that count now. refused: bodies that did not fit, since the start.
    """

    def __init__(self, limit: int, trim: Callable[[], object] = memory.trim) -> None:
        self.held = 0
        self.refused = 0
        self._limit = limit
        self._trim = trim
        self._trimming = False

    @contextmanager
    def body(self) -> Iterator[Body]:
        """An empty body, closed at the end of the block at the latest."""
        body = Body(self)
        try:
            yield body
        finally:
            body.close()

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
        if more < 0:
            self._trim_soon()

    def _full(self) -> HttpError:
        return unavailable(f"{self.held >> 20} MiB of request bodies are being read, no more are taken", "overloaded")

    def _trim_soon(self) -> None:
        """Once for all that go within a second, in a thread: the allocator may take some milliseconds."""
        if not self._trimming:
            self._trimming = True
            asyncio.get_running_loop().call_later(_TRIM_AFTER_S, self._trim_now)

    def _trim_now(self) -> None:
        self._trimming = False
        with suppress(RuntimeError):  # the server ends just now
            asyncio.get_running_loop().run_in_executor(None, self._trim)


class Body:
    """One request's body. Closed, it is empty and counts for nothing."""

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies
        self._data = bytearray()
        self._counted = 0

    def __len__(self) -> int:
        return len(self._data)

    def expect(self, size: int) -> None:
        """It will have so many bytes.

        Raises:
            HttpError: 503, there is no room for them.
        """
        self._bodies.require(_counting(size) - self._counted)

    def add(self, data: bytes) -> None:
        """The next bytes.

        Raises:
            HttpError: 503, there is no room for them.
        """
        size = len(self._data) + len(data)
        self.expect(size)
        self.becomes(size)
        self._data += data

    def becomes(self, size: int) -> None:
        """So many bytes count from now on, whether there is room for them or not: those of what was made of it."""
        counted, self._counted = self._counted, _counting(size)
        self._bodies.count(self._counted - counted)

    def whole(self) -> bytes:
        """A copy: for short ones."""
        return bytes(self._data)

    def view(self) -> memoryview:
        """The bytes themselves. They can't grow any more."""
        return memoryview(self._data)

    def empty(self) -> None:
        """Forgets the bytes. Counts as before: they are elsewhere now, and that is not over."""
        self._data = bytearray()

    def close(self) -> None:
        """It is over."""
        self.empty()
        self.becomes(0)


def _counting(size: int) -> int:
    return max(size - FREE_BYTES, 0)
