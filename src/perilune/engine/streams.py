"""Streams of news, one for each request in flight: the part that every client of an engine shares.

Owns who listens to which request, and that nobody waits for ever: a request is either refused, or its stream ends with
a message that has ``finish``. Knows neither threads nor processes: ``send`` carries messages to the engine.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import dataclass, field

from perilune.engine.messages import Abort, Submit
from perilune.errors import EngineError, RequestError
from perilune.logs import fields
from perilune.types import FinishReason, Request, TokenOut

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Listener:
    """News of one request. Any thread may append to ``news``; the rest belongs to the thread of ``loop``.

    The order of the news is the order of the appends, whoever makes them: only waking takes a way of its own from
    other threads, and waking carries nothing.
    """

    loop: asyncio.AbstractEventLoop
    news: deque[TokenOut] = field(default_factory=deque)
    _waiter: asyncio.Future[None] | None = None

    async def next(self) -> TokenOut:
        while not self.news:
            self._waiter = self.loop.create_future()
            await self._waiter
        return self.news.popleft()

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Streams:
    """Listeners by request id. ``deliver`` and ``close`` may be called from any thread.

    Args:
        send: hands a message to the engine; must not block.
    """

    def __init__(self, send: Callable[[Submit | Abort], None]) -> None:
        self._send = send
        self._listeners: dict[str, _Listener] = {}
        self._lock = threading.Lock()  # a request is either registered before the streams close, or refused
        self._closed = ""

    async def generate(self, request: Request) -> AsyncGenerator[TokenOut, None]:
        """Sends ``request``; yields its news to the last. Closing the generator aborts it.

        Raises:
            RequestError: the id is in use. EngineError: the streams are closed.
        """
        listener = _Listener(asyncio.get_running_loop())
        with self._lock:
            if self._closed:
                raise EngineError(self._closed)
            if request.id in self._listeners:
                raise RequestError(f"request id {request.id!r} is in use", param="id")
            self._listeners[request.id] = listener
            self._send(Submit(request))
        done = False
        try:
            while not done:
                out = await listener.next()
                done = out.finish is not None
                yield out
        finally:
            with self._lock:
                self._listeners.pop(request.id, None)
                if not done and not self._closed:
                    self._send(Abort(request.id))

    def deliver(self, outs: Iterable[TokenOut]) -> None:
        """News from the engine; of requests that nobody listens to any more they are dropped."""
        listeners = self._listeners
        _tell((listener, out) for out in outs if (listener := listeners.get(out.request_id)) is not None)

    def close(self, reason: str) -> None:
        """Ends every stream with an error and refuses new ones until ``open``."""
        with self._lock:
            self._closed = reason
            listeners = list(self._listeners.items())
        _tell(
            (listener, TokenOut(request_id=request_id, finish=FinishReason.ERROR, error=reason))
            for request_id, listener in listeners
        )

    def open(self) -> None:
        """Takes requests again: a new engine is there. News of the old one's requests can't come any more."""
        with self._lock:
            self._closed = ""


def _tell(news: Iterable[tuple[_Listener, TokenOut]]) -> None:
    """Gives news to their listeners: at once on the loop's own thread, else with one call to each loop for all of it.

    A call from another thread wakes the loop through a pipe; one for each token would be most of what a token costs.
    """
    try:
        here = asyncio.get_running_loop()
    except RuntimeError:
        here = None
    elsewhere: dict[asyncio.AbstractEventLoop, list[_Listener]] = {}
    for listener, out in news:
        listener.news.append(out)
        if listener.loop is here:
            listener.wake()
        else:
            elsewhere.setdefault(listener.loop, []).append(listener)
    for loop, listeners in elsewhere.items():
        try:
            loop.call_soon_threadsafe(_wake_all, listeners)
        except RuntimeError:  # the loop is closed: nobody listens any more
            logger.debug("listeners had gone with their loop", extra=fields(listeners=len(listeners)))


def _wake_all(listeners: Iterable[_Listener]) -> None:
    for listener in listeners:
        listener.wake()
