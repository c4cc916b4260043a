"""The engine process: ``python -m perilune.engine.child FOLDER`` with a ``Boot`` on stdin, started by ``remote`` only.

Two threads. The main one receives, steps and tells. The other sends heartbeats on a socket of its own, so that they
come during a long step and stop when the process is stopped. It also watches the parent: an engine whose server is
gone has no purpose and ends. Where cache events are published, a third one does that (``perilune.engine.publish``).
Exit codes are those of ``perilune.errors``.

torch is read only once the addresses for cache events are bound: what is wrong with them is told at once, and
subscribers of an engine that died have seconds to come back before the next one has anything to tell.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import zmq

from perilune import logs, memory
from perilune.engine.addresses import check_event_addresses
from perilune.engine.messages import (
    SOCKETS,
    Abort,
    Boot,
    Failed,
    FromEngine,
    Heartbeat,
    Loading,
    News,
    Ready,
    Shutdown,
    Submit,
    decode_to_engine,
    encode,
)
from perilune.engine.publish import EventPublisher
from perilune.errors import EngineError, PeriluneError
from perilune.kv.events import AllBlocksCleared

if TYPE_CHECKING:
    from perilune.engine.engine import Engine

HEARTBEAT_S: Final = 1.0
_LOADING_EVERY_S: Final = 0.1
_LAST_WORDS_MS: Final = 2000
_HEARD_PER_STEP: Final = 1024
_REST_MS: Final = 1000


class _Pulse(threading.Thread):
    """Heartbeats once there is an engine, and from the start the end of a process whose parent has died."""

    def __init__(self, boot: Boot) -> None:
        super().__init__(name="perilune-heartbeat", daemon=True)
        self.step_started = 0.0
        self.engine: Engine | None = None
        self._boot = boot

    def run(self) -> None:
        # A context of its own: that of the requests must be able to end while this thread goes on.
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        socket = context.socket(zmq.PUSH)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(self._boot.heartbeats)
        while os.getppid() == self._boot.parent:
            if self.engine is not None:
                started = self.step_started
                seconds = time.monotonic() - started if started else 0.0
                # A full queue means that nobody reads: the next beat tells as much.
                with contextlib.suppress(zmq.Again):
                    socket.send(encode(Heartbeat(self.engine.stats(), seconds)), zmq.DONTWAIT)
            time.sleep(HEARTBEAT_S)
        _remove_sockets(Path(self._boot.folder))
        os._exit(EngineError.exit_code)


class _Child:
    """Main loop around an engine."""

    def __init__(self, boot: Boot) -> None:
        self._boot = boot
        self._publisher: EventPublisher | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._socket.connect(boot.requests)

    def run(self) -> int:
        """Loads and serves until told to stop; the exit code."""
        pulse = _Pulse(self._boot)
        pulse.start()
        try:
            engine = self._load()
            memory.settle()
            pulse.engine = engine
            self._tell(Ready(engine.config, engine.scheduler.pool.num_blocks))
            while self._receive(engine):
                pulse.step_started = time.monotonic()
                outs = engine.step()
                pulse.step_started = 0.0
                if outs:
                    self._tell(News(outs, engine.stats()))
                if (events := engine.take_events()) and self._publisher is not None:
                    self._publisher.publish(events)
        except PeriluneError as error:
            self._tell(Failed(type(error).__name__, error.message, error.hint))
            return self._leave(error.exit_code)
        except Exception as error:
            logging.getLogger(__name__).exception("the engine failed")
            self._tell(Failed(EngineError.__name__, f"{type(error).__name__}: {error}"))
            return self._leave(EngineError.exit_code)
        return self._leave(0)

    def _load(self) -> Engine:
        # Whether others may reach the addresses was the server's to decide.
        options = check_event_addresses(self._boot.options, public=True)
        if options.kv_events:
            self._publisher = EventPublisher(options.kv_events, options.kv_events_replay, options.kv_events_topic)

        from perilune.engine.build import build_engine

        engine = build_engine(Path(self._boot.model), options, self._progress())
        if self._publisher is not None:
            # Number 0 of this life: whoever remembers what an engine before it held, forgets that.
            self._publisher.publish([AllBlocksCleared()])
        return engine

    def _receive(self, engine: Engine) -> bool:
        """Takes in what has arrived, a bounded number between two steps; sleeps while there is nothing to do. False:
        stop."""
        if not engine.has_work and not self._socket.poll(_REST_MS):
            memory.trim()  # what long prompts took; not between two requests that follow each other
            self._socket.poll()
        with contextlib.suppress(zmq.Again):
            for _ in range(_HEARD_PER_STEP):
                match decode_to_engine(self._socket.recv(zmq.DONTWAIT)):
                    case Submit(request):
                        engine.add(request)
                    case Abort(request_id):
                        engine.abort(request_id)
                    case Shutdown():
                        return False
        return True

    def _progress(self) -> Callable[[int, int], None]:
        last = 0.0

        def tell(done: int, total: int) -> None:
            nonlocal last
            now = time.monotonic()
            if done == total or now - last > _LOADING_EVERY_S:
                last = now
                self._tell(Loading(done, total))

        return tell

    def _tell(self, message: FromEngine) -> None:
        self._socket.send(encode(message))

    def _leave(self, code: int) -> int:
        """Waits until the last words are on their way: the process ends without tidying up."""
        if self._publisher is not None:
            self._publisher.close()
        self._context.destroy(linger=_LAST_WORDS_MS)
        return code


def main() -> int:
    """Entry point."""
    # Ctrl-C reaches the whole process group; the server decides when its engine ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        boot = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Boot)
    except msgspec.MsgspecError:
        # The server died before it could say what to load.
        _remove_sockets(Path(sys.argv[1]))
        return EngineError.exit_code
    logs.configure(boot.options.log_format, boot.options.log_level)
    return _Child(boot).run()


def _remove_sockets(folder: Path) -> None:
    """What a server that was killed could not clean up."""
    with contextlib.suppress(OSError):
        for name in SOCKETS:
            (folder / name).unlink(missing_ok=True)
        folder.rmdir()


if __name__ == "__main__":
    code = main()
    # Not sys.exit: threads of the arithmetic libraries may hold the interpreter up.
    sys.stderr.flush()
    os._exit(code)
