"""Places for work of different sizes: the smaller goes first, the long never takes the last place, few wait.

Sizes count by powers of two: within one, who came first is first. So a flood of larger work never delays the smaller by
more than what is being done. Knows nothing of the work. Belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

from perilune.server.replies import HttpError, unavailable


class _Waiting(NamedTuple):
    """In the order in which they get places."""

    magnitude: int
    number: int
    turn: asyncio.Future[None]


class Places:
    """See the module.

    Args:
        size: how many there are.
        long: work of this size and more leaves one place free, unless there is only one.
        most: that wait at once. Who comes when so many wait is refused, or the last in their order instead.
        wait_s: longest wait.
    """

    def __init__(self, size: int, *, long: int, most: int, wait_s: float) -> None:
        self._free = size
        self._kept = 1 if size > 1 else 0
        self._long = long.bit_length()
        self._most, self._wait_s = most, wait_s
        self._waiting: list[_Waiting] = []
        self._numbers = itertools.count()

    @asynccontextmanager
    async def place(self, size: int) -> AsyncIterator[None]:
        """A place for the block, for work of so many bytes.

        Raises:
            HttpError: 503, none became free in time, or too many wait.
        """
        await self._wait(size)
        try:
            yield
        finally:
            self._free += 1
            self._grant()

    async def _wait(self, size: int) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        mine = _Waiting(size.bit_length(), next(self._numbers), turn)
        heapq.heappush(self._waiting, mine)
        self._grant()
        if len(self._waiting) > self._most:
            last = max(self._waiting)
            self._forget(last)
            if not last.turn.done():
                last.turn.set_exception(_full())
        try:
            async with asyncio.timeout(self._wait_s):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self._free += 1  # it was given a place just when it left
            else:
                self._forget(mine)
            self._grant()
            if isinstance(error, TimeoutError):
                raise _full() from None
            raise

    def _grant(self) -> None:
        while self._waiting and self._may_go(self._waiting[0]):
            turn = heapq.heappop(self._waiting).turn
            # Who leaves has a turn that is cancelled, and stands here until its task runs.
            if not turn.done():
                self._free -= 1
                turn.set_result(None)

    def _may_go(self, first: _Waiting) -> bool:
        return first.turn.done() or self._free > (self._kept if first.magnitude >= self._long else 0)

    def _forget(self, waiting: _Waiting) -> None:
        if waiting in self._waiting:
            self._waiting.remove(waiting)
            heapq.heapify(self._waiting)


def _full() -> HttpError:
    return unavailable("too many requests wait to be read and tokenised", "overloaded")
