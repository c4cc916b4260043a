"""One request and its answer as ASGI sees them: a client that may leave, or not read what it asked for.

A stream starts with its first event, so that everything wrong with a request until then is still an HTTP status; after
that an error is an event, and no ``[DONE]`` follows it. Knows no engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Any, Final

from starlette.responses import Response
from starlette.types import Message, Receive, Send

from perilune.server.bodies import Answer
from perilune.server.limits import ClientGone
from perilune.server.replies import ErrorBody, ErrorInfo
from perilune.server.wire import sse

_CHECKS: Final = 4
"""Looks at a stalled stream within its timeout."""
_PIECE_BYTES: Final = 64 << 10


async def unless_gone(work: Coroutine[Any, Any, None], receive: Receive) -> None:
    """Runs ``work``; cancels it, and waits until it has ended, when the client goes away first.

    Raises:
        ClientGone: it did.
    """
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        task.result()
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream:
    """A response of server-sent events. Used by one task.

    Args:
        timeout_s: for a client that does not read; past it, and soon, the request counts as abandoned.
    """

    def __init__(self, send: Send, timeout_s: float) -> None:
        self._send, self._timeout_s = send, timeout_s
        self._loop = asyncio.get_running_loop()
        self._writer: asyncio.Task[Any] | None = None
        self._since = 0.0
        self._late = False
        self._check_later: asyncio.TimerHandle | None = None
        self.started = False

    async def send(self, message: Message) -> None:
        """An ASGI message, in bounded time.

        One timer looks after all events of a stream: a timer for each would cost more than the event itself.

        Raises:
            ClientGone: the client did not read.
        """
        if self._check_later is None:
            self._writer = asyncio.current_task()
            self._check_again()
        self._since = self._loop.time()
        try:
            await self._send(message)
        except asyncio.CancelledError:
            if not self._late or self._writer is None or self._writer.uncancel() > 0:
                raise  # by someone else
            raise ClientGone from None
        finally:
            self._since = 0.0

    def close(self) -> None:
        """Forgets the timer."""
        if self._check_later is not None:
            self._check_later.cancel()

    def _check(self) -> None:
        if self._since and self._loop.time() - self._since >= self._timeout_s and self._writer is not None:
            self._late = True
            self._writer.cancel()
        else:
            self._check_again()

    def _check_again(self) -> None:
        self._check_later = self._loop.call_later(self._timeout_s / _CHECKS, self._check)

    async def respond(self, response: Response) -> None:
        """A whole response, in pieces: a client that doesn't read it is noticed, and what it left is not kept for it.

        Raises:
            ClientGone: the client did not read.
        """
        await self._begin(response.status_code, response.raw_headers)
        await self._write_all(response.body)
        await self.end()

    async def pass_on(self, answer: Answer, timeout_s: float) -> None:
        """An answer of JSON, of which each piece is forgotten when it has left.

        Raises:
            ClientGone: the client did not read, or not all of it within ``timeout_s``.
        """
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % answer.size)]
        try:
            async with asyncio.timeout(timeout_s):
                await self._begin(200, headers)
                for piece in answer.pieces():
                    await self._write_all(piece)
                await self.end()
        except TimeoutError:
            raise ClientGone from None

    async def start(self, headers: Mapping[str, str]) -> None:
        """Status and headers, once."""
        if self.started:
            return
        self.started = True
        raw = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", **headers}
        pairs = [(name.encode(), value.encode()) for name, value in raw.items()]
        await self._begin(200, pairs)

    async def write(self, event: bytes) -> None:
        """One event, in one write."""
        await self.send({"type": "http.response.body", "body": event, "more_body": True})

    async def end(self) -> None:
        """Completes the response."""
        await self.send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _begin(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        await self.send({"type": "http.response.start", "status": status, "headers": headers})

    async def _write_all(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        for at in range(0, len(view), _PIECE_BYTES):
            await self.write(bytes(view[at : at + _PIECE_BYTES]))

    async def fail(self, info: ErrorInfo) -> None:
        """The error as the last event. Without ``[DONE]``, so that no client takes the answer for a whole one."""
        await self.write(sse(ErrorBody(info)))
        await self.end()
