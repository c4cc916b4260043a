"""The engine as asyncio code sees it: streams of ``TokenOut``, abort by closing the stream.

The engine runs in a thread of this process. Everything that crosses is a message of ``perilune.types``, so that the
thread can become a process without a change on this side. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from perilune.engine.build import EngineOptions, Progress, build_engine
from perilune.engine.engine import Engine, check_request
from perilune.errors import EngineError, RequestError
from perilune.types import FinishReason, Request, TokenOut

logger = logging.getLogger(__name__)

Phase = Literal["ready", "failed", "stopped"]


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """What the engine is doing. ``error`` says why when ``phase`` is ``failed``."""

    phase: Phase
    running: int
    waiting: int
    error: str = ""


@dataclass(frozen=True, slots=True)
class _Add:
    request: Request


@dataclass(frozen=True, slots=True)
class _Abort:
    request_id: str


class _Stop:
    """Tells the thread to end."""


@dataclass(frozen=True, slots=True)
class _Stream:
    """Where a request's news go."""

    loop: asyncio.AbstractEventLoop
    news: asyncio.Queue[TokenOut]

    def put(self, out: TokenOut) -> None:
        try:
            self.loop.call_soon_threadsafe(self.news.put_nowait, out)
        except RuntimeError:  # the loop is closed: nobody listens any more
            logger.debug("news of %s had no listener", out.request_id)


class AsyncEngine:
    """One engine thread, any number of concurrent streams."""

    def __init__(self, engine: Engine) -> None:
        self.tokenizer = engine.tokenizer
        self.spec = engine.worker.network.spec
        self.config = engine.config
        self.max_model_len = engine.config.max_model_len
        self._engine = engine
        self._inbox: queue.SimpleQueue[_Add | _Abort | _Stop] = queue.SimpleQueue()
        self._streams: dict[str, _Stream] = {}
        self._accepting = threading.Lock()  # a request is either refused, or in the inbox before the phase changes
        self._phase: Phase = "ready"
        self._error = ""
        self._thread = threading.Thread(target=self._run, name="perilune-engine", daemon=True)
        self._thread.start()

    @classmethod
    def start(cls, model: Path, options: EngineOptions | None = None, progress: Progress | None = None) -> AsyncEngine:
        """Loads ``model`` (blocking) and starts the engine. Raises what ``build_engine`` raises."""
        return cls(build_engine(model, options or EngineOptions(), progress))

    def status(self) -> EngineStatus:
        """A snapshot, from any thread."""
        scheduler = self._engine.scheduler
        return EngineStatus(self._phase, scheduler.num_running, scheduler.num_waiting, self._error)

    async def generate(self, request: Request) -> AsyncGenerator[TokenOut, None]:
        """News of one request until its last message. Closing the generator aborts the request within one step.

        Raises:
            RequestError: before the first item, if the request can't be admitted.
            EngineError: the engine has failed or was stopped.
        """
        check_request(request, self.max_model_len, self.spec.vocab_size)
        stream = _Stream(asyncio.get_running_loop(), asyncio.Queue())
        self._submit(request, stream)
        done = False
        try:
            while not done:
                out = await stream.news.get()
                done = out.finish is not None
                yield out
        finally:
            self._streams.pop(request.id, None)
            if not done:
                self._inbox.put(_Abort(request.id))

    def _submit(self, request: Request, stream: _Stream) -> None:
        with self._accepting:
            if self._phase != "ready":
                raise EngineError(f"the engine is {self._phase}: {self._error or 'it takes no requests'}")
            if request.id in self._streams:
                raise RequestError(f"request id {request.id!r} is in use", param="id")
            self._streams[request.id] = stream
            self._inbox.put(_Add(request))

    async def close(self) -> None:
        """Ends the engine after its current step; open streams end with an error."""
        self._inbox.put(_Stop())
        await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        try:
            while self._receive():
                self._deliver(self._engine.step())
            self._end("stopped", "the engine was stopped")
        except Exception as error:
            logger.exception("the engine failed")
            self._error = str(error) or type(error).__name__
            self._end("failed", "the engine failed")

    def _receive(self) -> bool:
        """Takes in what has arrived; sleeps while there is nothing to do. False: stop."""
        while True:
            try:
                message = self._inbox.get(block=not self._engine.has_work)
            except queue.Empty:
                return True
            if isinstance(message, _Stop):
                return False
            if isinstance(message, _Abort):
                self._engine.abort(message.request_id)
            else:
                self._engine.add(message.request)

    def _deliver(self, news: list[TokenOut]) -> None:
        for out in news:
            stream = self._streams.get(out.request_id)
            if stream is not None:
                stream.put(out)

    def _end(self, phase: Phase, reason: str) -> None:
        """No request is left waiting: neither those in the engine nor those still in the inbox."""
        with self._accepting:
            self._phase = phase
        self._deliver(self._engine.end_all(reason))
        while True:
            try:
                message = self._inbox.get_nowait()
            except queue.Empty:
                return
            if isinstance(message, _Add):
                self._deliver([TokenOut(request_id=message.request.id, finish=FinishReason.ERROR, error=reason)])
