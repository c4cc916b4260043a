"""Cache events over ZMQ, in the form that vLLM publishes: routers written for it can follow this engine.

    PUB frames      topic ‖ sequence number (8 bytes, big-endian, from 0) ‖ msgpack [time, [event, …], rank]
    event           map with ``type``: BlockStored, BlockRemoved, AllBlocksCleared (``perilune.kv.events``)
    replay          a client sends [b"", first number]; it gets [b"", topic, number, payload] … and
                    [b"", b"", number of all ones, b""] at the end

A subscriber that does not read loses messages (they are dropped past the high-water mark, the engine never waits) and
sees a gap in the numbers; the last ``BUFFERED`` batches can be asked for again.
"""

from __future__ import annotations

import struct
import time
from collections import deque
from typing import Final

import msgspec
import zmq

from perilune.errors import PortError
from perilune.kv.events import CacheEvent

BUFFERED: Final = 10_000
END_OF_REPLAY: Final = b"\xff" * 8
_HIGH_WATER: Final = 100_000


class EventPublisher:
    """One publisher of one engine. Not thread-safe.

    Args:
        endpoint, replay_endpoint: ZMQ addresses to bind; an empty ``replay_endpoint`` offers no replay.
        topic: first frame, for subscribers that filter.

    Raises:
        PortError: an address cannot be bound.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, replay_endpoint: str = "", topic: str = ""
    ) -> None:
        self._topic = topic.encode()
        self._number = 0
        self._buffer: deque[tuple[bytes, bytes]] = deque(maxlen=BUFFERED)
        self._encode = msgspec.msgpack.Encoder().encode
        self._publish = context.socket(zmq.PUB)
        self._publish.set_hwm(_HIGH_WATER)
        _bind(self._publish, endpoint)
        self.replays: zmq.Socket[bytes] | None = None
        if replay_endpoint:
            self.replays = context.socket(zmq.ROUTER)
            _bind(self.replays, replay_endpoint)

    def publish(self, events: list[CacheEvent]) -> None:
        """Sends one batch."""
        number, payload = struct.pack(">Q", self._number), self._encode([time.time(), events, 0])
        self._number += 1
        self._buffer.append((number, payload))
        self._publish.send_multipart((self._topic, number, payload))

    def answer_replays(self) -> None:
        """Answers what has arrived on ``replays``. A request that is none is dropped."""
        if self.replays is None:
            return
        while self.replays.poll(0):
            client, *rest = self.replays.recv_multipart()
            if len(rest) != 2 or len(rest[1]) != 8:
                continue
            for number, payload in self._buffer:
                if number >= rest[1]:
                    self._reply(client, self._topic, number, payload)
            self._reply(client, b"", END_OF_REPLAY, b"")

    def _reply(self, client: bytes, topic: bytes, number: bytes, payload: bytes) -> None:
        if self.replays is not None:
            self.replays.send_multipart((client, b"", topic, number, payload), zmq.DONTWAIT)


def _bind(socket: zmq.Socket[bytes], endpoint: str) -> None:
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise PortError(
            f"cache events cannot be published on {endpoint}: {error.strerror.lower()}",
            hint="an address looks like tcp://127.0.0.1:5557 or ipc:///run/perilune/events",
        ) from None
