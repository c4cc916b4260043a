"""Where a benchmark ran, what its questions are, and small statistics. A number without its machine means little."""

from __future__ import annotations

import math
import os
import platform
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def machine() -> dict[str, Any]:
    """Processor, cores, load of the last minute, Python."""
    model = next(
        (line.partition(":")[2].strip() for line in _cpuinfo() if line.startswith("model name")), platform.machine()
    )
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "load_1min": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
    }


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def waited_for_a_core() -> float:
    """Seconds that this process's main thread could have run and did not, because others had the core; 0 where the
    kernel does not tell."""
    path = Path("/proc/self/schedstat")
    return int(path.read_text().split()[1]) / 1e9 if path.exists() else 0.0


def questions(count: int, seed: int = 0) -> list[str]:
    """Small sums: the bundled model's trade, with answers of some ten to some fifty tokens."""
    rng = random.Random(seed)
    return [f"What is {rng.randint(1, 999)}{rng.choice('+-')}{rng.randint(1, 999)}?" for _ in range(count)]


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least ``share`` of all values don't exceed; NaN of none."""
    if not values:
        return math.nan
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def slope(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float]:
    """Least squares: the slope and its standard error; both NaN with fewer than three points or none apart."""
    n = len(xs)
    if n < 3 or max(xs) == min(xs):
        return math.nan, math.nan
    mean_x, mean_y = sum(xs) / n, sum(ys) / n
    spread = sum((x - mean_x) ** 2 for x in xs)
    found = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread
    rest = sum((y - mean_y - found * (x - mean_x)) ** 2 for x, y in zip(xs, ys, strict=True))
    return found, math.sqrt(rest / (n - 2) / spread)
