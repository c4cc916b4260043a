"""Cache events on the wire: form and numbers, replays, and that nobody who listens can hold an engine up."""

from __future__ import annotations

import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import psutil
import pytest
import zmq

from perilune.engine import publish, replay, subscriptions
from perilune.engine.publish import EventPublisher
from perilune.engine.replay import BUFFERED, CLIENTS, END_OF_REPLAY, Backlog, packed
from perilune.errors import PortError
from perilune.kv.events import AllBlocksCleared, BlockRemoved, BlockStored, CacheEvent

Socket = zmq.Socket[bytes]
EVENTS: list[CacheEvent] = [
    BlockStored(block_hashes=[b"h" * 32], parent_block_hash=None, token_ids=[1, 2], block_size=2),
    BlockRemoved(block_hashes=[b"g" * 32]),
    AllBlocksCleared(),
]
ASK_ALL = (b"", packed(0))
HOSTILE: list[list[bytes]] = [
    [b"", bytes(7)],
    [b""],
    [b"x"],
    [b"", bytes(8), b"more"],
    [b""] * 5000,
    [b"y" * (1 << 20)],
    [b"", b"a" * (1 << 20)],
]


class Bench:
    """A publisher, and clients of it."""

    def __init__(self, events: str, replays: str) -> None:
        self.events, self.replays = events, replays
        self.publisher = EventPublisher(self.events, self.replays, "kv")
        self._context: zmq.Context[Socket] = zmq.Context()
        self._clients: list[Socket] = []

    def client(self, kind: int = zmq.DEALER, *, address: str = "", queue: int = 0) -> Socket:
        client = self._context.socket(kind)
        self._clients.append(client)
        client.setsockopt(zmq.LINGER, 0)
        client.set_hwm(queue)
        client.connect(address or self.replays)
        return client

    def subscriber(self, topic: bytes = b"", queue: int = 0) -> Socket:
        """One that has begun to receive."""
        subscriber = self.client(zmq.SUB, address=self.events, queue=queue)
        subscriber.subscribe(topic)
        deadline = time.monotonic() + 10
        while not subscriber.poll(20):
            assert time.monotonic() < deadline
            self.publisher.publish([])
        return subscriber

    def close(self) -> None:
        self.publisher.close()
        for client in self._clients:
            client.close()
        self._context.term()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replays")
    try:
        yield made
    finally:
        made.close()


def receive(client: Socket, seconds: float = 10) -> list[bytes]:
    assert client.poll(int(seconds * 1000)), "nothing comes"
    return client.recv_multipart()


def answer(client: Socket, seconds: float = 10) -> list[int]:
    """The numbers of one replay, up to its end mark."""
    numbers: list[int] = []
    while (frames := receive(client, seconds))[2] != END_OF_REPLAY:
        assert frames[:2] == [b"", b"kv"]
        numbers.append(int.from_bytes(frames[2], "big"))
    assert frames == [b"", b"", END_OF_REPLAY, b""]
    return numbers


def test_form_and_numbers(bench: Bench) -> None:
    subscriber = bench.subscriber(b"kv")
    first = int.from_bytes(receive(subscriber)[1], "big")
    for _ in range(100):
        bench.publisher.publish(EVENTS)
    numbers: list[int] = []
    while len(numbers) < 100:
        topic, number, payload = receive(subscriber)
        stamp, events, rank = msgspec.msgpack.decode(payload)
        if events:
            numbers.append(int.from_bytes(number, "big"))
    assert numbers == list(range(numbers[0], numbers[0] + 100))
    assert numbers[0] > first
    assert (topic, rank, len(number)) == (b"kv", 0, 8)
    assert abs(stamp - time.time()) < 60
    assert events == [
        {
            "type": "BlockStored",
            "block_hashes": [b"h" * 32],
            "parent_block_hash": None,
            "token_ids": [1, 2],
            "block_size": 2,
        },
        {"type": "BlockRemoved", "block_hashes": [b"g" * 32]},
        {"type": "AllBlocksCleared"},
    ]


