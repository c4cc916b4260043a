"""A server's life: bind, listen, load, answer, drain, end.

Listens before the model is loaded, so that ``/health`` and ``/ready`` tell how far it is. ``serve`` runs until a signal
or until the engine fails for good; ``background`` runs the same in a thread, for programs that want a server of their
own. At the end nothing new is let in, but probes and refusals are answered while open answers have ``grace_s`` to
finish; what is left then is told so in its stream, and the listener closes. Knows nothing of how models are loaded.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import logging
import os
import signal
import socket
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import uvloop

from perilune.errors import EngineError, PortError, UsageError
from perilune.logs import fields
from perilune.server.app import build_app
from perilune.server.edge import LOOPBACK_NAMES
from perilune.server.listener import Listener
from perilune.server.state import Engine, SamplingDefaults, ServerState

if TYPE_CHECKING:
    from perilune.engine.options import EngineStatus

logger = logging.getLogger(__name__)

Loaded = tuple[Engine, SamplingDefaults]
Load = Callable[[], Awaitable[Loaded]]

_WATCH_S: Final = 1.0
_TELL_S: Final = 0.5
_LAST_WORDS_S: Final = 1.0


def bind(host: str, port: int, *, public: bool = False) -> socket.socket:
    """A listening socket; port 0 takes a free one.

    Raises:
        UsageError: others could reach the address, and ``public`` does not say that this is safe or meant.
        PortError: no such address, or it is taken, or not ours to take.
    """
    where = f"{host}:{port}"
    family, kind, proto, address = address_of(host, port, public=public)
    try:
        sock = socket.socket(family, kind, proto)
    except OSError as error:
        raise PortError(f"{where} is no address of this machine: {os.strerror(error.errno or 0).lower()}") from None
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


def address_of(host: str, port: int, *, public: bool) -> tuple[socket.AddressFamily, socket.SocketKind, int, Any]:
    """What ``bind`` would bind: family, kind, protocol, address.

    Raises:
        UsageError, PortError: as ``bind``, without having tried.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:  # a name that no DNS could hold is a UnicodeError
        why = getattr(error, "strerror", None) or "no name of a host"
        raise PortError(f"{host}:{port} is no address of this machine: {why.lower()}") from None
    if not public and not _is_loopback(str(address[0])):
        raise UsageError(
            f"{host} can be reached from other machines, and there is no authentication without a key",
            hint="give --api-key-file or PERILUNE_API_KEY, or leave --host out, or say --insecure-no-auth",
        )
    return family, kind, proto, address


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
        on_ready: called on the event loop when requests are taken for the first time.
        grace_s: time for open answers at the end.
        on_hangup: called on SIGHUP: files are to be read and opened anew.
    """

    state: ServerState
    sock: socket.socket
    load: Load
    on_ready: Callable[[Engine], None] = lambda _: None
    grace_s: float = 5
    on_hangup: Callable[[], None] = lambda: None
    _asked: int = 0
    _loop: asyncio.AbstractEventLoop | None = None
    _ending: asyncio.Event = field(default_factory=asyncio.Event)
    _hurried: asyncio.Event = field(default_factory=asyncio.Event)

    def stop(self) -> None:
        """Begins the end, from any thread; a second call does not wait for open answers."""
        loop = self._loop
        if loop is None:
            self._note_stop()
        else:
            with contextlib.suppress(RuntimeError):  # it has ended
                loop.call_soon_threadsafe(self._note_stop)

    async def run(self) -> None:
        """Until a signal (in the main thread), ``stop``, or a failure.

        Raises:
            PeriluneError: what ``load`` raised; EngineError when the engine fails for good.
        """
        self._loop = asyncio.get_running_loop()
        address = self.sock.getsockname()[0]
        hosts = LOOPBACK_NAMES | {address} if _is_loopback(address) else None
        app = build_app(self.state, hosts)
        listener = Listener(app, self.state.limits, self.sock)
        with self._signals(self._loop):
            await listener.start()
            watch = asyncio.create_task(self._watch())
            try:
                await _first_of(watch, self._ending.wait())
                if not watch.done():
                    await self._drain()
            finally:
                await listener.close(_LAST_WORDS_S)
                await app.close()
                self.state.end("failed" if watch.done() else "stopped")
                watch.cancel()
                await asyncio.gather(watch, return_exceptions=True)
                if self.state.usage_log is not None:
                    await asyncio.to_thread(self.state.usage_log.close)
        if not watch.cancelled():
            watch.result()

    async def _drain(self) -> None:
        """Lets open answers end, while probes and refusals are still answered."""
        self.state.drain()
        open_answers = self.state.in_flight
        if open_answers and self.grace_s and not self._hurried.is_set():
            logger.warning("draining", extra=fields(open_answers=open_answers, grace_s=self.grace_s))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.grace_s):
                    await _first_of(asyncio.create_task(self.state.admission.idle.wait()), self._hurried.wait())

    async def _watch(self) -> None:
        """Loads the engine, then sees whether it lives; ends when it doesn't for good."""
        engine: Engine | None = None
        try:
            engine, defaults = await self.load()
            self.state.ready(engine, defaults)
            self.on_ready(engine)
            status = await self._until_final(engine)
            raise EngineError(f"the engine {status.phase}: {status.error or 'no reason given'}")
        except Exception:
            self.state.end("failed")
            # Answers in flight and probes learn of it before the port closes.
            await asyncio.sleep(_TELL_S)
            raise
        finally:
            if engine is not None and not self._hurried.is_set():
                await engine.close()

    async def _until_final(self, engine: Engine) -> EngineStatus:
        """Tells the log of silence, restarts and recoveries."""
        told = "ready"
        while (status := engine.status()).phase not in ("failed", "stopped"):
            if status.phase != told:
                told = status.phase
                logger.warning("the engine's phase has changed", extra=fields(phase=told, why=status.error or None))
            await asyncio.sleep(_WATCH_S)
        return status

    def _note_stop(self) -> None:
        self._asked += 1
        (self._ending if self._asked == 1 else self._hurried).set()

    @contextmanager
    def _signals(self, loop: asyncio.AbstractEventLoop) -> Iterator[None]:
        """Takes the process's signals, in the main thread only: elsewhere they belong to somebody else."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        handlers = {signal.SIGINT: self._note_stop, signal.SIGTERM: self._note_stop, signal.SIGHUP: self.on_hangup}
        for number, handler in handlers.items():
            loop.add_signal_handler(number, handler)
        try:
            yield
        finally:
            for number in handlers:
                loop.remove_signal_handler(number)


async def _first_of(task: asyncio.Task[Any], event: Coroutine[Any, Any, Any]) -> None:
    """Waits for either; whatever is still to come of ``event`` is dropped."""
    other = asyncio.create_task(event)
    try:
        await asyncio.wait((task, other), return_when=asyncio.FIRST_COMPLETED)
    finally:
        other.cancel()
        await asyncio.gather(other, return_exceptions=True)


def run_blocking(running: Running) -> None:
    """Runs in the main thread until SIGINT or SIGTERM; a second one doesn't wait for open answers."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
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
