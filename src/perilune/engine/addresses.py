"""ZMQ addresses for cache events, as an operator gives them: what they may be, and who could reach them.

    tcp://HOST:PORT     HOST: an IPv4 address, [an IPv6 address], a name, an interface, or * for all of them
    ipc://PATH          a socket file; its folder decides who may connect. ipc://@NAME: no file, this machine's users

Stricter than ZMQ, which binds port 99999 as 34463, and takes addresses that nobody could subscribe to. ZMQ does not
look names up where it binds; here that is done once, so that what was checked is what is bound. Torch-free.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from dataclasses import dataclass, replace
from typing import Final

from perilune.engine.options import EngineOptions
from perilune.errors import UsageError

EXAMPLES: Final = "an address looks like tcp://127.0.0.1:5557 or ipc:///run/perilune/events"
_TCP: Final = re.compile(r"tcp://(\[[^\[\]]+\]|[^\[\]:;/]+):([0-9]{1,9})")
_LONGEST_PATH: Final = 107
_LONGEST_TOPIC: Final = 255
_ALL: Final = ("*", "0.0.0.0", "[::]")  # noqa: S104 - compared, not bound


def check_event_addresses(options: EngineOptions, *, public: bool) -> EngineOptions:
    """``options`` with the addresses as ZMQ binds them; a second call changes nothing.

    Args:
        public: others may reach the addresses: that is safe, or meant.

    Raises:
        UsageError: an address that cannot be, or may not be, one for cache events; or options that make no sense
            together.
    """
    if not options.kv_events:
        _check_unused(options)
        return options
    if not options.prefix_cache:
        raise UsageError(
            "--kv-events tells what the prefix cache holds, and --no-prefix-cache turns that off",
            hint="leave one of them out",
        )
    topic = options.kv_events_topic
    if len(topic) > _LONGEST_TOPIC or not (topic or "x").isprintable():
        raise UsageError(
            f"--kv-events-topic is {topic[:80]!r}, at most {_LONGEST_TOPIC} printable characters are allowed"
        )
    events = _parse("--kv-events", options.kv_events)
    replay = _parse("--kv-events-replay", options.kv_events_replay) if options.kv_events_replay else None
    if replay is not None and events.meets(replay):
        raise UsageError(
            f"--kv-events-replay {options.kv_events_replay} is the address of --kv-events, each needs one of its own",
            hint="another port, or another path",
        )
    for address in (events, replay):
        if address is not None and address.public and not public:
            raise UsageError(
                f"{address.option} {address.text} can be reached from other machines, and cache events carry the "
                "tokens of prompts to whoever asks",
                hint="use 127.0.0.1 or ipc://; where the network is fenced, say --insecure-no-auth or have keys",
            )
    return replace(options, kv_events=events.endpoint, kv_events_replay="" if replay is None else replay.endpoint)


@dataclass(frozen=True, slots=True)
class _Address:
    option: str
    text: str
    host: str  # as ZMQ takes it; empty: a path
    place: str  # port or path
    public: bool = False

    @property
    def endpoint(self) -> str:
        return f"tcp://{self.host}:{self.place}" if self.host else f"ipc://{self.place}"

    def meets(self, other: _Address) -> bool:
        """Whether both cannot be bound at once."""
        if self.place != other.place or bool(self.host) != bool(other.host):
            return False
        return self.host == other.host or self.host in _ALL or other.host in _ALL


def _check_unused(options: EngineOptions) -> None:
    for option, value in (
        ("--kv-events-replay", options.kv_events_replay),
        ("--kv-events-topic", options.kv_events_topic),
    ):
        if value:
            raise UsageError(
                f"{option} is {value[:120]!r}, but no events are published",
                hint=f"give --kv-events ADDRESS too, or leave it out; {EXAMPLES}",
            )


def _parse(option: str, text: str) -> _Address:
    if text.startswith("ipc://"):
        return _parse_path(option, text)
    if not text.startswith("tcp://"):
        raise _refused(option, text, "it begins neither with tcp:// nor with ipc://")
    if (match := _TCP.fullmatch(text)) is None:
        raise _refused(option, text, "behind tcp:// come a host, a colon and a port; IPv6 stands in brackets")
    host, port = match[1], int(match[2])
    if not 1 <= port <= 65535:
        raise _refused(option, text, "the port must be one from 1 to 65535, since subscribers have to know it")
    if host == "*":
        return _Address(option, text, host, str(port), public=True)
    try:
        numeric = ipaddress.ip_address(host.strip("[]") if host.startswith("[") else host)
    except ValueError:
        return _parse_name(option, text, host, str(port))
    return _Address(option, text, _bracketed(numeric), str(port), public=not numeric.is_loopback)


def _parse_path(option: str, text: str) -> _Address:
    path = text.removeprefix("ipc://")
    if path in ("", "*", "@"):
        raise _refused(option, text, "behind ipc:// comes the path of a socket, which subscribers have to know")
    if not path.isprintable() or len(os.fsencode(path)) > _LONGEST_PATH:
        raise _refused(option, text, f"the path of a socket has at most {_LONGEST_PATH} printable characters")
    return _Address(option, text, "", path)


def _parse_name(option: str, text: str, host: str, port: str) -> _Address:
    """An interface, which ZMQ knows itself, or a name, which is looked up; IPv4 first, as subscribers do."""
    try:
        socket.if_nametoindex(host)
    except (OSError, ValueError):
        pass
    else:
        return _Address(option, text, host, port, public=True)
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise _refused(option, text, f"{host!r} is no known host, nor an interface of this machine") from None
    addresses = sorted((ipaddress.ip_address(str(each[4][0])) for each in found), key=lambda each: each.version)
    return _Address(option, text, _bracketed(addresses[0]), port, public=not addresses[0].is_loopback)


def _bracketed(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str:
    return f"[{address}]" if address.version == 6 else str(address)


def _refused(option: str, text: str, why: str) -> UsageError:
    return UsageError(f"{option} is {text[:120]!r}: {why}", hint=EXAMPLES)
