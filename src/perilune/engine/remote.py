"""An engine in a process of its own, as a server sees it: streams, status, restart. Torch-free.

The process is started with an ``ipc://`` address in a folder that is made for it, that only this user can enter and
that ends with it: no name is ever reused, so a server that was killed leaves nothing that the next one could hit.

Health comes from the engine itself. It is ready while heartbeats arrive and no step exceeds its deadline: a stopped
process is noticed within ``HEARTBEAT_TIMEOUT_S`` and forgiven if it goes on before the deadline of a step is over, and
a long prefill is not called dead. When it dies, every open
stream ends with an error at once; with ``restarts`` a new one is started, with growing pauses.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import sys
import tempfile
import time
from asyncio.subprocess import PIPE, Process
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Final, cast

import zmq
import zmq.asyncio

from perilune import errors
from perilune.config import EngineConfig, ModelSpec, read_json
from perilune.engine.admission import check_request
from perilune.engine.messages import (
    Boot,
    Failed,
    FromEngine,
    Heartbeat,
    Loading,
    News,
    Ready,
    Shutdown,
    ToEngine,
    decode_from_engine,
    encode,
)
from perilune.engine.options import EngineOptions, EngineStats, EngineStatus, Phase
from perilune.engine.streams import Streams
from perilune.errors import EngineError, PeriluneError
from perilune.text.tokenizer import Tokenizer
from perilune.types import Request, TokenOut

logger = logging.getLogger(__name__)

HEARTBEAT_TIMEOUT_S: Final = 3.0
_STOP_S: Final = 10.0
_MAX_RESTARTS: Final = 5
_RESTART_WINDOW_S: Final = 600.0
_FIRST_PAUSE_S: Final = 0.5

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Supervision:
    """``restart``: start a new engine when one dies, at most 5 times in 10 minutes.

    ``step_deadline_s``: longest time that one step, or silence, may take; past it the engine counts as hung and is
    killed.
    """

    restart: bool = False
    step_deadline_s: float = 300.0


class RemoteEngine:
    """One engine process at a time, any number of concurrent streams. Lives on one asyncio loop.

    Made by ``start``.
    """

    def __init__(self, model: Path, options: EngineOptions, supervision: Supervision, progress: Progress) -> None:
        self.spec: ModelSpec
        self.tokenizer: Tokenizer
        self.config: EngineConfig
        self.num_blocks = 0
        self._model, self._options, self._supervision, self._progress = model, options, supervision, progress
        self._streams = Streams(self._send)
        self._phase: Phase = "loading"
        self._error = ""
        self._stats = EngineStats()
        self._last_beat = 0.0
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._closing = asyncio.Event()
        self._socket: zmq.asyncio.Socket | None = None
        self._life = asyncio.create_task(self._live())

    @classmethod
    async def start(
        cls,
        model: Path,
        options: EngineOptions | None = None,
        supervision: Supervision | None = None,
        progress: Progress = lambda done, total: None,
    ) -> RemoteEngine:
        """Starts a process and returns when it takes requests.

        Raises:
            PeriluneError: what ``build_engine`` raised there, or EngineError if the process died.
        """
        spec, tokenizer = await asyncio.to_thread(_read_model, model)
        engine = cls(model, options or EngineOptions(), supervision or Supervision(), progress)
        engine.spec, engine.tokenizer = spec, tokenizer
        try:
            await asyncio.shield(engine._ready)
        except BaseException:
            await engine.close()
            raise
        return engine

    @property
    def max_model_len(self) -> int:
        return self.config.max_model_len

    def status(self) -> EngineStatus:
        """From the last heartbeat. ``silent`` while heartbeats are overdue; ``loading`` before the first and again
        while a new engine is started; ``failed`` and ``stopped`` for good."""
        phase, error = self._phase, self._error
        silent = time.monotonic() - self._last_beat
        if phase == "ready" and silent > HEARTBEAT_TIMEOUT_S:
            phase, error = "silent", f"the engine process has been silent for {silent:.1f} s"
        return EngineStatus(phase, error, self._stats)

    async def generate(self, request: Request) -> AsyncGenerator[TokenOut, None]:
        """News of one request until its last message. Closing the generator aborts the request within one step.

        Raises:
            RequestError: before the first item, if the request can't be admitted.
            EngineError: there is no engine, or it was stopped.
        """
        check_request(request, self.max_model_len, self.spec.vocab_size)
        async with aclosing(self._streams.generate(request)) as news:
            async for out in news:
                yield out

    async def close(self) -> None:
        """Ends the process after its current step, by force if that takes too long; open streams end with an error."""
        self._closing.set()
        await asyncio.gather(self._life, return_exceptions=True)

    def _send(self, message: ToEngine) -> None:
        if self._socket is None:
            raise EngineError("the engine is not there")
        # The high-water mark is off, so this waits only for an engine that has just died: its streams end by that.
        sent = cast("asyncio.Future[object]", self._socket.send(encode(message), zmq.DONTWAIT))
        sent.add_done_callback(asyncio.Future.exception)

    # ── the life of engines ─────────────────────────────────────────────────────────────────────────────────────────

    async def _live(self) -> None:
        """One engine after the other, until closed or until one dies and none may follow."""
        deaths: deque[float] = deque()
        while True:
            reason = await self._one_life()
            if self._closing.is_set():
                self._end("stopped", "the engine was stopped")
                return
            now = time.monotonic()
            deaths.append(now)
            while deaths[0] < now - _RESTART_WINDOW_S:
                deaths.popleft()
            first_load = not self._ready.done()
            if first_load or not self._supervision.restart or len(deaths) > _MAX_RESTARTS:
                self._end("failed", reason.message)
                if first_load:
                    self._ready.set_exception(reason)
                return
            self._phase = "loading"
            self._streams.close("the engine failed, a new one is being started")
            pause = _FIRST_PAUSE_S * 2 ** (len(deaths) - 1)
            logger.error("%s; starting a new one in %.1f s", reason.message, pause)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), pause)

    def _end(self, phase: Phase, error: str) -> None:
        self._phase, self._error = phase, error
        self._streams.close("the engine was stopped" if phase == "stopped" else "the engine failed")

    async def _one_life(self) -> PeriluneError:
        """Starts a process, serves it, and cleans up after it; why it ended."""
        folder = ""
        context = zmq.asyncio.Context()
        requests, heartbeats = context.socket(zmq.PAIR), context.socket(zmq.PULL)
        try:
            folder = tempfile.mkdtemp(prefix="perilune-")
            boot = Boot(model=str(self._model), options=self._options, parent=os.getpid(), folder=folder)
            requests.set_hwm(0)
            requests.bind(boot.requests)
            heartbeats.bind(boot.heartbeats)
            self._socket = requests
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "perilune.engine.child", folder, stdin=PIPE, stdout=sys.stderr.fileno()
            )
            return await self._serve(process, boot, requests, heartbeats)
        except (OSError, zmq.ZMQError) as error:
            return EngineError(
                f"the engine process could not be started: {error}",
                hint="it needs a folder for sockets; TMPDIR may name another, with a shorter path",
            )
        except Exception as error:
            logger.exception("the engine's supervision failed")
            return EngineError(f"the engine's supervision failed: {type(error).__name__}: {error}")
        finally:
            self._socket = None
            context.destroy(linger=0)
            if folder:
                shutil.rmtree(folder, ignore_errors=True)

    async def _serve(
        self, process: Process, boot: Boot, requests: zmq.asyncio.Socket, heartbeats: zmq.asyncio.Socket
    ) -> PeriluneError:
        if process.stdin is None:
            raise EngineError("the engine process has no standard input")
        process.stdin.write(encode(boot))
        process.stdin.close()
        listening = asyncio.create_task(self._listen(requests))
        ends = {
            asyncio.create_task(process.wait()),
            listening,
            asyncio.create_task(self._feel(heartbeats)),
            asyncio.create_task(self._closing.wait()),
        }
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if self._closing.is_set() and self._phase == "ready":
                self._send(Shutdown())
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(process.wait(), _STOP_S)
            ended = process.returncode is not None and process.returncode >= 0
            if ended and not listening.done() and not self._closing.is_set():
                # It was not killed: its last words may still be on their way.
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(asyncio.shield(listening), 1.0)
        finally:
            if process.returncode is None:
                process.kill()
            for task in ends:
                task.cancel()
            results = await asyncio.gather(*ends, return_exceptions=True)
            await process.wait()
        said = next((result for result in results if isinstance(result, PeriluneError)), None)
        return said or EngineError(f"the engine process ended with exit code {process.returncode}")

    async def _listen(self, socket: zmq.asyncio.Socket) -> PeriluneError:
        """Takes what the engine tells, until it tells that it failed."""
        while True:
            message: FromEngine = decode_from_engine(await socket.recv())
            match message:
                case News(outs, stats):
                    self._stats = stats
                    self._streams.deliver(outs)
                case Loading(done, total):
                    self._progress(done, total)
                case Ready(config, num_blocks):
                    self.config, self.num_blocks = config, num_blocks
                    self._stats = EngineStats(total_blocks=num_blocks - 1, free_blocks=num_blocks - 1)
                    self._last_beat = time.monotonic()
                    self._phase, self._error = "ready", ""
                    self._streams.open()
                    if not self._ready.done():
                        self._ready.set_result(None)
                case Failed(kind, text, hint):
                    return _error(kind, text, hint)

    async def _feel(self, socket: zmq.asyncio.Socket) -> PeriluneError:
        """Takes heartbeats, until one tells of a step that hangs, or none comes for as long. The first one may take
        its time: a model is loaded before it."""
        patience_s: float | None = None
        while True:
            try:
                beat = decode_from_engine(await asyncio.wait_for(socket.recv(), patience_s))
            except TimeoutError:
                return EngineError(f"the engine process has been silent for {patience_s:.0f} s")
            patience_s = max(self._supervision.step_deadline_s, HEARTBEAT_TIMEOUT_S)
            if isinstance(beat, Heartbeat):
                self._last_beat = time.monotonic()
                self._stats = beat.stats
                if beat.step_seconds > self._supervision.step_deadline_s:
                    return EngineError(
                        f"step {beat.stats.step} has been running for {beat.step_seconds:.0f} s, "
                        f"its deadline is {self._supervision.step_deadline_s:.0f} s"
                    )


def _read_model(model: Path) -> tuple[ModelSpec, Tokenizer]:
    config = model / "config.json"
    spec = ModelSpec.from_config(read_json(config), str(config))
    tokenizer = Tokenizer.from_dir(model, spec.vocab_size)
    tokenizer.prepare()
    return spec, tokenizer


def _error(kind: str, message: str, hint: str) -> PeriluneError:
    """The error that the engine process told, as the class that it was there."""
    found = getattr(errors, kind, None)
    if isinstance(found, type) and issubclass(found, PeriluneError):
        return found(message, hint=hint)
    return EngineError(message, hint=hint)
