"""The bytes of request bodies that the server holds, all together: bounded, counted, given back.

A body is held while it arrives, while it waits for a process that reads it, and until that process has answered. Knows
neither HTTP nor JSON. Belongs to one event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

from perilune.server import memory
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

    def change(self, counted: int, size: int) -> int:
        """What a body of ``size`` bytes counts, of which ``counted`` are counted already. Counts it.

        Raises:
            HttpError: 503, they don't fit.
        """
        wanted = self.check(counted, size)
        self.held += wanted - counted
        return wanted

    def check(self, counted: int, size: int) -> int:
        """The same; counts nothing."""
        wanted = max(size - FREE_BYTES, 0)
        if wanted > counted and self.held + wanted - counted > self._limit:
            self.refused += 1
            raise self._full()
        return wanted

    def give_back(self, counted: int) -> None:
        """A body that counted so much is gone."""
        if counted:
            self.held -= counted
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
        """So many bytes were announced.

        Raises:
            HttpError: 503, there is no room for them.
        """
        self._bodies.check(self._counted, size)

    def add(self, data: bytes) -> None:
        """The next bytes.

        Raises:
            HttpError: 503, there is no room for them.
        """
        self._counted = self._bodies.change(self._counted, len(self._data) + len(data))
        self._data += data

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
        counted, self._counted = self._counted, 0
        self._bodies.give_back(counted)
