"""What subscribers of cache events ask for, bounded. Belongs to the thread of ``publish``.

ZMQ keeps a node of tens of bytes for each byte of each topic that anybody subscribes to, without bound, and an XPUB in
manual mode keeps them all the same. So topics that can match (beginnings of ours) are free, other ones may stand while
they are few, and a frame much longer than our topic ends its connection. ZMQ does not tell whose a subscription is:
past the bound the socket is given up, with all its connections, and bound anew; subscribers come back by themselves.
"""

from __future__ import annotations

from typing import Final

import zmq

FOREIGN_BYTES: Final = 1 << 14
"""Topics of others, together."""
QUEUE: Final = 4
"""Subscriptions of one connection on their way: few, so that none get past the bound before they are counted."""
_HANDSHAKE_BYTES: Final = 256
_TOPIC_BYTES: Final = 32  # what one costs beside its text
_HEARD: Final = 256
_CANCEL, _SUBSCRIBE = 0, 1


def longest_frame(topic: bytes) -> int:
    """Bytes of the longest frame that a subscriber has reason to send: a handshake, or a topic."""
    return _HANDSHAKE_BYTES + len(topic)


class Subscriptions:
    """Keeps the books for one XPUB that is not verbose: it tells of each topic once, and when its last one is gone."""

    def __init__(self, topic: bytes) -> None:
        self._topic = topic
        self._foreign: set[bytes] = set()
        self._bytes = 0

    def hear(self, events: zmq.Socket[bytes]) -> bool:
        """Takes note of who comes and goes. False: there is too much, ``events`` is to be given up."""
        for _ in range(_HEARD):
            try:
                frame = events.recv(zmq.DONTWAIT)
            except zmq.Again:
                break
            if frame and frame[0] in (_CANCEL, _SUBSCRIBE) and not self._topic.startswith(frame[1:]):
                self._count(frame[1:], subscribed=frame[0] == _SUBSCRIBE)
        return self._bytes <= FOREIGN_BYTES

    def _count(self, topic: bytes, *, subscribed: bool) -> None:
        """ZMQ also passes on the end of what was never there: that makes no room."""
        if subscribed == (topic in self._foreign):
            return
        cost = len(topic) + _TOPIC_BYTES
        if subscribed:
            self._foreign.add(topic)
            self._bytes += cost
        else:
            self._foreign.remove(topic)
            self._bytes -= cost
