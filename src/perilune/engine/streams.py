"""Streams of news, one for each request in flight: the part that every client of an engine shares.

Owns who listens to which request, and that nobody waits for ever: a request is either refused, or its stream ends with
a message that has ``finish``. Knows neither threads nor processes: ``send`` carries messages to the engine.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import dataclass

from perilune.engine.messages import Abort, Submit
from perilune.errors import EngineError, RequestError
from perilune.types import FinishReason, Request, TokenOut

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Listener:
    loop: asyncio.AbstractEventLoop
    news: asyncio.Queue[TokenOut]

    def put(self, out: TokenOut) -> None:
        try:
            self.loop.call_soon_threadsafe(self.news.put_nowait, out)
        except RuntimeError:  # the loop is closed: nobody listens any more
            logger.debug("news of %s had no listener", out.request_id)


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
        listener = _Listener(asyncio.get_running_loop(), asyncio.Queue())
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
                out = await listener.news.get()
                done = out.finish is not None
                yield out
        finally:
            with self._lock:
                self._listeners.pop(request.id, None)
                if not done and not self._closed:
                    self._send(Abort(request.id))

    def deliver(self, outs: Iterable[TokenOut]) -> None:
        """News from the engine; of requests that nobody listens to any more they are dropped."""
        for out in outs:
            listener = self._listeners.get(out.request_id)
            if listener is not None:
                listener.put(out)

    def close(self, reason: str) -> None:
        """Ends every stream with an error and refuses new ones until ``open``."""
        with self._lock:
            self._closed = reason
            listeners = list(self._listeners.items())
        for request_id, listener in listeners:
            listener.put(TokenOut(request_id=request_id, finish=FinishReason.ERROR, error=reason))

    def open(self) -> None:
        """Takes requests again: a new engine is there. News of the old one's requests can't come any more."""
        with self._lock:
            self._closed = ""
