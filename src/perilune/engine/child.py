"""The engine process: ``python -m perilune.engine.child FOLDER`` with a ``Boot`` on stdin, started by ``remote`` only.

Two threads. The main one receives, steps and tells. The other sends heartbeats on a socket of its own, so that they
come during a long step and stop when the process is stopped. It also watches the parent: an engine whose server is
gone has no purpose and ends. Exit codes are those of ``perilune.errors``.
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
from typing import Final

import msgspec
import zmq

from perilune import logs
from perilune.engine.build import build_engine
from perilune.engine.engine import Engine
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

HEARTBEAT_S: Final = 1.0
_LOADING_EVERY_S: Final = 0.1
_LAST_WORDS_MS: Final = 2000


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
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._socket.connect(boot.requests)

    def run(self) -> int:
        """Loads and serves until told to stop; the exit code."""
        pulse = _Pulse(self._boot)
        pulse.start()
        try:
            publisher = self._publisher()
            engine = build_engine(Path(self._boot.model), self._boot.options, self._progress())
            pulse.engine = engine
            self._tell(Ready(engine.config, engine.scheduler.pool.num_blocks))
            while self._receive(engine, publisher):
                pulse.step_started = time.monotonic()
                outs = engine.step()
                pulse.step_started = 0.0
                if outs:
                    self._tell(News(outs, engine.stats()))
                if (events := engine.take_events()) and publisher is not None:
                    publisher.publish(events)
        except PeriluneError as error:
            self._tell(Failed(type(error).__name__, error.message, error.hint))
            return self._leave(error.exit_code)
        except Exception as error:
            logging.getLogger(__name__).exception("the engine failed")
            self._tell(Failed(EngineError.__name__, f"{type(error).__name__}: {error}"))
            return self._leave(EngineError.exit_code)
        return self._leave(0)

    def _publisher(self) -> EventPublisher | None:
        options = self._boot.options
        if not options.kv_events:
            return None
        return EventPublisher(self._context, options.kv_events, options.kv_events_replay, options.kv_events_topic)

    def _receive(self, engine: Engine, publisher: EventPublisher | None) -> bool:
        """Takes in what has arrived; sleeps while there is nothing to do. False: stop."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        if publisher is not None and publisher.replays is not None:
            poller.register(publisher.replays, zmq.POLLIN)
        while ready := dict(poller.poll(0 if engine.has_work else None)):
            if publisher is not None and publisher.replays in ready:
                publisher.answer_replays()
            if self._socket not in ready:
                continue
            match decode_to_engine(self._socket.recv()):
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
