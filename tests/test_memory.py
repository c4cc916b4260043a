"""What a long-lived process does once it has loaded."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import gc
from perilune import memory

loaded = [[] for _ in range(200_000)]
loop = []
loop.append(loop)
del loop
seen = len(gc.get_objects())
memory.settle()
print(seen, len(gc.get_objects()), gc.get_freeze_count(), gc.get_threshold()[0])
before = len(gc.get_objects())
for _ in range(100_000):
    loop = []
    loop.append(loop)
print(len(gc.get_objects()) - before)
"""


def test_what_is_loaded_is_looked_at_no_more_and_garbage_still_goes() -> None:
    """In a process of its own: this one's collector is left as it is."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    first, rest = done.stdout.splitlines()
    seen, left, frozen, threshold = map(int, first.split())
    assert seen > 200_000
    assert frozen > 200_000
    assert left < 1000
    assert threshold > 700
    assert int(rest) <= 2 * threshold, "cycles are collected"
