"""What chat and plain completions have in common: from bytes to the engine and from its news to a response.

Preparing happens off the event loop (``tokenpool``): a long prompt must not hold up other streams. The request ends, in
the engine too, when its client goes away, streaming or not. What an answer looks like is the ``Answer``'s business.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final, Generic, Protocol, TypeVar

from starlette.types import Receive, Scope, Send

from perilune.errors import PeriluneError
from perilune.server.bodies import Body
from perilune.server.edge import SHUTTING_DOWN, TRACE_ID
from perilune.server.exchange import EventStream, unless_gone
from perilune.server.fanout import run
from perilune.server.limits import read_json_body
from perilune.server.metered import MeteredEngine
from perilune.server.metrics import Metrics, Watch
from perilune.server.prepare import Order, known_ids
from perilune.server.records import RECORD, Record
from perilune.server.replies import error_info, json_response, unavailable
from perilune.server.state import Engine, ServerState
from perilune.server.tokenjobs import Job
from perilune.server.tokenpool import TokenPool
from perilune.server.wishes import Facts
from perilune.text.tokenizer import Tokenizer
from perilune.types import TokenOut

logger = logging.getLogger(__name__)

WARNING_HEADER: Final = "x-perilune-warning"
SEED_HEADER: Final = "x-perilune-seed"


class Answer(Protocol):
    """All choices of one response, as they grow."""

    @property
    def order(self) -> Order: ...

    def events(self, index: int, out: TokenOut) -> Iterator[bytes]:
        """What news of choice ``index`` adds to a stream."""
        ...

    def end(self) -> Iterator[bytes]:
        """What follows when every choice has ended."""
        ...

    def add(self, index: int, out: TokenOut) -> None:
        """Takes news for a response that is told whole."""
        ...

    def whole(self) -> object:
        """That response, when every choice has ended."""
        ...


TaskT = TypeVar("TaskT")
MakeAnswer = Callable[[TaskT, str, Tokenizer, Watch], Answer]


@dataclass(frozen=True, slots=True)
class Services:
    """What endpoints share."""

    state: ServerState
    pool: TokenPool
    metrics: Metrics

    def facts(self, engine: Engine) -> Facts:
        """What checks must know."""
        state, limits = self.state, self.state.limits
        return Facts(
            names=state.names,
            known_ids=known_ids(engine.tokenizer),
            max_model_len=engine.max_model_len,
            temperature=state.defaults.temperature,
            top_p=state.defaults.top_p,
            max_choices=limits.max_choices,
            max_prompts=limits.max_prompts,
            max_sequences=limits.max_sequences,
            max_prompt_tokens=limits.max_queue_tokens,
            strict=state.strict,
        )


@dataclass(frozen=True, slots=True)
class GenerationEndpoint(Generic[TaskT]):
    """An endpoint that generates, as an ASGI application.

    Args:
        answer: makes the writer of an answer, from the prepared task and an id.
    """

    services: Services
    job: Job[TaskT]
    answer: MakeAnswer[TaskT]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = self.services.state
        with self.services.metrics.watch() as watch, state.admit(scope) as engine, state.bodies.body() as body:
            await read_json_body(scope, receive, state.limits, body)
            watch.received()
            stream = EventStream(send, state.limits.send_timeout_s)
            try:
                await unless_gone(self._answer(engine, body, scope, stream, watch), receive)
            except asyncio.CancelledError:  # at the server's end, see ``edge``
                if stream.started:
                    await self._fail(stream, scope, unavailable(SHUTTING_DOWN, code="shutting_down"))
                raise
            finally:
                stream.close()

    async def _answer(self, engine: MeteredEngine, body: Body, scope: Scope, stream: EventStream, watch: Watch) -> None:
        task = await self.services.pool.prepare(self.job, body, self.services.facts(engine), engine.tokenizer)
        answer = self.answer(task, scope[TRACE_ID], engine.tokenizer, watch)
        order = answer.order
        if (record := _record(scope)) is not None:
            record.model = order.model
        watch.begin(order)
        headers = {SEED_HEADER: str(order.seed)}
        if order.warning:
            headers[WARNING_HEADER] = order.warning
        requests = order.requests(scope[TRACE_ID])
        try:
            async with engine.begin(requests) as admitted, aclosing(run(engine, admitted)) as news:
                async for index, out in news:
                    watch.news(index, out)
                    if not order.stream:
                        answer.add(index, out)
                        continue
                    await stream.start(headers)
                    for event in answer.events(index, out):
                        await stream.write(event)
        except PeriluneError as error:
            if not stream.started:
                raise
            logger.error("a request failed in its stream: %s", error.message)
            watch.failed(error)
            await self._fail(stream, scope, error)
            return
        if not order.stream:
            await stream.respond(json_response(answer.whole(), 200, headers))
            return
        for event in answer.end():
            await stream.write(event)
        await stream.end()

    async def _fail(self, stream: EventStream, scope: Scope, error: PeriluneError) -> None:
        """An error after the first event: told as the last one, and in the logs, whose status says 200."""
        info = error_info(error)[1]
        if (record := _record(scope)) is not None:
            record.error = info.code or info.type
        await stream.fail(info)


def _record(scope: Scope) -> Record | None:
    found: Record | None = scope.get(RECORD)
    return found
