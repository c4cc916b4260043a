"""Does a server that works for long keep anything? Memory, descriptors, blocks against requests done.

Starts a real ``perilune serve`` (the bundled model, an engine process), looks at it idle, measures what it can do, then
asks 70 % of that: requests arrive at random (Poisson), a tenth of the clients leave, before the answer or in its
middle. Every few seconds it is looked at from outside: RssAnon + VmSwap and descriptors of both processes, cache blocks
that requests own. The slope of memory is taken over requests done, without the first third (caches and allocators fill
up once), and never more requests are open than while the capacity was measured (memory for a crowd is no leak).
Bar: 1 MB per 10 000 requests, descriptors and children as at the start, no block owned at rest.

    python benchmarks/soak.py --json --seconds 600
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Coroutine
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.load.client import Ask, ask
from benchmarks.load.facts import machine, questions, slope
from benchmarks.load.history import Attempt, Quiet
from benchmarks.load.server import Served, serve, used_blocks

MODEL = "pico"
LOAD = 0.7
LEAVING_SHARE = 0.1
MAX_TOKENS = 16  # short answers: more requests in the time, and those are what the slope is taken over
DEADLINE_S = 120.0
WARM_SHARE = 1 / 3
BAR_MB = 1.0
MAX_OPEN = 48


@dataclass(frozen=True, slots=True)
class Look:
    """The server at one moment. ``done``: requests that have ended by then; memory in MB."""

    at_s: float
    done: int
    memory: dict[str, float]
    descriptors: dict[str, int]
    blocks: int | None


class Arrivals:
    """Requests that come by themselves, whether the server keeps up or not."""

    def __init__(self, server: Served, rng: random.Random) -> None:
        self._server, self._rng = server, rng
        self._names = questions(200)
        self._open: set[asyncio.Task[None]] = set()
        self.attempts: list[Attempt] = []
        self.skipped = 0

    async def run(self, rate: float, seconds: float) -> None:
        """``rate`` per second for ``seconds``; then waits for what is open."""
        start = due = time.monotonic()
        while (due := due + self._rng.expovariate(rate)) < start + seconds:
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            if len(self._open) >= MAX_OPEN:
                self.skipped += 1
                continue
            self._begin(self._one(self._rng.random() < LEAVING_SHARE))
        await asyncio.gather(*self._open)

    async def saturate(self, clients: int, seconds: float) -> float:
        """Answers per second with ``clients`` that ask again at once."""
        end, before = time.monotonic() + seconds, len(self.attempts)

        async def client() -> None:
            while time.monotonic() < end:
                await self._one(leaves=False)

        await asyncio.gather(*(client() for _ in range(clients)))
        return (len(self.attempts) - before) / seconds

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._open.add(task)
        task.add_done_callback(self._open.discard)

    async def _one(self, leaves: bool) -> None:
        rng = self._rng
        leave_after = rng.randrange(MAX_TOKENS) if leaves else None
        wish = Ask(MODEL, rng.choice(self._names), rng.random() < 0.75, MAX_TOKENS, leave_after)
        self.attempts.append(await ask(self._server.address, wish, DEADLINE_S))


async def look(server: Served, began: float, done: int) -> Look:
    """One sample."""
    memory = {name: round(value, 3) for name, value in server.memory_mb().items()}
    return Look(
        round(time.monotonic() - began, 1), done, memory, server.descriptors(), await used_blocks(server.address)
    )


async def idle_cpu(server: Served, seconds: float) -> dict[str, float]:
    """Share of one core, in percent, of each process while nobody asks."""
    before, began = server.cpu_seconds(), time.monotonic()
    await asyncio.sleep(seconds)
    took = time.monotonic() - began
    return {name: round(100 * (after - before[name]) / took, 3) for name, after in server.cpu_seconds().items()}


async def run(args: argparse.Namespace, server: Served) -> dict[str, Any]:
    """Everything; the summary that ``--json`` prints."""
    arrivals = Arrivals(server, random.Random(args.seed))
    idle = await idle_cpu(server, args.idle_seconds)
    capacity = await arrivals.saturate(MAX_OPEN, args.capacity_seconds)
    before = await server.quiet()
    arrivals.attempts.clear()
    rate = LOAD * capacity
    print(f"capacity {capacity:.2f}/s, asking {rate:.2f}/s for {args.seconds:g} s", file=sys.stderr, flush=True)
    looks: list[Look] = []
    working = asyncio.create_task(arrivals.run(rate, args.seconds))
    began = time.monotonic()
    while not working.done():
        looks.append(await look(server, began, len(arrivals.attempts)))
        if len(looks) % 12 == 1:
            _say(looks[-1])
        await asyncio.wait((working,), timeout=args.every)
    await working
    after = await server.quiet()
    looks.append(await look(server, began, len(arrivals.attempts)))
    return _verdict(looks, arrivals, (before, after)) | {
        "idle_cpu_percent": idle,
        "capacity_per_s": round(capacity, 2),
        "asked_per_s": round(rate, 2),
        "machine": machine(),
    }


def _verdict(looks: list[Look], arrivals: Arrivals, rest: tuple[Quiet, Quiet]) -> dict[str, Any]:
    before, after = rest
    attempts = arrivals.attempts
    total = looks[-1].done
    counted = [one for one in looks if one.done >= WARM_SHARE * total]
    done = [float(one.done) for one in counted]
    slopes = {}
    for name in ("server", "engine"):
        found, error = slope(done, [one.memory[name] for one in counted])
        slopes[name] = {"mb_per_10000": round(1e4 * found, 3), "standard_error": round(1e4 * error, 3)}
    leaks = {
        "descriptors": after.descriptors - before.descriptors,
        "children": after.children - before.children,
        "blocks": after.blocks or 0,
        "running": after.running,
        "waiting": after.waiting,
    }
    ends = Counter(attempt.end for attempt in attempts)
    flat = all(one["mb_per_10000"] < BAR_MB for one in slopes.values())
    clean = all(value <= 0 for value in leaks.values())
    unhappy = ends["cut"] + ends["timeout"] + sum(attempt.server_fault for attempt in attempts)
    return {
        "requests": total,
        "seconds": looks[-1].at_s,
        "ends": dict(ends),
        "rejected": sum(attempt.rejected for attempt in attempts),
        "skipped": arrivals.skipped,
        "lost_or_5xx": unhappy,
        "memory_slope": slopes,
        "memory_mb": {"first": looks[0].memory, "last": looks[-1].memory},
        "descriptors": {"first": looks[0].descriptors, "last": looks[-1].descriptors},
        "most_blocks": max((one.blocks or 0 for one in looks), default=0),
        "kept_at_rest": leaks,
        "bar_mb_per_10000": BAR_MB,
        "holds": flat and clean and not unhappy,
        "looks": [asdict(one) for one in looks],
    }


def _say(one: Look) -> None:
    print(
        f"{one.at_s:6.0f} s  {one.done:6} done  memory {one.memory} MB  descriptors {one.descriptors}  "
        f"blocks {one.blocks}",
        file=sys.stderr,
        flush=True,
    )


def main() -> int:
    """Exit code 1 if anything grew."""
    parser = argparse.ArgumentParser(description="Load a server for long, and see what it keeps.")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--every", type=float, default=5.0, help="seconds between two looks")
    parser.add_argument("--idle-seconds", type=float, default=60.0, help="of the idle server before the load")
    parser.add_argument("--capacity-seconds", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--server-option", action="append", default=[], help="more for perilune serve; may be repeated")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON on stdout")
    args = parser.parse_args()
    options = ["--max-model-len", "1024", *args.server_option]
    with serve(options) as server, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        summary = runner.run(run(args, server))
    if args.json:
        print(json.dumps(summary))
    else:
        names = ("requests", "ends", "memory_slope", "kept_at_rest", "idle_cpu_percent", "holds")
        print("\n".join(f"{name}: {summary[name]}" for name in names))
    return 0 if summary["holds"] else 1


if __name__ == "__main__":
    sys.exit(main())
