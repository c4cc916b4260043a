"""Addresses for cache events: which may be given, which need a word more, and what is said of the others."""

from __future__ import annotations

import pytest

from perilune.engine.addresses import check_event_addresses
from perilune.engine.options import EngineOptions
from perilune.errors import UsageError


def options(events: str = "", replay: str = "", topic: str = "") -> EngineOptions:
    return EngineOptions(kv_events=events, kv_events_replay=replay, kv_events_topic=topic)


def endpoint(events: str, *, public: bool = False) -> str:
    checked = check_event_addresses(options(events), public=public)
    assert check_event_addresses(checked, public=public) == checked
    return checked.kv_events


@pytest.mark.parametrize(
    "address",
    [
        "tcp://127.0.0.1:5557",
        "tcp://127.250.0.1:1",
        "tcp://[::1]:65535",
        "ipc:///run/perilune/events",
        "ipc://events",
        "ipc://@events",
    ],
)
def test_addresses_of_this_machine(address: str) -> None:
    assert endpoint(address) == address


def test_names_are_looked_up_once() -> None:
    assert endpoint("tcp://localhost:5557") in ("tcp://127.0.0.1:5557", "tcp://[::1]:5557")


@pytest.mark.parametrize(
    "address",
    [
        "tcp://*:5557",
        "tcp://0.0.0.0:5557",
        "tcp://[::]:5557",
        "tcp://192.0.2.1:5557",
        "tcp://[2001:db8::1]:5557",
        "tcp://[::ffff:127.0.0.1]:5557",
        "tcp://lo:5557",
    ],
)
def test_addresses_that_others_can_reach_must_be_meant(address: str) -> None:
    assert endpoint(address, public=True).endswith(":5557")
    with pytest.raises(UsageError, match="can be reached from other machines") as caught:
        endpoint(address)
    assert "tokens of prompts" in caught.value.message
    assert "ipc://" in caught.value.hint
    with pytest.raises(UsageError, match=r"--kv-events-replay .* can be reached"):
        check_event_addresses(options("ipc:///tmp/events", address), public=False)


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("nope", "neither with tcp:// nor with ipc://"),
        ("127.0.0.1:5557", "neither with tcp://"),
        ("inproc://x", "neither with tcp://"),
        ("pgm://eth0;239.0.0.1:5557", "neither with tcp://"),
        ("TCP://127.0.0.1:5557", "neither with tcp://"),
        ("tcp://127.0.0.1", "a host, a colon and a port"),
        ("tcp://*", "a host, a colon and a port"),
        ("tcp://:5557", "a host, a colon and a port"),
        ("tcp://::1:5557", "IPv6 stands in brackets"),
        ("tcp://127.0.0.1:-1", "a host, a colon and a port"),
        ("tcp://127.0.0.1:*", "a host, a colon and a port"),
        ("tcp://127.0.0.1:5557/x", "a host, a colon and a port"),
        ("tcp://127.0.0.1:٥٥٥٧", "a host, a colon and a port"),
        ("tcp://127.0.0.1;127.0.0.2:5557", "a host, a colon and a port"),
        ("tcp://127.0.0.1:99999", "from 1 to 65535"),
        ("tcp://127.0.0.1:0", "from 1 to 65535"),
        ("tcp://no.such.host.invalid:5557", "no known host"),
        ("tcp://[no]:5557", "no known host"),
        (f"tcp://{'x' * 300}:5557", "no known host"),
        ("tcp://a\0b:5557", "no known host"),
        ("ipc://", "the path of a socket"),
        ("ipc://*", "the path of a socket"),
        ("ipc://@", "the path of a socket"),
        ("ipc:///tmp/a\nb", "at most 107"),
        (f"ipc:///tmp/{'x' * 103}", "at most 107"),
        ("ipc:///tmp/\udcff", "at most 107"),
    ],
)
def test_what_is_no_address(address: str, why: str) -> None:
    for option, given in (
        ("--kv-events", options(address)),
        ("--kv-events-replay", options("ipc:///tmp/events", address)),
    ):
        with pytest.raises(UsageError, match=why) as caught:
            check_event_addresses(given, public=True)
        assert caught.value.message.startswith(f"{option} is {address[:120]!r}: ")
        assert "tcp://127.0.0.1:5557" in caught.value.hint


@pytest.mark.parametrize(
    ("events", "replay"),
    [
        ("ipc:///tmp/events", "ipc:///tmp/events"),
        ("tcp://127.0.0.1:5557", "tcp://localhost:5557"),
        ("tcp://*:5557", "tcp://127.0.0.1:5557"),
        ("tcp://[::1]:5557", "tcp://[::]:05557"),
    ],
)
def test_two_that_are_one(events: str, replay: str) -> None:
    with pytest.raises(UsageError, match="is the address of --kv-events"):
        check_event_addresses(options(events, replay), public=True)


def test_options_that_make_no_sense_alone() -> None:
    with pytest.raises(UsageError, match="--kv-events-replay is 'ipc:///tmp/x', but no events are published"):
        check_event_addresses(options(replay="ipc:///tmp/x"), public=False)
    with pytest.raises(UsageError, match="--kv-events-topic is 'kv', but no events are published"):
        check_event_addresses(options(topic="kv"), public=False)
    for topic in ("x" * 256, "a\nb", "\udcff"):
        with pytest.raises(UsageError, match="at most 255 printable characters"):
            check_event_addresses(options("ipc:///tmp/x", topic=topic), public=False)
    with pytest.raises(UsageError, match="--no-prefix-cache"):
        check_event_addresses(EngineOptions(kv_events="ipc:///tmp/x", prefix_cache=False), public=False)
    assert check_event_addresses(options(), public=False) == options()
