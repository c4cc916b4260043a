"""A server whose engine is a script: each stream gets one token every ``PERIOD_S``, on a schedule that clients know.

The rest is real: sockets, HTTP, rendering, parsing, server-sent events, and the way of news from an engine process
(encoded, decoded, delivered to streams). Run as a process of its own by ``frontend``, which pins it to a core and
talks to it in lines: it says its URL; ``mark`` begins a window, ``tell`` answers with what the window cost.

The first token step of a stream is the time at which it was due, in microseconds of the monotonic clock, as digits;
step i is due i periods later. So a client knows when every event should have come, whenever its stream began.
"""

from __future__ import annotations

import asyncio
import cProfile
import json
import sys
import threading
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import uvloop
from benchmarks.load.facts import percentile, waited_for_a_core

from perilune import memory
from perilune.cli.start import bundled_model
from perilune.config import EngineConfig, ModelSpec, read_json
from perilune.engine.messages import Abort, News, Submit, decode_from_engine, encode
from perilune.engine.options import EngineStats, EngineStatus
from perilune.engine.streams import Streams
from perilune.server.runner import Loaded, Running, base_url, bind
from perilune.server.state import SamplingDefaults, ServerState
from perilune.text.tokenizer import Tokenizer
from perilune.types import Request, TokenOut

PERIOD_S: Final = 0.05
CONTEXT: Final = 1 << 17
_TEXT: Final = "One small step after the other, and every one of them on time. "
_LAG_EVERY_S: Final = 0.01


@dataclass(slots=True)
class _Stream:
    request_id: str
    sent: int = 0


class ScriptedEngine:
    """Has the interface that the server needs of an engine.

    Args:
        phases: 1: all streams step at once, as a batch of a real engine does. n: the streams are spread evenly over n
            moments of a period.
    """

    def __init__(self, model: Path, phases: int) -> None:
        self.spec = ModelSpec.from_config(read_json(model / "config.json"))
        self.tokenizer = Tokenizer.from_dir(model, self.spec.vocab_size)
        self.config = EngineConfig(max_model_len=CONTEXT, max_num_seqs=1 << 16)
        self.num_blocks = 0
        self._ids = self.tokenizer.encode(_TEXT)
        self._streams = Streams(self._take)
        self._phases: list[dict[str, _Stream]] = [{} for _ in range(phases)]
        self._opened = 0
        self._clock = asyncio.create_task(self._run())

    @property
    def max_model_len(self) -> int:
        return self.config.max_model_len

    def generate(self, request: Request) -> AsyncGenerator[TokenOut, None]:
        return self._streams.generate(request)

    def status(self) -> EngineStatus:
        return EngineStatus("ready", "", EngineStats(running=sum(map(len, self._phases))))

    async def close(self) -> None:
        self._clock.cancel()
        await asyncio.gather(self._clock, return_exceptions=True)

    def _take(self, message: Submit | Abort) -> None:
        match message:
            case Submit(request):
                self._phases[self._opened % len(self._phases)][request.id] = _Stream(request.id)
                self._opened += 1
            case Abort(request_id):
                for phase in self._phases:
                    phase.pop(request_id, None)

    async def _run(self) -> None:
        """Delivers what is due; a tick that comes late is not forgotten, and all that are late come at once."""
        gap, began, tick = PERIOD_S / len(self._phases), time.monotonic(), 0
        while True:
            due = began + tick * gap
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            outs = [self._step(stream, due) for stream in self._phases[tick % len(self._phases)].values()]
            tick += 1
            if outs:
                news = decode_from_engine(encode(News(outs, EngineStats(step=tick, running=len(outs)))))
                if isinstance(news, News):
                    self._streams.deliver(news.outs)

    def _step(self, stream: _Stream, due: float) -> TokenOut:
        ids = self._ids
        tokens = (ids[stream.sent % len(ids)],) if stream.sent else tuple(self.tokenizer.encode(str(round(due * 1e6))))
        stream.sent += 1
        return TokenOut(request_id=stream.request_id, tokens=tokens, completion_tokens=stream.sent)


@dataclass(slots=True)
class _Window:
    """What the process has cost since the last mark."""

    cpu_s: float = field(default_factory=time.process_time)
    waited_s: float = field(default_factory=waited_for_a_core)
    began: float = field(default_factory=time.monotonic)
    lags: list[float] = field(default_factory=list)

    def tell(self) -> dict[str, Any]:
        """CPU seconds, seconds that others had the core, and how late timers of the loop were, in ms."""
        return {
            "cpu_s": time.process_time() - self.cpu_s,
            "waited_s": waited_for_a_core() - self.waited_s,
            "seconds": time.monotonic() - self.began,
            "loop_lag_p50_ms": 1e3 * percentile(self.lags, 0.5),
            "loop_lag_p99_ms": 1e3 * percentile(self.lags, 0.99),
        }


class _Observer:
    """Answers on stdin, and feels the loop's lag meanwhile."""

    def __init__(self, running: Running, profile: str) -> None:
        self._running, self._profile = running, profile
        self._window = _Window()
        self._profiler = cProfile.Profile()

    async def feel(self) -> None:
        """Sleeps, and notes how much longer each sleep was than asked for."""
        while True:
            due = time.monotonic() + _LAG_EVERY_S
            await asyncio.sleep(_LAG_EVERY_S)
            self._window.lags.append(time.monotonic() - due)

    def listen(self, loop: asyncio.AbstractEventLoop) -> None:
        """Runs in a thread until stdin ends; then the server ends too."""
        for line in sys.stdin:
            loop.call_soon_threadsafe(self._do, line.strip())
        self._running.stop()

    def _do(self, word: str) -> None:
        if word == "mark":
            self._window = _Window()
            if self._profile:
                self._profiler.enable()
        elif word == "tell":
            if self._profile:
                self._profiler.disable()
                self._profiler.dump_stats(self._profile)
            print(json.dumps(self._window.tell()), flush=True)


async def _main(phases: int, profile: str) -> None:
    async def load() -> Loaded:
        return ScriptedEngine(bundled_model(), phases), SamplingDefaults()

    state = ServerState(("script",))
    sock = bind("127.0.0.1", 0)

    def ready(_: object) -> None:
        memory.settle()  # as `perilune serve` does
        print(base_url(sock), flush=True)

    running = Running(state, sock, load, ready, grace_s=0)
    observer = _Observer(running, profile)
    loop = asyncio.get_running_loop()
    threading.Thread(target=observer.listen, args=(loop,), daemon=True).start()
    feeling = asyncio.create_task(observer.feel())
    try:
        await running.run()
    finally:
        feeling.cancel()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_main(int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else ""))
