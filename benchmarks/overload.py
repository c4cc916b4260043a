"""Does every request get exactly one outcome, and does the work go on, when 20 times too many clients ask?

Starts a real ``perilune serve``: the bundled model, an engine process, a queue as long as a batch. Capacity is what the
engine runs at once. Rounds of two equal spans: ``capacity`` clients that ask again as soon as they are answered, then
20 times as many; those who are refused come back when the server said. Goodput is right answers per second in a span's
middle, so that neither its start nor its end counts; the ratio is the median over the rounds, since on a shared machine
only neighbours can be compared. Then one fault: the engine process is stopped for a while with streams open.

Every request is a line of the history (``load.history``) that the invariants I1–I7 are judged by. Greedy answers are
compared with those that the idle server gave.

    python benchmarks/overload.py --json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import statistics
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.load.client import Address, Ask, ask, get
from benchmarks.load.facts import machine, percentile, questions
from benchmarks.load.history import Answer, Attempt, Fault, Run, violations
from benchmarks.load.server import Served, completed, serve

MODEL = "pico"
RAMP_S = 2.0
DEADLINE_S = 120.0
DETECT_S = RECOVER_S = 5.0
STREAMED_SHARE = 0.75


@dataclass(slots=True)
class Crowd:
    """Clients that ask one question after the other. ``stop`` ends them after their current one."""

    address: Address
    run: Run
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    retries: list[float] = field(default_factory=list)

    async def client(self, rng: random.Random) -> None:
        """One of them. It comes back when the server said, and a little later, as SDKs do."""
        names = list(self.run.golden)
        await self._pause(rng.uniform(0, RAMP_S))
        while not self.stop.is_set():
            wish = Ask(MODEL, rng.choice(names), rng.random() < STREAMED_SHARE)
            attempt = await ask(self.address, wish, DEADLINE_S)
            self.run.attempts.append(attempt)
            if attempt.end == "unreachable":
                await asyncio.sleep(0.5)
            elif attempt.rejected:
                self.retries.append(attempt.retry_after or 0.0)
                await self._pause((attempt.retry_after or 0.1) * rng.uniform(1.0, 1.25))

    async def _pause(self, seconds: float) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self.stop.wait(), seconds)


async def golden(address: Address, names: list[str]) -> dict[str, Answer]:
    """The answers of an idle server, one at a time.

    Raises:
        RuntimeError: one of them is not whole.
    """
    found = {}
    for name in names:
        attempt = await ask(address, Ask(MODEL, name, streamed=False), DEADLINE_S)
        if attempt.answer is None:
            raise RuntimeError(f"{name!r} got no answer from an idle server: {attempt.end} {attempt.note}")
        found[name] = attempt.answer
    return found


async def span(server: Served, run: Run, clients: int, seconds: float) -> dict[str, Any]:
    """``clients`` at once for ``seconds`` after a ramp; what came of it."""
    first = len(run.attempts)
    crowd = Crowd(server.address, run)
    cpu = server.cpu_seconds()
    tasks = [asyncio.create_task(crowd.client(random.Random(f"{first} {index}"))) for index in range(clients)]
    await asyncio.sleep(2 * RAMP_S)
    begun = time.monotonic()
    lag = await _lag(seconds)
    ended = time.monotonic()
    crowd.stop.set()
    await asyncio.gather(*tasks)
    used = {name: round((after - cpu[name]), 2) for name, after in server.cpu_seconds().items()}
    return _summary(run, run.attempts[first:], (begun, ended)) | {
        "clients": clients,
        "cpu_s": used,
        "client_lag_p99_ms": round(1e3 * percentile(lag, 0.99), 1),
        "retry_after_s": round(statistics.median(crowd.retries), 1) if crowd.retries else None,
    }


def _summary(run: Run, attempts: list[Attempt], window: tuple[float, float]) -> dict[str, Any]:
    begun, ended = window
    good = [
        attempt
        for attempt in attempts
        if attempt.end == "complete"
        and begun <= attempt.ended < ended
        and attempt.answer == run.golden[attempt.question]
    ]
    rejections = [attempt.seconds for attempt in attempts if attempt.rejected]
    return {
        "sent": len(attempts),
        "goodput": round(len(good) / (ended - begun), 3),
        "ends": dict(Counter(attempt.end for attempt in attempts)),
        "rejected": len(rejections),
        "p99_rejection_ms": round(1e3 * percentile(rejections, 0.99), 1) if rejections else None,
        "p99_answer_s": round(percentile([attempt.seconds for attempt in good], 0.99), 2) if good else None,
    }


async def _lag(seconds: float) -> list[float]:
    """Sleeps; how late this client's own loop was meanwhile."""
    lags, end = [], time.monotonic() + seconds
    while (now := time.monotonic()) < end:
        await asyncio.sleep(0.02)
        lags.append(time.monotonic() - now - 0.02)
    return lags


async def watch_ready(address: Address, run: Run) -> None:
    """Counts the times that a healthy server calls itself unready, until cancelled."""
    while True:
        status, _ = await get(address, "/ready", deadline_s=DETECT_S)
        run.unready += status != 200
        await asyncio.sleep(0.25)


