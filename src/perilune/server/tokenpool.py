"""Where requests are read, rendered and tokenised: the short in a thread, the others in processes that can be killed.

A thread would not do for all: to read JSON and to handle ids holds the interpreter, and with it every stream and every
new connection; and a thread that some text keeps busy cannot be stopped. So one thread has the bodies of a few
kilobytes, which take it milliseconds, and processes have the rest, one request each at a time. The smaller goes first,
and long ones leave a process free, so that a prompt of usual size waits for no book.

Processes start when they are needed (their vocabulary takes a moment), are killed past the deadline, and end when they
have had nothing to do for a while, all but one: a large vocabulary takes memory. One that has not taken a body in time,
or died before, is replaced unseen; what happens after that is that body's own affair, and it is not tried again.

A body for a process is never copied here: it goes into the pipe in slices once a process is free, and is forgotten when
that process has it. All by the same functions.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar

import msgspec

from perilune.errors import RequestError
from perilune.server.bodies import Answer, Body
from perilune.server.places import Places
from perilune.server.replies import HttpError, unavailable
from perilune.server.tokenjobs import Ask, Broken, Done, Job, Refused, error_of
from perilune.server.tokenprocess import NotTakenError, TokenProcess
from perilune.server.wishes import Facts
from perilune.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")

_STARTS: Final = 3
_ANY: Final = 1 << 62


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """What goes where, and how long it may take.

    Attributes:
        short_bytes: bodies up to it are for the thread. long_bytes: longer ones leave a process to the others.
        size: processes at most. max_waiting: bodies that wait for them. wait_s: longest wait.
        start_s: until a new process has its first body. take_s: until another one has its next.
        deadline_s: for a body from then on.
        idle_s: a process without work ends after it. kept: so many stay.
    """

    short_bytes: int = 4 << 10
    long_bytes: int = 256 << 10
    size: int = 2
    max_waiting: int = 128
    wait_s: float = 10.0
    start_s: float = 20.0
    take_s: float = 5.0
    deadline_s: float = 20.0
    idle_s: float = 60.0
    kept: int = 1


class _Sink(Protocol):
    """Where a result goes."""

    def expect(self, size: int) -> None:
        """Raises HttpError where there is no room."""
        ...

    def add(self, piece: bytes) -> None: ...


class _Whole:
    """A result that is looked into here."""

    def __init__(self) -> None:
        self.data = bytearray()

    def expect(self, size: int) -> None:
        """There is room."""

    def add(self, piece: bytes) -> None:
        self.data += piece


class TokenPool:
    """Prepares bodies. Belongs to one event loop."""

    def __init__(self, limits: PoolLimits = PoolLimits()) -> None:
        self._limits = limits
        self._thread = ThreadPoolExecutor(1, "perilune-prepare")
        self._turns = Places(1, long=_ANY, most=_ANY, wait_s=limits.wait_s)
        self._places = Places(limits.size, long=limits.long_bytes, most=limits.max_waiting, wait_s=limits.wait_s)
        self._idle: dict[TokenProcess, asyncio.TimerHandle] = {}  # the last one was busy last
        self._all: set[TokenProcess] = set()
        self._work: set[asyncio.Task[None]] = set()
        self._closed = False

    async def prepare(self, job: Job[T], body: Body, facts: Facts, tokenizer: Tokenizer) -> T:
        """The job's result; closes ``body``. Once begun, runs to its end, or to the deadline, even when the caller is
        cancelled: until then it counts as in flight, so that clients who leave at once can't pile up work.

        Raises:
            RequestError: what is wrong with the body. HttpError: 503, too many wait.
        """
        try:
            if len(body) <= self._limits.short_bytes:
                return await self._near(job.run, body, facts, tokenizer)
            whole = _Whole()
            await self._far(job, body, facts, tokenizer, whole)
            return msgspec.json.decode(whole.data, type=job.result)
        finally:
            body.close()

    async def pass_on(self, job: Job[T], body: Body, facts: Facts, tokenizer: Tokenizer, answer: Answer) -> None:
        """The same, as JSON in ``answer``. Nobody here looks into it: to read millions of ids would hold up every
        stream.

        Raises:
            RequestError: what is wrong with the body. HttpError: 503, too many wait, or no room for the answer.
        """
        try:
            if len(body) <= self._limits.short_bytes:
                result = await self._near(job.encoded, body, facts, tokenizer)
                answer.expect(len(result))
                answer.add(result)
            else:
                await self._far(job, body, facts, tokenizer, answer)
        finally:
            body.close()

    async def close(self) -> None:
        """Ends every process; starts none from now on."""
        self._closed = True
        self._thread.shutdown(wait=False, cancel_futures=True)
        for timer in self._idle.values():
            timer.cancel()
        self._idle.clear()
        for process in self._all:
            process.kill()
        await asyncio.gather(*self._work, return_exceptions=True)  # one may just be starting a process
        await asyncio.gather(*(process.wait() for process in self._all))
        self._all.clear()

    async def _near(self, run: Callable[[bytes, Facts, Tokenizer], R], body: Body, facts: Facts, tok: Tokenizer) -> R:
        """What ``run`` returns, from the thread."""
        async with self._turns.place(len(body)):
            self._check_open()
            loop = asyncio.get_running_loop()
            return await _whole(loop.run_in_executor(self._thread, run, body.whole(), facts, tok))

    async def _far(self, job: Job[Any], body: Body, facts: Facts, tokenizer: Tokenizer, sink: _Sink) -> None:
        """The job's result, from a process."""
        async with self._places.place(len(body)):
            work = asyncio.create_task(self._asked(Ask(job.name, facts, len(body)), body, tokenizer, sink))
            self._work.add(work)
            work.add_done_callback(self._work.discard)
            await _whole(work)

    async def _asked(self, ask: Ask, body: Body, tokenizer: Tokenizer, sink: _Sink) -> None:
        process = await self._taken(ask, body, tokenizer)
        try:
            async with asyncio.timeout(self._limits.deadline_s):
                refusal = await _answered(process, sink)
        except TimeoutError:
            process.kill()
            raise RequestError(
                f"the request was not tokenised within {self._limits.deadline_s:g} s: it is too much text, or this "
                "machine is too busy",
                code="prompt_timeout",
                hint="send less text, or the same once more if it is not much",
            ) from None
        except (EOFError, OSError, msgspec.DecodeError) as error:
            process.kill()
            self._check_open()
            logger.error("a process that tokenises failed: %s", repr(error))
            raise HttpError(500, "the request could not be read; see the server's log", code="internal_error") from None
        except BaseException:
            process.kill()  # a question without its answer: the next one would get the wrong one
            raise
        if self._closed:
            process.kill()
        else:
            self._idle[process] = asyncio.get_running_loop().call_later(self._limits.idle_s, self._retire, process)
        if refusal is not None:
            raise refusal

    async def _taken(self, ask: Ask, body: Body, tokenizer: Tokenizer) -> TokenProcess:
        """A process that has all of the body. Those that died, or stand still, are no fault of it."""
        starts = 0
        while starts < _STARTS:
            self._check_open()
            process = self._wake(tokenizer)
            if process is None:
                starts += 1
                process = await self._start(tokenizer)
            try:
                async with asyncio.timeout(self._limits.take_s if process.booted else self._limits.start_s):
                    await process.give(ask, body)
            except (NotTakenError, TimeoutError) as error:
                process.kill()
                logger.warning("a process that tokenises is replaced: %s", repr(error))
            except BaseException:
                process.kill()
                raise
            else:
                return process
        raise unavailable("no process could be started that reads the request", "overloaded")

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
        try:
            process = await TokenProcess.start(tokenizer)
        except OSError as error:
            logger.error("no process that tokenises could be started: %s", repr(error))
            raise unavailable("no process could be started that reads the request", "overloaded") from None
        if self._closed:
            process.kill()
            await process.wait()
            self._check_open()
        self._all = {other for other in self._all if other.alive} | {process}
        return process

    def _check_open(self) -> None:
        if self._closed:
            raise _closing()

    def _retire(self, process: TokenProcess) -> None:
        if len(self._idle) > self._limits.kept:
            del self._idle[process]
            process.kill()


async def _answered(process: TokenProcess, sink: _Sink) -> Exception | None:
    """Puts the result of what a process was given into ``sink``, or returns why there is none."""
    match await process.reply():
        case Refused() as refused:
            return error_of(refused)
        case Broken(kind):
            return HttpError(500, f"the request could not be read: {kind}", code="internal_error")
        case Done(size):
            refusal = None
            try:
                sink.expect(size)
            except HttpError as error:
                refusal = error
            async for piece in process.result(size):
                if refusal is None:
                    sink.add(piece)
            return refusal
    raise EOFError("out of step")


def _closing() -> HttpError:
    return unavailable("the server is shutting down", "shutting_down")


async def _whole(work: asyncio.Future[R]) -> R:
    """Waits for the end of ``work`` even when cancelled, and however often."""
    leaving: asyncio.CancelledError | None = None
    while not work.done():
        try:
            await asyncio.wait((work,))
        except asyncio.CancelledError as error:
            leaving = error
    if leaving is None:
        if work.cancelled():  # by the pool's end, before its turn in the thread
            raise _closing()
        return work.result()
    if not work.cancelled():
        work.exception()  # nobody is left to be told
    raise leaving
