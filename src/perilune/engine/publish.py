"""Cache events over ZMQ, in the form that vLLM publishes: routers written for it can follow this engine.

    XPUB frames     topic ‖ sequence number (8 bytes, big-endian, from 0) ‖ msgpack [time, [event, …], rank]
    event           map with ``type``: BlockStored, BlockRemoved, AllBlocksCleared (``perilune.kv.events``)
    replay          ``perilune.engine.replay``

Numbers count the batches of one engine's life. Events are an aid, and nothing here may hold an engine up: a thread of
its own has the sockets, the engine's thread only hands batches over. A subscriber that does not read misses what is
past ``_SUBSCRIBER_QUEUE``, sees a gap in the numbers and can ask again. Where the thread itself is behind by
``_HANDED_OVER`` batches, which takes a machine that stands still, what comes is dropped, and its numbers with it. If it
dies, that is logged, its addresses are closed, and the engine goes on without. What subscribers ask for is bounded by
``perilune.engine.subscriptions``.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import socket
import stat
import threading
import time
from pathlib import Path
from typing import Final

import msgspec
import zmq

from perilune.engine.replay import LONGEST_FRAME, QUEUE, Backlog, Replays, packed
from perilune.engine.subscriptions import QUEUE as ASKED_QUEUE
from perilune.engine.subscriptions import Subscriptions, longest_frame
from perilune.errors import PortError
from perilune.kv.events import CacheEvent

logger = logging.getLogger(__name__)

_SUBSCRIBER_QUEUE: Final = 4096
_HANDED_OVER: Final = 2048
_FEED: Final = "inproc://batches"
_TURN_S: Final = 0.01
_CLOSE_S: Final = 1.0
_TELL_EVERY_S: Final = 60.0
_LATE_S: Final = 5.0

Context = zmq.Context[zmq.Socket[bytes]]


class EventPublisher:
    """The engine's end. For one thread, which it never blocks.

    Args:
        endpoint, replay_endpoint: addresses that ``check_event_addresses`` has passed; an empty ``replay_endpoint``
            offers no replay.
        topic: first frame, for subscribers that filter.

    Raises:
        PortError: an address cannot be bound.
    """

    def __init__(self, endpoint: str, replay_endpoint: str = "", topic: str = "") -> None:
        self._number = 0
        self._dropped = False
        self._encode = msgspec.msgpack.Encoder().encode
        self._context: Context = zmq.Context()
        try:
            self._thread = _Publishing(self._context, (endpoint, replay_endpoint), topic.encode())
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._feed = self._context.socket(zmq.PUSH)
        self._feed.set_hwm(_HANDED_OVER // 2)
        self._feed.connect(_FEED)
        self._thread.start()

    def publish(self, events: list[CacheEvent]) -> None:
        """Hands over one batch."""
        number, self._number = self._number, self._number + 1
        if self._thread.ending.is_set():
            return
        try:
            # One frame: each one more would let the other thread in between, at the cost of this one.
            self._feed.send(packed(number) + self._encode([time.time(), events, 0]), zmq.DONTWAIT)
        except zmq.Again:
            if not (self._dropped or self._thread.ending.is_set()):
                self._dropped = True
                logger.warning("cache events are dropped: publishing does not keep up")

    def close(self) -> None:
        """Ends the thread and frees the addresses. What subscribers have not read by then is lost: the cache that it
        tells of is gone too. A second call does nothing."""
        if self._context.closed:
            return
        self._thread.ending.set()
        with contextlib.suppress(zmq.Again):  # then there is enough to wake the thread
            self._feed.send(b"", zmq.DONTWAIT)
        self._thread.join(_CLOSE_S)
        if not self._thread.is_alive():
            self._context.destroy(linger=0)


class _Publishing(threading.Thread):
    """Has the sockets; binds them when it is made, in the engine's thread, which can still tell what is wrong."""

    def __init__(self, context: Context, endpoints: tuple[str, str], topic: bytes) -> None:
        super().__init__(name="perilune-events", daemon=True)
        self.ending = threading.Event()
        self._context, self._endpoint, self._topic = context, endpoints[0], topic
        self._backlog = Backlog()
        self._feed = context.socket(zmq.PULL)
        self._feed.set_hwm(_HANDED_OVER // 2)
        self._feed.bind(_FEED)
        self._events = self._bound_events()
        self._subscriptions = Subscriptions(topic)
        self._tell_at = 0.0
        self._replays: Replays | None = None
        self._sockets = [self._feed, self._events]
        if endpoints[1]:
            requests = _bound(context, zmq.ROUTER, endpoints[1], (QUEUE, QUEUE), LONGEST_FRAME)
            self._replays = Replays(requests, topic, self._backlog)
            self._sockets.append(requests)
        self._hurried, self._patient = _poller(self._sockets[:2]), _poller(self._sockets)

    def run(self) -> None:
        try:
            self._serve()
        except Exception:  # whatever it is, the engine needs none of this
            logger.exception("cache events are no longer published; serving goes on")
        finally:
            self.ending.set()
            for each in self._sockets:
                _give_up(each)

    def _serve(self) -> None:
        """Publishes at once; answers replays in turns, so that they take a small share of the interpreter's time."""
        due: float | None = None
        while True:
            if due is None:
                self._patient.poll()
            else:
                self._hurried.poll(max(0, math.ceil((due - time.monotonic()) * 1000)))
            self._publish()
            if self.ending.is_set():
                return
            if not self._subscriptions.hear(self._events):
                self._begin_anew()
                if self.ending.is_set():
                    return
            now = time.monotonic()
            if self._replays is not None and (due is None or now >= due):
                due = now + _TURN_S if self._replays.turn(now) else None

    def _publish(self) -> None:
        """What has been handed over."""
        for number, payload in self._keep():
            self._events.send_multipart((self._topic, number, payload), zmq.DONTWAIT)

    def _keep(self) -> list[tuple[bytes, bytes]]:
        """Numbers and payloads of what has been handed over, which can now be asked for again."""
        kept: list[tuple[bytes, bytes]] = []
        with contextlib.suppress(zmq.Again):
            for _ in range(_HANDED_OVER):
                if batch := self._feed.recv(zmq.DONTWAIT):
                    kept.append((batch[:8], batch[8:]))
                    self._backlog.add(int.from_bytes(batch[:8], "big"), batch[8:])
        return kept

    def _bound_events(self) -> zmq.Socket[bytes]:
        queues = _SUBSCRIBER_QUEUE, ASKED_QUEUE
        return _bound(self._context, zmq.XPUB, self._endpoint, queues, longest_frame(self._topic))

    def _begin_anew(self) -> None:
        """Gives up all that subscribers have asked for, and their connections, which they make again."""
        now = time.monotonic()
        if now >= self._tell_at:
            self._tell_at = now + _TELL_EVERY_S
            logger.warning("subscribers of cache events ask for too many topics that are not ours: all are let go")
        _give_up(self._events)
        late = now + _LATE_S
        while True:
            try:
                self._events = self._bound_events()
                break
            except PortError:  # ZMQ closes in its own time
                self._keep()
                if time.monotonic() > late:
                    late = math.inf
                    logger.error("%s is taken: cache events go on when it is free", self._endpoint)
                if self.ending.wait(_TURN_S):
                    return
        self._subscriptions = Subscriptions(self._topic)
        self._sockets[1] = self._events
        self._hurried, self._patient = _poller(self._sockets[:2]), _poller(self._sockets)


def _poller(sockets: list[zmq.Socket[bytes]]) -> zmq.Poller:
    poller = zmq.Poller()
    for each in sockets:
        poller.register(each, zmq.POLLIN)
    return poller


def _bound(context: Context, kind: int, endpoint: str, queues: tuple[int, int], longest: int) -> zmq.Socket[bytes]:
    """A socket for clients nobody knows; ``queues`` to and from each one, in messages.

    Raises:
        PortError: the address cannot be bound.
    """
    bound = context.socket(kind)
    bound.setsockopt(zmq.SNDHWM, queues[0])
    bound.setsockopt(zmq.RCVHWM, queues[1])
    bound.setsockopt(zmq.MAXMSGSIZE, longest)
    bound.setsockopt(zmq.TCP_KEEPALIVE, 1)
    bound.setsockopt(zmq.IPV6, "[" in endpoint)
    try:
        if (path := _path(endpoint)) is not None:
            _check_path(path)
        bound.bind(endpoint)
    except (OSError, zmq.ZMQError) as error:
        bound.close(linger=0)
        raise _port_error(endpoint, error.errno or 0) from None
    return bound


def _give_up(bound: zmq.Socket[bytes]) -> None:
    """Closes a socket and removes its file: first that, or it might be the file of whoever binds the path next."""
    if bound.closed:
        return
    if (path := _path(bound.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0"))) is not None:
        with contextlib.suppress(OSError):
            path.unlink()
    bound.close(linger=0)


def _path(endpoint: str) -> Path | None:
    """Where there is a file."""
    name = endpoint.removeprefix("ipc://")
    return None if name == endpoint or name.startswith("@") else Path(name)


def _check_path(path: Path) -> None:
    """ZMQ deletes what is at a path before it binds it: a file, or the socket of a server that runs."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise OSError(errno.EEXIST, "")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return  # left behind by a process that was killed
    raise OSError(errno.EADDRINUSE, "")


def _port_error(endpoint: str, code: int) -> PortError:
    hints = {
        errno.EADDRINUSE: "stop the program that has it, or choose another address",
        errno.EEXIST: "something else is at that path; choose another",
        errno.ENOENT: "the folder must exist",
        errno.EACCES: "it takes a folder that this user may write, or a port above 1023",
        errno.EADDRNOTAVAIL: "it must be an address of this machine",
        errno.ENODEV: "it must be an address of this machine",
    }
    return PortError(
        f"cache events cannot be published on {endpoint}: {os.strerror(code).lower()}",
        hint=hints.get(code, "choose another address"),
    )