async def stop_engine(server: Served, run: Run) -> Fault:
    """The fault: the engine's process is stopped, then goes on. Streams that were open must still end well."""
    names = list(run.golden)
    tasks = [asyncio.create_task(ask(server.address, Ask(MODEL, name), DEADLINE_S)) for name in names[:8]]
    await asyncio.sleep(0.1)
    server.engine.send_signal(signal.SIGSTOP)
    try:
        detected = await _until(server.address, lambda status: status == 503, 2 * DETECT_S)
    finally:
        server.engine.send_signal(signal.SIGCONT)
    recovered = await _until(server.address, lambda status: status == 200, 4 * RECOVER_S)
    run.attempts += await asyncio.gather(*tasks)
    return Fault("engine process stopped", detected, recovered, DETECT_S, RECOVER_S)


async def _until(address: Address, wanted: Any, within_s: float) -> float | None:
    """Seconds until ``/ready`` has a status that is wanted; None: not in time."""
    began = time.monotonic()
    while (now := time.monotonic() - began) < within_s:
        status, _ = await get(address, "/ready", deadline_s=1.0)
        if wanted(status):
            return round(now, 2)
        await asyncio.sleep(0.05)
    return None


def server_options(args: argparse.Namespace) -> list[str]:
    """The command line of the server."""
    capacity = str(args.capacity)
    return ["--max-model-len", "1024", "--max-num-seqs", capacity, "--max-queue", capacity, *args.server_option]


async def run_all(args: argparse.Namespace, server: Served) -> dict[str, Any]:
    """Everything on one server; the summary that ``--json`` prints."""
    run = Run(await golden(server.address, questions(args.questions)))
    run.before = await server.quiet()
    before = await completed(server.address)
    watching = asyncio.create_task(watch_ready(server.address, run))
    rounds = []
    for _ in range(args.rounds):
        pair = {
            "capacity": await span(server, run, args.capacity, args.seconds),
            "overload": await span(server, run, args.capacity * args.times, args.seconds),
        }
        rounds.append(pair)
        _say(pair)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    if args.fault:
        run.faults.append(await stop_engine(server, run))
    run.after = await server.quiet()
    after = await completed(server.address)
    run.counted = None if before is None or after is None else after - before
    return _verdict(run, rounds, args)


def _verdict(run: Run, rounds: list[dict[str, Any]], args: argparse.Namespace) -> dict[str, Any]:
    attempts = run.attempts
    ratios = [pair["overload"]["goodput"] / pair["capacity"]["goodput"] for pair in rounds]
    broken = violations(run)
    rejections = [attempt.seconds for attempt in attempts if attempt.rejected]
    return {
        "lost": sum(attempt.lost for attempt in attempts),
        "duplicated": broken["I3"],
        "five_xx": sum(attempt.server_fault for attempt in attempts),
        "rejected": len(rejections),
        "goodput_ratio": round(statistics.median(ratios), 3),
        "goodput_ratios": [round(ratio, 3) for ratio in ratios],
        "p99_rejection_ms": round(1e3 * percentile(rejections, 0.99), 1) if rejections else None,
        "sent": len(attempts),
        "statuses": {str(status): count for status, count in sorted(Counter(a.status for a in attempts).items())},
        "ends": dict(Counter(attempt.end for attempt in attempts)),
        "violations": broken,
        "faults": [
            {"name": fault.name, "detected_s": fault.detected_s, "recovered_s": fault.recovered_s}
            for fault in run.faults
        ],
        "completed_by_server": run.counted,
        "unready": run.unready,
        "at_rest": [None if quiet is None else asdict(quiet) for quiet in (run.before, run.after)],
        "notes": dict(Counter(a.note for a in attempts if a.lost or a.server_fault).most_common(5)),
        "capacity": args.capacity,
        "clients": args.capacity * args.times,
        "rounds": rounds,
        "machine": machine(),
    }


def _say(pair: dict[str, Any]) -> None:
    for name, row in pair.items():
        print(
            f"{name:9} {row['clients']:4} clients  {row['goodput']:7.2f} right answers/s  {row['sent']:6} sent  "
            f"{row['rejected']:6} rejected in {row['p99_rejection_ms']} ms (p99)  ends {row['ends']}",
            file=sys.stderr,
            flush=True,
        )


def main() -> int:
    """Exit code 1 if an invariant was broken, something was lost, or goodput fell under 90 %."""
    parser = argparse.ArgumentParser(description="Ask 20 times too much of a server.")
    parser.add_argument("--capacity", type=int, default=16, help="requests that the engine runs at once")
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=10.0, help="of a span's counted middle")
    parser.add_argument("--questions", type=int, default=24)
    parser.add_argument(
        "--fault", action=argparse.BooleanOptionalAction, default=True, help="stop the engine at the end"
    )
    parser.add_argument("--server-option", action="append", default=[], help="more for perilune serve; may be repeated")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON on stdout")
    args = parser.parse_args()
    with serve(server_options(args)) as server, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        summary = runner.run(run_all(args, server))
    if args.json:
        print(json.dumps(summary))
    else:
        names = ("lost", "duplicated", "five_xx", "rejected", "goodput_ratio", "p99_rejection_ms", "violations")
        print("\n".join(f"{name}: {summary[name]}" for name in names))
    kept = not any(summary["violations"].values()) and not summary["five_xx"]
    return 0 if kept and summary["goodput_ratio"] >= 0.9 else 1


if __name__ == "__main__":
    sys.exit(main())
