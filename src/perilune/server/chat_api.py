"""``POST /v1/chat/completions``.

From bytes to an engine request and from its tokens back to a response, streamed or whole. Reading, rendering and
tokenising happen in a thread: a long prompt must not hold up other streams. The request ends, in the engine too, when
its client goes away, streaming or not. A stream starts with the engine's first news, so that everything wrong with a
request is still an HTTP status; after that an error is an event, and no ``[DONE]`` follows it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from starlette.types import Message, Receive, Scope, Send

from perilune.errors import EngineError, PeriluneError
from perilune.server.edge import TRACE_ID
from perilune.server.limits import ClientGone, read_json_bytes
from perilune.server.prepare import Prepared, prepare
from perilune.server.replies import ErrorBody, ErrorInfo, HttpError, error_info, json_response, unavailable
from perilune.server.state import Engine, ServerState
from perilune.server.wire import Choice, ChunkWriter, Completion, MessageBuilder, sse
from perilune.types import FinishReason, TokenOut

logger = logging.getLogger(__name__)

T = TypeVar("T")

WARNING_HEADER: Final = "x-perilune-warning"
_SHUTTING_DOWN: Final = "the server is shutting down, the answer was not finished"


@dataclass(frozen=True, slots=True)
class ChatEndpoint:
    """The endpoint, as an ASGI application."""

    state: ServerState

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self.state.admit(scope) as engine:
            body = await read_json_bytes(scope, receive, self.state.limits)
            stream = _EventStream(send, self.state.limits.send_timeout_s)
            try:
                await _unless_gone(self._answer(engine, body, scope, stream), receive)
            except asyncio.CancelledError:
                # The grace at the server's end is over. Nobody is left to cancel us for anything else.
                if not stream.started:
                    raise unavailable(_SHUTTING_DOWN, code="shutting_down") from None
                await stream.fail(ErrorInfo(message=_SHUTTING_DOWN, type="server_error", code="shutting_down"))

    async def _answer(self, engine: Engine, body: bytes, scope: Scope, stream: _EventStream) -> None:
        prepared = await _whole(asyncio.to_thread(prepare, body, engine, self.state, scope[TRACE_ID]))
        headers = {WARNING_HEADER: prepared.warning} if prepared.warning else {}
        async with aclosing(engine.generate(prepared.request)) as outs:
            news = _healthy(outs, engine)
            if prepared.stream:
                await _stream(prepared, news, stream, headers)
                return
            completion = await _complete(prepared, news)
        await json_response(completion, 200, headers)(scope, _no_receive, stream.send)


async def _complete(prepared: Prepared, news: AsyncIterator[TokenOut]) -> Completion:
    builder = MessageBuilder()
    async for out in news:
        builder.add(prepared.events(out))
    choice = Choice(message=builder.message(), finish_reason=prepared.finish_reason)
    return Completion(
        id=prepared.response_id,
        created=int(time.time()),
        model=prepared.model,
        choices=(choice,),
        usage=prepared.usage,
    )


async def _stream(
    prepared: Prepared, news: AsyncIterator[TokenOut], stream: _EventStream, headers: dict[str, str]
) -> None:
    writer = ChunkWriter(prepared.response_id, int(time.time()), prepared.model, prepared.include_usage)
    try:
        async for out in news:
            await stream.start(headers)
            for event in writer.deltas(prepared.events(out)):
                await stream.write(event)
    except PeriluneError as error:
        if not stream.started:
            raise
        logger.error("request %s failed in its stream: %s", prepared.request.id, error.message)
        await stream.fail(error_info(error)[1])
        return
    for event in writer.finish(prepared.finish_reason, prepared.usage):
        await stream.write(event)
    await stream.end()


async def _healthy(outs: AsyncIterator[TokenOut], engine: Engine) -> AsyncIterator[TokenOut]:
    """The same news; a request that ended without an answer raises.

    Raises:
        EngineError: the engine is gone. HttpError: only this request failed.
    """
    async for out in outs:
        if out.finish in (FinishReason.ERROR, FinishReason.ABORT):
            logger.error("request %s ended with %s: %s", out.request_id, out.finish, out.error)
            if engine.status().phase != "ready":
                raise EngineError(out.error or "the engine stopped")
            raise HttpError(500, "generation failed; see the server's log", code="generation_failed")
        yield out


async def _unless_gone(work: Coroutine[Any, Any, None], receive: Receive) -> None:
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


async def _whole(work: Coroutine[Any, Any, T]) -> T:
    """Waits for the end of a thread's work even when cancelled: until then it counts as in flight, so that clients
    who leave at once can't pile up work."""
    task = asyncio.create_task(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait((task,))
        raise


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _no_receive() -> Message:
    return {"type": "http.disconnect"}


class _EventStream:
    """A response of server-sent events.

    Args:
        timeout_s: for a client that does not read; past it the request counts as abandoned.
    """

    def __init__(self, send: Send, timeout_s: float) -> None:
        self._send, self._timeout_s = send, timeout_s
        self.started = False

    async def send(self, message: Message) -> None:
        """An ASGI message, in bounded time.

        Raises:
            ClientGone: the client did not read.
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._send(message)
        except TimeoutError:
            raise ClientGone from None

    async def start(self, headers: dict[str, str]) -> None:
        """Status and headers, once."""
        if self.started:
            return
        self.started = True
        raw = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", **headers}
        pairs = [(name.encode(), value.encode()) for name, value in raw.items()]
        await self.send({"type": "http.response.start", "status": 200, "headers": pairs})

    async def write(self, event: bytes) -> None:
        """One event, in one write."""
        await self.send({"type": "http.response.body", "body": event, "more_body": True})

    async def end(self) -> None:
        """Completes the response."""
        await self.send({"type": "http.response.body", "body": b"", "more_body": False})

    async def fail(self, info: ErrorInfo) -> None:
        """The error as the last event. Without ``[DONE]``, so that no client takes the answer for a whole one."""
        await self.write(sse(ErrorBody(info)))
        await self.end()
