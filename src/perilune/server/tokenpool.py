"""Long requests are read, rendered and tokenised in processes of their own, which can be killed.

A thread would not do: reading megabytes of JSON and handling a million ids holds the interpreter, and with it every
stream, for longer than a step; and a thread that some text keeps busy cannot be stopped. Processes start when the first
long request comes (their vocabulary takes a moment), serve one request at a time, and are killed past the deadline.
Short requests are prepared in a thread, by the same functions.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from perilune.errors import RequestError
from perilune.server.replies import HttpError, unavailable
from perilune.server.tokenjobs import (
    HEAD_BYTES,
    MAX_FRAME,
    Ask,
    Broken,
    Done,
    Job,
    Refused,
    Reply,
    boot_of,
    decode_reply,
    error_of,
    frame,
)
from perilune.server.wishes import Facts
from perilune.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """``long_bytes``: bodies beyond it go to a process. ``size``: processes at most. ``deadline_s``: for one body.
    ``wait_s``: for a process to be free."""

    long_bytes: int = 64 << 10
    size: int = 2
    deadline_s: float = 20.0
    wait_s: float = 20.0


class TokenPool:
    """Prepares bodies. Belongs to one event loop."""

    def __init__(self, limits: PoolLimits = PoolLimits()) -> None:
        self._limits = limits
        self._free: asyncio.LifoQueue[_Worker | None] = asyncio.LifoQueue()
        for _ in range(limits.size):
            self._free.put_nowait(None)
        self._all: set[_Worker] = set()

    async def prepare(self, job: Job[T], body: bytes, facts: Facts, tokenizer: Tokenizer) -> T:
        """The job's result. Runs to its end, or to the deadline, even when the caller is cancelled: until then it
        counts as in flight, so that clients who leave at once can't pile up work.

        Raises:
            RequestError: what is wrong with the body. HttpError: 503, every process is busy.
        """
        if len(body) <= self._limits.long_bytes:
            return await _whole(asyncio.to_thread(job.run, body, facts, tokenizer))
        return await _whole(self._far(job, body, facts, tokenizer))

    async def close(self) -> None:
        """Ends every process."""
        workers = list(self._all)
        for worker in workers:
            worker.kill()
        await asyncio.gather(*(worker.process.wait() for worker in workers))
        self._all.clear()

    async def _far(self, job: Job[T], body: bytes, facts: Facts, tokenizer: Tokenizer) -> T:
        ask = frame(Ask(job.name, facts, body))
        try:
            worker = await asyncio.wait_for(self._free.get(), self._limits.wait_s)
        except TimeoutError:
            raise unavailable("too many long requests are being read", code="overloaded") from None
        try:
            if worker is None or worker.tokenizer is not tokenizer:
                self._discard(worker)
                worker = None
                worker = await self._start(tokenizer)
            reply = await asyncio.wait_for(worker.ask(ask), self._limits.deadline_s)
        except TimeoutError:
            self._discard(worker)
            worker = None
            raise RequestError(
                f"the request was not read and tokenised within {self._limits.deadline_s:g} s",
                code="prompt_timeout",
                hint="send less text",
            ) from None
        except (asyncio.IncompleteReadError, ConnectionError, msgspec.DecodeError):
            self._discard(worker)
            worker = None
            raise HttpError(500, "the request could not be read; see the server's log", code="internal_error") from None
        except BaseException:
            self._discard(worker)  # a question without its answer: the next one would get the wrong one
            worker = None
            raise
        finally:
            self._free.put_nowait(worker)
        match reply:
            case Done(result):
                return msgspec.json.decode(result, type=job.result)
            case Refused():
                raise error_of(reply)
            case Broken(error):
                raise HttpError(500, f"the request could not be read: {error}", code="internal_error")

    async def _start(self, tokenizer: Tokenizer) -> _Worker:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "perilune.server.tokenworker", stdin=PIPE, stdout=PIPE
        )
        worker = _Worker(process, tokenizer)
        self._all = {other for other in self._all if other.process.returncode is None} | {worker}
        await worker.tell(await asyncio.to_thread(lambda: frame(boot_of(tokenizer))))
        return worker

    def _discard(self, worker: _Worker | None) -> None:
        if worker is not None:
            worker.kill()


@dataclass(frozen=True, slots=True, eq=False)
class _Worker:
    process: Process
    tokenizer: Tokenizer

    async def tell(self, data: bytes) -> None:
        stdin: Any = self.process.stdin
        stdin.write(data)
        await stdin.drain()

    async def ask(self, data: bytes) -> Reply:
        stdout: Any = self.process.stdout
        await self.tell(data)
        length = int.from_bytes(await stdout.readexactly(HEAD_BYTES), "little")
        if length > MAX_FRAME:
            raise ConnectionError
        return decode_reply(await stdout.readexactly(length))

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()


async def _whole(work: Coroutine[Any, Any, T]) -> T:
    """Waits for the end of ``work`` even when cancelled."""
    task = asyncio.create_task(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait((task,))
        raise
