"""An engine in a thread of this process, as asyncio code sees it: for tests and for programs that embed one.

``perilune.engine.remote`` is its twin with a process of its own, behind the same methods and the same messages.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path

from perilune.engine.admission import check_request
from perilune.engine.build import Progress, build_engine
from perilune.engine.engine import Engine
from perilune.engine.messages import Abort, Shutdown, Submit, ToEngine
from perilune.engine.options import EngineOptions, EngineStatus, Phase
from perilune.engine.streams import Streams
from perilune.types import Request, TokenOut

logger = logging.getLogger(__name__)


class AsyncEngine:
    """One engine thread, any number of concurrent streams."""

    def __init__(self, engine: Engine) -> None:
        self.tokenizer = engine.tokenizer
        self.spec = engine.worker.network.spec
        self.config = engine.config
        self.max_model_len = engine.config.max_model_len
        self._engine = engine
        self._inbox: queue.SimpleQueue[ToEngine] = queue.SimpleQueue()
        self._streams = Streams(self._inbox.put)
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
        return EngineStatus(self._phase, self._error, self._engine.stats())

    async def generate(self, request: Request) -> AsyncGenerator[TokenOut, None]:
        """News of one request until its last message. Closing the generator aborts the request within one step.

        Raises:
            RequestError: before the first item, if the request can't be admitted.
            EngineError: the engine has failed or was stopped.
        """
        check_request(request, self.max_model_len, self.spec.vocab_size)
        async with aclosing(self._streams.generate(request)) as news:
            async for out in news:
                yield out

    async def close(self) -> None:
        """Ends the engine after its current step; open streams end with an error."""
        self._inbox.put(Shutdown())
        await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        try:
            while self._receive():
                self._streams.deliver(self._engine.step())
            self._phase = "stopped"
            self._streams.close("the engine was stopped")
        except Exception as error:
            logger.exception("the engine failed")
            self._error = str(error) or type(error).__name__
            self._phase = "failed"
            self._streams.close("the engine failed")

    def _receive(self) -> bool:
        """Takes in what has arrived; sleeps while there is nothing to do. False: stop."""
        while True:
            try:
                message = self._inbox.get(block=not self._engine.has_work)
            except queue.Empty:
                return True
            match message:
                case Submit(request):
                    self._engine.add(request)
                case Abort(request_id):
                    self._engine.abort(request_id)
                case Shutdown():
                    return False
