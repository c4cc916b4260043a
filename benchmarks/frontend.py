"""What does the front end cost? Many open streams at 20 tokens a second each, an engine that is a script, one core.

The server (``load.scripted``: everything real but the engine) is pinned to one core, this client to another. Each
event is due at a time that the script set; its added delay is how much later this client had its bytes. Events are
timed by the read that brought them, before anything is parsed. Streams are opened a few at a time, and only what
comes after the last has begun is counted. ``…_waited_share`` is time that others had the core: where it is not near 0
the machine was not ours, and delays say little; CPU seconds per event still do. ``--realtime`` keeps others off (root).

``streams`` open streams are measured first, then the sweep: the largest number of streams that holds the bar. With
``--phases 1`` all streams step at the same moment, as in a batch; the default spreads them over a period, as many
engines behind one front end do.

    python benchmarks/frontend.py --json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.load.client import Address, Ask
from benchmarks.load.facts import machine, percentile, waited_for_a_core
from benchmarks.load.scripted import PERIOD_S

BAR_MS = 50.0
SWEEP = (64, 128, 192, 256, 320, 384, 448, 500, 576, 640, 768, 896, 1024)
OPEN_PER_S = 100
WARM_S = 2.0
_FIRST = re.compile(rb'"(?:reasoning_)?content":"(\d+)"')


class Stream(asyncio.Protocol):
    """One open stream: when each of its events came, against when it was due. Delays in seconds."""

    def __init__(self, request: bytes, counting: Window) -> None:
        self._request, self._counting = request, counting
        self._head = b""
        self._next_due = 0.0
        self.status = 0
        self.cut = False
        self.begun = asyncio.get_running_loop().create_future()
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's has all of it but the base class
        self.transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        if self._next_due:
            for _ in range(data.count(b"data: ")):
                self._counting.take(now, now - self._next_due)
                self._next_due += PERIOD_S
            return
        self._head += data
        if not self.status and b"\r\n" in self._head:
            self.status = int(self._head.split(b" ", 2)[1])
        if found := _FIRST.search(self._head):
            self._next_due = int(found[1]) / 1e6 + PERIOD_S * self._head.count(b"data: ")
            self._head = b""
            self._settle()

    def connection_lost(self, exc: Exception | None) -> None:
        self.cut = True
        self._settle()

    def _settle(self) -> None:
        if not self.begun.done():
            self.begun.set_result(None)


@dataclass(slots=True)
class Window:
    """Events that count, and those that came while none did."""

    open: bool = False
    delays: list[float] = field(default_factory=list)
    last: float = 0.0

    def take(self, now: float, delay: float) -> None:
        """One event."""
        if self.open:
            self.delays.append(delay)
            self.last = now


@dataclass(frozen=True, slots=True)
class Scripted:
    """The server process."""

    address: Address
    process: subprocess.Popen[str]

    def say(self, word: str) -> None:
        """One command."""
        assert self.process.stdin is not None  # noqa: S101 - it was opened with one
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()

    async def tell(self) -> dict[str, Any]:
        """What the window has cost."""
        self.say("tell")
        assert self.process.stdout is not None  # noqa: S101 - it was opened with one
        return dict(json.loads(await asyncio.to_thread(self.process.stdout.readline)))


@contextmanager
def scripted(phases: int, core: int, profile: str) -> Iterator[Scripted]:
    """Starts the server on one core, for a block.

    Raises:
        RuntimeError: it did not start.
    """
    command = [sys.executable, "-m", "benchmarks.load.scripted", str(phases), profile]
    root = Path(__file__).resolve().parent.parent
    with subprocess.Popen(  # noqa: S603 - our own module
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root
    ) as process:
        os.sched_setaffinity(process.pid, {core})
        try:
            assert process.stdout is not None  # noqa: S101 - it was opened with one
            found = re.match(r"http://([\d.]+):(\d+)$", process.stdout.readline())
            if found is None:
                raise RuntimeError("the scripted server did not start")
            yield Scripted((found[1], int(found[2])), process)
        finally:
            process.terminate()


async def open_streams(server: Scripted, count: int, window: Window) -> list[Stream]:
    """``count`` streams, a few at a time; returns when each has begun or failed."""
    loop = asyncio.get_running_loop()
    request = Ask("script", "Go.", max_tokens=1 << 16).encode(server.address)
    streams = []
    for _ in range(count):
        _, stream = await loop.create_connection(lambda: Stream(request, window), *server.address)
        streams.append(stream)
        await asyncio.sleep(1 / OPEN_PER_S)
    await asyncio.wait([stream.begun for stream in streams], timeout=30)
    return streams


async def measure(server: Scripted, streams: Sequence[Stream], window: Window, seconds: float) -> dict[str, Any]:
    """One window over all open streams."""
    await asyncio.sleep(WARM_S)
    window.delays.clear()
    server.say("mark")
    window.open, began = True, time.monotonic()
    client_cpu, client_waited = time.process_time(), waited_for_a_core()
    await asyncio.sleep(seconds)
    window.open, took = False, time.monotonic() - began
    client_cpu, client_waited = time.process_time() - client_cpu, waited_for_a_core() - client_waited
    cost = await server.tell()
    live = [stream for stream in streams if stream.status == 200 and not stream.cut]
    events, wanted = len(window.delays), len(streams) * took / PERIOD_S
    return {
        "streams": len(live),
        "failed": len(streams) - len(live),
        "events": events,
        "events_of_schedule": round(events / wanted, 4),
        "p50_added_ms": round(1e3 * percentile(window.delays, 0.5), 2),
        "p99_added_ms": round(1e3 * percentile(window.delays, 0.99), 2),
        "max_added_ms": round(1e3 * max(window.delays, default=float("nan")), 2),
        "cpu_s_per_1000_events": round(1e3 * cost["cpu_s"] / max(events, 1), 4),
        "server_cpu_share": round(cost["cpu_s"] / cost["seconds"], 3),
        "server_waited_share": round(cost["waited_s"] / cost["seconds"], 3),
        "client_cpu_share": round(client_cpu / took, 3),
        "client_waited_share": round(client_waited / took, 3),
        "loop_lag_p50_ms": round(cost["loop_lag_p50_ms"], 2),
        "loop_lag_p99_ms": round(cost["loop_lag_p99_ms"], 2),
    }


def holds(row: dict[str, Any]) -> bool:
    """Whether a window keeps the bar, with every stream alive and no event missing."""
    return bool(row["failed"] == 0 and row["p99_added_ms"] <= BAR_MS and row["events_of_schedule"] > 0.98)


async def run(args: argparse.Namespace) -> dict[str, Any]:
    """Both measurements; the summary that ``--json`` prints."""
    with scripted(args.phases, args.server_core, args.profile) as server:
        window = Window()
        main = await measure(server, await open_streams(server, args.streams, window), window, args.seconds)
    _say(main)
    rows: list[dict[str, Any]] = []
    if args.sweep:
        with scripted(args.phases, args.server_core, "") as server:
            window, streams = Window(), list[Stream]()
            for count in SWEEP:
                streams += await open_streams(server, count - len(streams), window)
                rows.append(await measure(server, streams, window, args.sweep_seconds))
                _say(rows[-1])
                if not holds(rows[-1]):
                    break
    return {
        **main,
        "bar_p99_ms": BAR_MS,
        "holds": holds(main),
        "largest_that_holds": max((row["streams"] for row in [main, *rows] if holds(row)), default=0),
        "tokens_per_s_per_stream": round(1 / PERIOD_S),
        "phases": args.phases,
        "realtime": args.realtime,
        "seconds": args.seconds,
        "sweep": rows,
        "machine": machine(),
    }


def _say(row: dict[str, Any]) -> None:
    print(
        f"{row['streams']:5} streams  p50 {row['p50_added_ms']:8.2f} ms  p99 {row['p99_added_ms']:8.2f} ms  "
        f"{row['cpu_s_per_1000_events']:.4f} CPU s/1000 events  server {row['server_cpu_share']:.0%} "
        f"(waited {row['server_waited_share']:.0%})  client {row['client_cpu_share']:.0%} "
        f"(waited {row['client_waited_share']:.0%})  lag p99 {row['loop_lag_p99_ms']:.1f} ms",
        file=sys.stderr,
        flush=True,
    )


def main() -> int:
    """Exit code 1 if the bar is missed."""
    parser = argparse.ArgumentParser(description="Measure the delay that the server adds to streams.")
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=20.0, help="of the measured window")
    parser.add_argument("--sweep", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--sweep-seconds", type=float, default=6.0)
    parser.add_argument(
        "--phases", type=int, default=20, help="moments of a period at which streams step; 1: all at once"
    )
    parser.add_argument("--server-core", type=int, default=0)
    parser.add_argument("--client-core", type=int, default=1)
    parser.add_argument("--realtime", action="store_true", help="keep others off both cores meanwhile; needs root")
    parser.add_argument("--profile", default="", help="where to write cProfile's figures of the server's window")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON on stdout")
    args = parser.parse_args()
    if args.realtime:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    os.sched_setaffinity(0, {args.client_core})
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        summary = runner.run(run(args))
    if args.json:
        print(json.dumps(summary))
    else:
        print(
            f"{summary['streams']} streams: p99 {summary['p99_added_ms']} ms; "
            f"{summary['largest_that_holds']} streams hold {BAR_MS:g} ms"
        )
    return 0 if summary["holds"] else 1


if __name__ == "__main__":
    sys.exit(main())