def test_a_replay_begins_at_the_number_that_was_asked_for(bench: Bench) -> None:
    for _ in range(300):
        bench.publisher.publish(EVENTS)
    client, plain = bench.client(), bench.client(zmq.REQ)
    for first, numbers in ((0, range(300)), (170, range(170, 300)), (299, [299]), (300, []), (2**64 - 1, [])):
        client.send_multipart((b"", packed(first)))
        assert answer(client) == list(numbers)
    plain.send(packed(299))
    assert receive(plain)[:2] == [b"kv", packed(299)]


def test_the_backlog_is_bounded_in_batches_and_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    backlog = Backlog()
    for number in range(0, 3 * BUFFERED, 2):  # every other one was dropped
        backlog.add(number, b"x")
    kept = [number for number, _ in backlog.since(0, 3 * BUFFERED)]
    assert kept == list(range(BUFFERED, 3 * BUFFERED, 2))
    assert [number for number, _ in backlog.since(BUFFERED + 1, 2)] == [BUFFERED + 2, BUFFERED + 4]
    monkeypatch.setattr(replay, "BUFFERED_BYTES", 1000)
    backlog.add(3 * BUFFERED, b"x" * 990)
    assert len(backlog.since(0, BUFFERED)) == 11


def test_a_client_has_one_replay_and_all_clients_get_theirs(bench: Bench) -> None:
    for _ in range(50):
        bench.publisher.publish(EVENTS)
    greedy = bench.client()
    for _ in range(500):
        greedy.send_multipart(ASK_ALL)
    clients = [bench.client() for _ in range(3 * CLIENTS)]
    for client in clients:
        client.send_multipart(ASK_ALL)
    for client in clients:
        assert answer(client) == list(range(50))
    ends = 0
    while greedy.poll(300):
        ends += greedy.recv_multipart()[2] == END_OF_REPLAY
    assert 1 <= ends < 250


