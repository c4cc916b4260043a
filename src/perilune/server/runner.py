"""A server's life: bind, listen, load, answer, drain, end.

Listens before the model is loaded, so that ``/health`` and ``/ready`` tell how far it is. ``serve`` runs until a signal
or until the engine fails; ``background`` runs the same in a thread, for programs that want a server of their own.
At the end the listener closes at once, open answers have ``grace_s`` to finish, and what is left then is told so in its
stream. Knows uvicorn; knows nothing of how models are loaded.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import os
import signal
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Final

import uvicorn
import uvloop

from perilune.errors import EngineError, PortError, UsageError
from perilune.server.app import build_app
from perilune.server.connection import Connection
from perilune.server.edge import LOOPBACK_NAMES
from perilune.server.state import Engine, SamplingDefaults, ServerState

logger = logging.getLogger(__name__)

Loaded = tuple[Engine, SamplingDefaults]
Load = Callable[[], Awaitable[Loaded]]

_WATCH_S: Final = 0.2
_LAST_WORDS_S: Final = 1.0


def bind(host: str, port: int, *, public: bool = False) -> socket.socket:
    """A listening socket; port 0 takes a free one.

    Raises:
        UsageError: others could reach the address, and ``public`` does not say that this is meant.
        PortError: no such address, or it is taken, or not ours to take.
    """
    where = f"{host}:{port}"
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, proto)
    except OSError as error:
        raise PortError(f"{where} is no address of this machine: {error.strerror}") from None
    if not public and not _is_loopback(str(address[0])):
        sock.close()
        raise UsageError(
            f"{host} can be reached from other machines, and there is no authentication yet",
            hint="leave --host out, or say --insecure-no-auth if everyone who reaches it may use it",
        )
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        # Takes the port now: two servers could otherwise bind it and only one listen.
        sock.listen()
    except OSError as error:
        sock.close()
        taken = error.errno == errno.EADDRINUSE
        hint = "stop the program that has it, or choose another --port" if taken else "choose another --host or --port"
        raise PortError(f"cannot listen on {where}: {os.strerror(error.errno or 0).lower()}", hint=hint) from None
    return sock


def base_url(sock: socket.socket) -> str:
    """What a client on this machine puts before ``/v1``."""
    host, port = sock.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - compared, not bound
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _is_loopback(address: str) -> bool:
    """Whether only this machine can reach the address."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


@dataclass(slots=True)
class Running:
    """A server that listens.

    Args:
        load: its exceptions end the server and come out of ``run``; cancelled when the server ends before.
        on_ready: called on the event loop when requests are taken.
        grace_s: time for open answers at the end.
    """

    state: ServerState
    sock: socket.socket
    load: Load
    on_ready: Callable[[Engine], None] = lambda _: None
    grace_s: int = 5
    _server: uvicorn.Server = field(init=False)

    def __post_init__(self) -> None:
        address = self.sock.getsockname()[0]
        hosts = LOOPBACK_NAMES | {address} if _is_loopback(address) else None
        self._server = uvicorn.Server(
            uvicorn.Config(
                build_app(self.state, hosts),
                http=Connection,
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="critical",  # the edge logs what fails; uvicorn would tell it a second time
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_graceful_shutdown=self.grace_s,
            )
        )

    def stop(self) -> None:
        """Begins the end, from any thread."""
        self._server.should_exit = True

    async def run(self) -> None:
        """Until a signal (in the main thread), ``stop``, or a failure.

        Raises:
            PeriluneError: what ``load`` raised; EngineError when the engine fails.
        """
        watch = asyncio.create_task(self._watch())
        try:
            await self._server.serve(sockets=[self.sock])
            if self._server.server_state.tasks and not self._server.force_exit:
                await asyncio.wait(self._server.server_state.tasks, timeout=_LAST_WORDS_S)
        finally:
            self.sock.close()
            if not watch.done():
                watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
        if not watch.cancelled():
            watch.result()

    async def _watch(self) -> None:
        """Loads the engine, then sees whether it lives. Ends the server by ending."""
        engine: Engine | None = None
        try:
            engine, defaults = await self.load()
            self.state.ready(engine, defaults)
            self.on_ready(engine)
            while (status := engine.status()).phase == "ready":  # noqa: ASYNC110 - a snapshot, it rings no bell
                await asyncio.sleep(_WATCH_S)
            raise EngineError(f"the engine {status.phase}: {status.error or 'no reason given'}")
        except Exception:
            self.state.end("failed")
            # Answers in flight and probes learn of it before the port closes.
            await asyncio.sleep(_WATCH_S)
            raise
        finally:
            self.stop()
            if engine is not None and not self._server.force_exit:
                await engine.close()


def run_blocking(running: Running) -> None:
    """Runs in the main thread until SIGINT or SIGTERM; a second SIGINT doesn't wait for open answers."""
    with _signals_end_quietly(), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(running.run())


@contextmanager
def background(running: Running) -> Iterator[str]:
    """Runs in a thread; yields the URL once requests are taken, ends the server after the block.

    Raises:
        PeriluneError: what ``load`` raised.
    """
    outcome: list[BaseException] = []
    ready = threading.Event()
    announce = running.on_ready

    def note_ready(engine: Engine) -> None:
        announce(engine)
        ready.set()

    def body() -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(running.run())
        except BaseException as error:  # noqa: BLE001 - handed to the thread that waits
            outcome.append(error)
        finally:
            ready.set()

    running.on_ready = note_ready
    thread = threading.Thread(target=body, name="perilune-server", daemon=True)
    url = base_url(running.sock)
    thread.start()
    try:
        ready.wait()
        if outcome:
            raise outcome[0]
        yield url
    finally:
        running.stop()
        thread.join()


@contextmanager
def _signals_end_quietly() -> Iterator[None]:
    """uvicorn raises the signals that ended it once more at the end; by then they have had their effect."""

    def ignore(_: int, __: FrameType | None) -> None:
        return

    before = {number: signal.signal(number, ignore) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
