"""Long requests are read, rendered and tokenised in processes of their own, which can be killed.

A thread would not do: reading megabytes of JSON and handling a million ids holds the interpreter, and with it every
stream, for longer than a step; and a thread that some text keeps busy cannot be stopped. Processes start when a long
request comes and none is free (their vocabulary takes a moment), serve one request at a time, are killed past the
deadline, and end when they have had nothing to do for a while: a large vocabulary takes memory. Short requests are
prepared in a thread, by the same functions.

A long body is never copied here: it goes into the pipe in slices once a process is free, and is forgotten when that
process has it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from perilune.errors import RequestError
from perilune.server.bodies import FREE_BYTES, Body
from perilune.server.replies import HttpError, unavailable
from perilune.server.tokenjobs import (
    Ask,
    Broken,
    Job,
    Refused,
    Reply,
    error_of,
)
from perilune.server.tokenprocess import NotTakenError, TokenProcess
from perilune.server.wishes import Facts
from perilune.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """``long_bytes``: bodies beyond it go to a process. ``size``: processes at most. ``deadline_s``: for one body, and
    for the start of its process if it needs one. ``wait_s``: for a process to be free. ``idle_s``: a process without
    work ends after it."""

    long_bytes: int = FREE_BYTES
    size: int = 2
    deadline_s: float = 20.0
    wait_s: float = 20.0
    idle_s: float = 60.0


class TokenPool:
    """Prepares bodies. Belongs to one event loop."""

    def __init__(self, limits: PoolLimits = PoolLimits()) -> None:
        self._limits = limits
        self._places = asyncio.Semaphore(limits.size)
        self._idle: dict[TokenProcess, asyncio.TimerHandle] = {}  # the last one was busy last
        self._all: set[TokenProcess] = set()

    async def prepare(self, job: Job[T], body: Body, facts: Facts, tokenizer: Tokenizer) -> T:
        """The job's result; closes ``body``. Once begun, runs to its end, or to the deadline, even when the caller is
        cancelled: until then it counts as in flight, so that clients who leave at once can't pile up work.

        Raises:
            RequestError: what is wrong with the body. HttpError: 503, every process is busy.
        """
        try:
            if len(body) <= self._limits.long_bytes:
                return await _whole(asyncio.to_thread(job.run, body.whole(), facts, tokenizer))
            return msgspec.json.decode(await self._far(job, body, facts, tokenizer), type=job.result)
        finally:
            body.close()

    async def encoded(self, job: Job[T], body: Body, facts: Facts, tokenizer: Tokenizer) -> bytes | memoryview:
        """The same as JSON, for which ``body`` counts until the caller closes it. Nobody here looks into it: to read a
        result of millions of ids would hold up every stream."""
        if len(body) <= self._limits.long_bytes:
            result: bytes | memoryview = await _whole(asyncio.to_thread(job.encoded, body.whole(), facts, tokenizer))
        else:
            result = await self._far(job, body, facts, tokenizer)
        body.becomes(len(result))
        return result

    async def close(self) -> None:
        """Ends every process."""
        for timer in self._idle.values():
            timer.cancel()
        self._idle.clear()
        processes = list(self._all)
        for process in processes:
            process.kill()
        await asyncio.gather(*(process.wait() for process in processes))
        self._all.clear()

    async def _far(self, job: Job[T], body: Body, facts: Facts, tokenizer: Tokenizer) -> memoryview:
        """The job's result, from a process."""
        async with self._place():
            return await _whole(self._asked(Ask(job.name, facts, len(body)), body, tokenizer))

    @asynccontextmanager
    async def _place(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._limits.wait_s):
                await self._places.acquire()
        except TimeoutError:
            raise unavailable("too many long requests are being read", code="overloaded") from None
        try:
            yield
        finally:
            self._places.release()

    async def _asked(self, ask: Ask, body: Body, tokenizer: Tokenizer) -> memoryview:
        try:
            async with asyncio.timeout(self._limits.deadline_s):
                reply, result = await self._answer(ask, body, tokenizer)
        except TimeoutError:
            raise RequestError(
                f"the request was not read and tokenised within {self._limits.deadline_s:g} s",
                code="prompt_timeout",
                hint="send less text",
            ) from None
        except (EOFError, OSError, msgspec.DecodeError) as error:
            logger.error("a process that tokenises failed: %s", repr(error))
            raise HttpError(500, "the request could not be read; see the server's log", code="internal_error") from None
        match reply:
            case Refused():
                raise error_of(reply)
            case Broken(kind):
                raise HttpError(500, f"the request could not be read: {kind}", code="internal_error")
        return result

    async def _answer(self, ask: Ask, body: Body, tokenizer: Tokenizer) -> tuple[Reply, memoryview]:
        while (process := self._wake(tokenizer)) is not None:
            try:
                return await self._answer_of(process, ask, body)
            except NotTakenError:
                continue  # it died while it was idle: no fault of this body, which is still whole
        return await self._answer_of(await self._start(tokenizer), ask, body)

    async def _answer_of(self, process: TokenProcess, ask: Ask, body: Body) -> tuple[Reply, memoryview]:
        try:
            answer = await process.answer(ask, body)
        except BaseException:
            process.kill()  # a question without its answer: the next one would get the wrong one
            raise
        self._idle[process] = asyncio.get_running_loop().call_later(self._limits.idle_s, self._retire, process)
        return answer

    def _wake(self, tokenizer: Tokenizer) -> TokenProcess | None:
        """One of those that are idle."""
        while self._idle:
            process, timer = self._idle.popitem()
            timer.cancel()
            if process.alive and process.tokenizer is tokenizer:
                return process
            process.kill()
        return None

    async def _start(self, tokenizer: Tokenizer) -> TokenProcess:
        process = await TokenProcess.start(tokenizer)
        self._all = {other for other in self._all if other.alive} | {process}
        return process

    def _retire(self, process: TokenProcess) -> None:
        del self._idle[process]
        process.kill()


async def _whole(work: Coroutine[Any, Any, T]) -> T:
    """Waits for the end of ``work`` even when cancelled."""
    task = asyncio.create_task(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait((task,))
        raise