def test_a_client_that_does_not_read_is_let_go(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps neither memory nor a place: as many as there are places do not read, the next one is served."""
    monkeypatch.setattr(replay, "STALLED_S", 0.3)
    large: list[CacheEvent] = [BlockRemoved(block_hashes=[bytes(32)] * 600)]
    for _ in range(600):
        bench.publisher.publish(large)
    deaf = [bench.client(queue=1) for _ in range(CLIENTS)]
    for client in deaf:
        client.send_multipart(ASK_ALL)
    time.sleep(0.3)
    grown = psutil.Process().memory_info().rss
    reader = bench.client()
    reader.send_multipart((b"", packed(590)))
    assert answer(reader) == list(range(590, 600))
    assert psutil.Process().memory_info().rss - grown < 2 * CLIENTS * replay.QUEUE * 20_000
    gone = bench.client(queue=1)
    gone.send_multipart(ASK_ALL)
    time.sleep(0.1)
    gone.close()
    reader.send_multipart(ASK_ALL)
    assert answer(reader) == list(range(600))


def test_hostile_messages_change_nothing() -> None:
    with socket.socket() as one, socket.socket() as two:
        one.bind(("127.0.0.1", 0))
        two.bind(("127.0.0.1", 0))
        ports = one.getsockname()[1], two.getsockname()[1]
    bench = Bench(f"tcp://127.0.0.1:{ports[0]}", f"tcp://127.0.0.1:{ports[1]}")
    try:
        bench.publisher.publish(EVENTS)
        for rude in (bench.client(), bench.client(zmq.XSUB, address=bench.events)):
            for message in HOSTILE:
                rude.send_multipart(message)
        handshake = b"\xff" + bytes(7) + b"\x01\x7f" + b"\x03\x00NULL" + bytes(48)
        for port in ports:
            for raw in (b"GET / HTTP/1.1\r\n\r\n", os.urandom(100_000), handshake + b"\x02" + b"\xff" * 8):
                with socket.create_connection(("127.0.0.1", port)) as connection, suppress(ConnectionError):
                    connection.sendall(raw)
                    time.sleep(0.05)
        client = bench.client()
        client.send_multipart(ASK_ALL)
        assert answer(client) == [0]
        assert receive(bench.subscriber())[0] == b"kv"
    finally:
        bench.close()


@pytest.mark.parametrize("size", [900, 40])
def test_subscriptions_take_no_memory_and_others_go_on(bench: Bench, size: int) -> None:
    """ZMQ alone keeps 40 KB for a topic of 900 bytes, for good."""
    subscriber = bench.subscriber(b"kv")
    before = psutil.Process().memory_info().rss
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)
    ready = b"\x05READY\x0bSocket-Type\x00\x00\x00\x03SUB"
    for _ in range(4):  # those who are let go come back
        with socket.socket(socket.AF_UNIX) as rude, suppress(OSError):
            rude.settimeout(5)
            rude.connect(bench.events.removeprefix("ipc://"))
            rude.sendall(greeting + b"\x04" + bytes([len(ready)]) + ready)
            for _ in range((2 << 20) // size):
                rude.sendall(b"\x02" + struct.pack(">Q", size + 1) + b"\1" + os.urandom(size))
        time.sleep(0.1)
    assert psutil.Process().memory_info().rss - before < 24 << 20
    deadline = time.monotonic() + 10
    last = -1
    while last < _published(bench) - 3:
        assert time.monotonic() < deadline, "who subscribes to our topic comes back"
        bench.publisher.publish([])
        if subscriber.poll(20):
            last = int.from_bytes(receive(subscriber)[1], "big")


def test_subscriptions_that_end_make_room_and_ours_need_none(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    subscriber = bench.subscriber(b"kv")
    books = bench.publisher._thread._subscriptions
    foreign = [b"%0100d" % n for n in range(100)]
    other = bench.client(zmq.XSUB, address=bench.events)
    for _ in range(3):
        for sign in (b"\1", b"\0"):
            for topic in (*foreign, b"", b"k", b"kv"):
                other.send(sign + topic)
    for _ in range(1000):
        other.send(b"\1kv")
        other.send(b"\1" + foreign[0])
    _wait(lambda: books._foreign == {foreign[0]})
    for _ in range(500):
        other.send(b"\0" + b"never")
    other.close()
    _wait(lambda: books._foreign == set() and books._bytes == 0)
    bench.publisher.publish(EVENTS)
    assert receive(subscriber)
    assert books is bench.publisher._thread._subscriptions
    assert not caplog.records
    assert subscriptions.FOREIGN_BYTES > 100 * (100 + 32)


def _wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_subscriber_that_does_not_read_sees_a_gap_and_nobody_waits_for_it(bench: Bench) -> None:
    deaf, subscriber = bench.subscriber(queue=1), bench.subscriber()
    longest = 0.0
    large: list[CacheEvent] = [BlockRemoved(block_hashes=[bytes(32)] * 20)]
    last = -1
    for _ in range(24):
        for _ in range(500):
            began = time.perf_counter()
            bench.publisher.publish(large)
            longest = max(longest, time.perf_counter() - began)
        mark = _published(bench)
        while last < mark:
            last = int.from_bytes(receive(subscriber)[1], "big")
    assert longest < 0.2
    numbers = []
    while deaf.poll(300):
        numbers.append(int.from_bytes(deaf.recv_multipart()[1], "big"))
    assert len(numbers) < last
    client = bench.client()
    client.send_multipart((b"", packed(last - 3)))
    assert answer(client) == list(range(last - 3, last + 1))


def _published(bench: Bench) -> int:
    """Number of the last batch."""
    return bench.publisher._number - 1


def test_a_thread_that_is_behind_costs_batches_not_time(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    go_on = threading.Event()
    add = Backlog.add

    def late(self: Backlog, number: int, payload: bytes) -> None:
        go_on.wait()
        add(self, number, payload)

    monkeypatch.setattr(Backlog, "add", late)
    began = time.perf_counter()
    try:
        for _ in range(5000):
            bench.publisher.publish(EVENTS)
        assert time.perf_counter() - began < 2
    finally:
        go_on.set()
    time.sleep(0.3)
    bench.publisher.publish(EVENTS)
    client = bench.client()
    client.send_multipart(ASK_ALL)
    numbers = answer(client)
    assert numbers[-1] == 5000
    assert numbers[:-1] == list(range(len(numbers) - 1))
    assert 1000 < len(numbers) < 4000
    assert [record.message for record in caplog.records] == ["cache events are dropped: publishing does not keep up"]


def test_a_thread_that_dies_is_told_once(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    thread = bench.publisher._thread
    thread._sockets[1].close()
    bench.publisher.publish(EVENTS)
    thread.join(5)
    assert not thread.is_alive()
    for _ in range(5000):
        bench.publisher.publish(EVENTS)
    assert [(record.levelno, record.message) for record in caplog.records] == [
        (logging.ERROR, "cache events are no longer published; serving goes on")
    ]
    began = time.perf_counter()
    bench.publisher.close()
    assert time.perf_counter() - began < 1


def test_a_path_that_another_has_taken_is_left_to_it(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that dies gives its path up at once, and not once more at the end."""
    thread = bench.publisher._thread
    monkeypatch.setattr(thread, "_keep", lambda: 1 / 0)
    bench.publisher.publish(EVENTS)
    thread.join(5)
    assert not thread.is_alive()
    assert not Path(bench.events.removeprefix("ipc://")).exists()
    other = EventPublisher(bench.events)
    try:
        bench.publisher.close()
        subscriber = bench.client(zmq.SUB, address=bench.events)
        subscriber.subscribe(b"")

        def heard() -> bool:
            other.publish(EVENTS)
            return subscriber.poll(20) > 0

        _wait(heard)
    finally:
        other.close()


@pytest.mark.parametrize("ends", [False, True], ids=["free again", "the end comes first"])
def test_an_address_that_is_taken_in_a_reset(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, ends: bool
) -> None:
    """What comes meanwhile can be asked for afterwards; it takes as long as it takes."""
    thread = bench.publisher._thread
    taken = threading.Event()
    taken.set()
    bind = thread._bound_events

    def bound() -> Socket:
        if taken.is_set():
            raise PortError("taken")
        return bind()

    monkeypatch.setattr(publish, "_LATE_S", 0.1)
    monkeypatch.setattr(thread, "_bound_events", bound)
    monkeypatch.setattr(thread._subscriptions, "hear", lambda _: False)
    for _ in range(3000):
        bench.publisher.publish([])
        time.sleep(0.0002)
    assert thread.is_alive()
    if not ends:
        taken.clear()
        client = bench.client()
        client.send_multipart(ASK_ALL)
        assert answer(client) == list(range(3000))
    bench.publisher.close()
    assert not thread.is_alive()
    assert [record.levelname for record in caplog.records] == ["WARNING", "ERROR"]
    assert "is taken" in caplog.records[1].message


def test_closing_does_not_wait_for_those_who_do_not_read(bench: Bench, tmp_path: Path) -> None:
    bench.subscriber(queue=1)
    large: list[CacheEvent] = [BlockRemoved(block_hashes=[bytes(32)] * 600)]
    for _ in range(600):
        bench.publisher.publish(large)
    bench.client(queue=1).send_multipart(ASK_ALL)
    time.sleep(0.2)
    began = time.perf_counter()
    bench.publisher.close()
    assert time.perf_counter() - began < 1
    EventPublisher(bench.events, bench.replays).close()


def test_addresses_that_are_taken(bench: Bench, tmp_path: Path) -> None:
    """ZMQ would take the socket from a server that runs, and delete a file that is in the way."""
    for events, replays in ((bench.events, ""), (f"ipc://{tmp_path}/other", bench.replays)):
        with pytest.raises(PortError, match="address already in use") as caught:
            EventPublisher(events, replays)
        assert caught.value.hint.startswith("stop the program that has it")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(PortError, match=f"published on {address}: address already in use"):
            EventPublisher(address)
    precious = tmp_path / "precious"
    precious.write_text("data")
    with pytest.raises(PortError, match="file exists"):
        EventPublisher(f"ipc://{precious}")
    assert precious.read_text() == "data"
    with pytest.raises(PortError, match="no such file or directory") as caught:
        EventPublisher(f"ipc://{tmp_path}/absent/events")
    assert caught.value.hint == "the folder must exist"
    with pytest.raises(PortError, match="cannot assign requested address"):
        EventPublisher("tcp://192.0.2.1:5557")
    bench.publisher.publish(EVENTS)
    client = bench.client()
    client.send_multipart(ASK_ALL)
    assert answer(client) == [0]


def test_what_a_killed_process_left_is_replaced(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / "events"))
    EventPublisher(f"ipc://{tmp_path}/events").close()
    assert not (tmp_path / "events").exists()
