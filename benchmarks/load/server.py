"""A real ``perilune serve`` for a benchmark: started, waited for, looked at from outside, stopped.

Looks only at what any operator can see: ``/ready``, ``/metrics`` where there is one, and ``/proc``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from benchmarks.load.client import Address, get
from benchmarks.load.history import Quiet

START_S = 180.0
_SAMPLE = re.compile(r"^([a-z_:]+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


@dataclass(frozen=True, slots=True)
class Served:
    """A server that takes requests. ``engine`` is the process of its engine."""

    address: Address
    server: psutil.Process
    engine: psutil.Process

    async def quiet(self, within_s: float = 15.0) -> Quiet:
        """How it stands at rest: waits until nothing runs, at most ``within_s``, and until closed connections have been
        noticed."""
        end = time.monotonic() + within_s
        ready = {"running": -1, "waiting": -1}
        while ready["running"] or ready["waiting"]:
            await asyncio.sleep(0.1)
            status, body = await get(self.address, "/ready")
            ready = json.loads(body) if status == 200 else ready
            if time.monotonic() > end:
                break
        descriptors = []
        for _ in range(10):
            await asyncio.sleep(0.1)
            descriptors.append(self.server.num_fds())
        children = len(self.server.children(recursive=True))
        return Quiet(ready["running"], ready["waiting"], min(descriptors), children, await used_blocks(self.address))

    def memory_mb(self) -> dict[str, float]:
        """RssAnon + VmSwap of both processes: what they hold of their own, files excepted."""
        return {"server": _own_mb(self.server.pid), "engine": _own_mb(self.engine.pid)}

    def descriptors(self) -> dict[str, int]:
        """Open file descriptors of both processes."""
        return {"server": self.server.num_fds(), "engine": self.engine.num_fds()}

    def cpu_seconds(self) -> dict[str, float]:
        """Time on a core of both processes' present threads so far, to the nanosecond where the kernel counts so."""
        return {"server": _cpu_s(self.server), "engine": _cpu_s(self.engine)}


Metrics = dict[str, list[tuple[dict[str, str], float]]]


async def metrics(address: Address) -> Metrics:
    """``/metrics``, by name; empty where the server has none."""
    status, body = await get(address, "/metrics")
    found: Metrics = {}
    if status == 200:
        for name, labels, value in _SAMPLE.findall(body.decode()):
            found.setdefault(name, []).append((dict(_LABEL.findall(labels)), float(value)))
    return found


async def used_blocks(address: Address) -> int | None:
    """Cache blocks that requests own; None where the server does not tell."""
    found = await metrics(address)
    total, share = found.get("perilune_kv_blocks"), found.get("perilune_kv_usage_ratio")
    return round(total[0][1] * share[0][1]) if total and share else None


async def completed(address: Address) -> int | None:
    """Requests that the server says it completed since its start; None where it does not tell."""
    found = (await metrics(address)).get("perilune_requests_total")
    return None if found is None else round(sum(value for labels, value in found if labels["outcome"] == "complete"))


@contextmanager
def serve(options: Sequence[str], threads: int = 1) -> Iterator[Served]:
    """Starts the program on a free port of this machine; stops it after the block.

    Raises:
        RuntimeError: it ended, or was not ready in time; with its own words.
    """
    command = [sys.executable, "-m", "perilune.cli.main", "serve", "--port", "0", "--threads", str(threads), *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:  # noqa: S603 - the program itself
        words = _Words(process)
        try:
            url = words.wait_for(re.compile(r"URL +http://([\d.]+):(\d+)/v1"))
            words.wait_for(re.compile(r"  try "))
            server = psutil.Process(process.pid)
            yield Served((url[1], int(url[2])), server, _engine_of(server))
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


@dataclass(slots=True)
class _Words:
    """What a process says on stderr, read all the time so that it never waits for a reader."""

    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)
    _news: threading.Condition = field(default_factory=threading.Condition)
    _ended: bool = False

    def __post_init__(self) -> None:
        threading.Thread(target=self._read, daemon=True).start()

    def wait_for(self, pattern: re.Pattern[str]) -> re.Match[str]:
        """The first match in all that was said."""
        with self._news:
            self._news.wait_for(lambda: self._ended or self._find(pattern) is not None, START_S)
        found = self._find(pattern)
        if found is None:
            raise RuntimeError("perilune serve did not become ready:\n" + "\n".join(self.lines[-20:]))
        return found

    def _find(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        return pattern.search("\n".join(self.lines))

    def _read(self) -> None:
        if self.process.stderr is not None:
            for line in self.process.stderr:
                with self._news:
                    self.lines.append(line.rstrip("\n"))
                    self._news.notify_all()
        with self._news:
            self._ended = True
            self._news.notify_all()


def _engine_of(server: psutil.Process) -> psutil.Process:
    for child in server.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "perilune.engine.child" in child.cmdline():
                return child
    raise RuntimeError("the server has no engine process")


def _own_mb(pid: int) -> float:
    text = Path(f"/proc/{pid}/status").read_text()
    kib = {name: int(value) for name, value in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)}
    return (kib["RssAnon"] + kib["VmSwap"]) / 1024


def _cpu_s(process: psutil.Process) -> float:
    files = list(Path(f"/proc/{process.pid}/task").glob("*/schedstat"))
    if files:
        return sum(int(file.read_text().split()[0]) for file in files) / 1e9
    times = process.cpu_times()
    return float(times.user + times.system)
