"""The past of cache events: the last batches, and clients that ask for them. Belongs to the thread of ``publish``.

A client sends [b"", first number]; it gets [b"", topic, number, payload] … and [b"", b"", number of all ones, b""] at
the end. All of them together get a bounded share of the thread's time, and a bounded queue each:

* ``CLIENTS`` replays are open at once, others wait in their connections;
* one for a client: its next request takes the place of the one before;
* a client that has not read for ``STALLED_S`` loses its replay, and gets no end mark.

What is no request is dropped; no frame is longer than ``LONGEST_FRAME``, or ZMQ ends the connection.
"""

from __future__ import annotations

import errno
import struct
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass
from itertools import islice
from operator import itemgetter
from typing import Final

import zmq

BUFFERED: Final = 10_000
BUFFERED_BYTES: Final = 64 << 20
CLIENTS: Final = 16
STALLED_S: Final = 5.0
LONGEST_FRAME: Final = 1024
END_OF_REPLAY: Final = b"\xff" * 8
QUEUE: Final = 256
"""Batches on their way to one client."""
_HEARD_PER_TURN: Final = 16
_SENT_PER_TURN: Final = 64
_REQUEST_FRAMES: Final = 3


def packed(number: int) -> bytes:
    """A sequence number as it travels."""
    return struct.pack(">Q", number)


class Backlog:
    """The last ``BUFFERED`` batches, or as many as fit into ``BUFFERED_BYTES``."""

    def __init__(self) -> None:
        self._batches: deque[tuple[int, bytes]] = deque()
        self._bytes = 0

    def add(self, number: int, payload: bytes) -> None:
        self._batches.append((number, payload))
        self._bytes += len(payload)
        while len(self._batches) > BUFFERED or self._bytes > BUFFERED_BYTES:
            self._bytes -= len(self._batches.popleft()[1])

    def since(self, number: int, count: int) -> list[tuple[int, bytes]]:
        """The first ``count`` batches from ``number`` on."""
        start = bisect_left(self._batches, number, key=itemgetter(0))
        return list(islice(self._batches, start, start + count))


@dataclass(slots=True)
class _Replay:
    number: int  # the next one to send
    moved: float  # when something was sent last


class Replays:
    """Answers requests on ``requests``, a bound ROUTER, in turns."""

    def __init__(self, requests: zmq.Socket[bytes], topic: bytes, backlog: Backlog) -> None:
        # A full queue and a client that is gone are told then; else replies would vanish in silence.
        requests.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._requests, self._topic, self._backlog = requests, topic, backlog
        self._open: dict[bytes, _Replay] = {}

    def turn(self, now: float) -> bool:
        """Hears a few requests and sends a few batches. False: nothing to do until a request comes."""
        heard = self._hear(now)
        share = max(1, _SENT_PER_TURN // max(1, len(self._open)))
        for client, replay in list(self._open.items()):
            try:
                going_on = self._send(client, replay, share, now)
            except zmq.Again:
                going_on = now - replay.moved < STALLED_S
            except zmq.ZMQError as error:
                if error.errno != errno.EHOSTUNREACH:
                    raise
                going_on = False
            if not going_on:
                del self._open[client]
        return heard or bool(self._open)

    def _hear(self, now: float) -> bool:
        """Opens replays that are asked for, while there is room; whether anything came."""
        for count in range(_HEARD_PER_TURN):
            if len(self._open) >= CLIENTS:
                return True
            try:
                client, *request = self._receive()
            except zmq.Again:
                return count > 0
            if len(request) == 2 and len(request[1]) == 8:
                self._open[client] = _Replay(int.from_bytes(request[1], "big"), now)
        return True

    def _receive(self) -> list[bytes]:
        """One message; of one that is too long, only so much that this shows."""
        frames = [self._requests.recv(zmq.DONTWAIT)]
        while self._requests.getsockopt(zmq.RCVMORE):
            frame = self._requests.recv(zmq.DONTWAIT)
            if len(frames) <= _REQUEST_FRAMES:
                frames.append(frame)
        return frames

    def _send(self, client: bytes, replay: _Replay, count: int, now: float) -> bool:
        """The next batches of one replay; whether there is more to come."""
        batches = self._backlog.since(replay.number, count)
        for number, payload in batches:
            self._requests.send_multipart((client, b"", self._topic, packed(number), payload), zmq.DONTWAIT)
            replay.number, replay.moved = number + 1, now
        if len(batches) == count:
            return True
        self._requests.send_multipart((client, b"", b"", END_OF_REPLAY, b""), zmq.DONTWAIT)
        return False
