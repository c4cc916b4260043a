"""Who gets a place, in which order, and who none."""

from __future__ import annotations

import asyncio
import random

import pytest

from perilune.server.places import Places
from perilune.server.replies import HttpError

LONG = 1000


def places(size: int, *, most: int = 100, wait_s: float = 5.0) -> Places:
    return Places(size, long=LONG, most=most, wait_s=wait_s)


class Crowd:
    """Tasks that want places, and what became of them."""

    def __init__(self, where: Places) -> None:
        self._where = where
        self._ends: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.inside: list[str] = []
        self.began: list[str] = []

    async def come(self, name: str, size: int) -> None:
        self._ends[name] = asyncio.Event()
        self.tasks[name] = asyncio.create_task(self._work(name, size))
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    async def end(self, name: str) -> None:
        self._ends[name].set()
        await self.tasks[name]
        await asyncio.sleep(0)

    async def _work(self, name: str, size: int) -> None:
        async with self._where.place(size):
            self.began.append(name)
            self.inside.append(name)
            await self._ends[name].wait()
            self.inside.remove(name)


async def test_the_smaller_goes_first_and_equals_in_turn() -> None:
    crowd = Crowd(places(1))
    for name, size in (("first", 900), ("a", 900), ("b", 600), ("c", 10), ("d", 9)):
        await crowd.come(name, size)
    assert crowd.inside == ["first"]
    for name in ("first", "c", "d", "a", "b"):
        await crowd.end(name)
    assert crowd.began == ["first", "c", "d", "a", "b"], "a and b are of one magnitude"


async def test_long_work_leaves_a_place_to_others() -> None:
    crowd = Crowd(places(3))
    for number in range(4):
        await crowd.come(f"long {number}", LONG * 4)
    assert crowd.inside == ["long 0", "long 1"]
    await crowd.come("short", 10)
    await crowd.come("waits", 10)
    assert crowd.inside == ["long 0", "long 1", "short"]
    await crowd.end("long 0")
    assert crowd.inside == ["long 1", "short", "waits"]
    await crowd.end("short")
    assert crowd.inside == ["long 1", "waits"]
    await crowd.end("waits")
    assert crowd.inside == ["long 1", "long 2"]
    for name in ("long 1", "long 2", "long 3"):
        await crowd.end(name)


async def test_the_only_place_is_for_long_work_too() -> None:
    async with asyncio.timeout(1), places(1).place(LONG * 4):
        pass


async def test_too_many_wait_no_longer_and_the_largest_goes() -> None:
    crowd = Crowd(places(1, most=2))
    for name, size in (("first", 1), ("large", 900), ("middle", 100)):
        await crowd.come(name, size)
    await crowd.come("largest", 5000)
    with pytest.raises(HttpError, match="too many requests wait") as caught:
        await crowd.tasks["largest"]
    assert (caught.value.status, caught.value.code, caught.value.headers) == (503, "overloaded", {"retry-after": "1"})
    await crowd.come("small", 10)
    with pytest.raises(HttpError):
        await crowd.tasks["large"]
    for name in ("first", "small", "middle"):
        await crowd.end(name)
    assert crowd.began == ["first", "small", "middle"]


async def test_nobody_waits_for_ever() -> None:
    where = places(1, wait_s=0.05)
    crowd = Crowd(where)
    await crowd.come("first", 1)
    await crowd.come("late", 1)
    with pytest.raises(HttpError, match="too many"):
        await crowd.tasks["late"]
    await crowd.end("first")
    async with where.place(1):
        pass


async def test_who_leaves_takes_no_place_along() -> None:
    """While it waits, and just when its turn has come."""
    where = places(1)
    crowd = Crowd(where)
    for name in ("first", "leaves", "next"):
        await crowd.come(name, 1)
    crowd.tasks["leaves"].cancel()
    await asyncio.sleep(0)
    await crowd.end("first")
    assert crowd.inside == ["next"]
    await crowd.come("unlucky", 1)
    crowd._ends["next"].set()
    await asyncio.sleep(0)
    crowd.tasks["unlucky"].cancel()
    await asyncio.wait(crowd.tasks.values())
    assert crowd.tasks["unlucky"].cancelled()
    assert "unlucky" not in crowd.began
    async with asyncio.timeout(1), where.place(1):
        pass


async def free(where: Places, size: int) -> bool:
    """Whether ``size`` pieces of work find places at once, and no more."""
    gate = asyncio.Event()

    async def hold() -> None:
        async with where.place(1):
            await gate.wait()

    tasks = [asyncio.create_task(hold()) for _ in range(size + 1)]
    for _ in range(5):
        await asyncio.sleep(0)
    inside = size + 1 - len(where._waiting)
    gate.set()
    await asyncio.gather(*tasks)
    return inside == size


async def test_a_place_that_frees_just_when_its_next_one_leaves() -> None:
    where, gate = places(1), asyncio.Event()

    async def hold() -> None:
        async with where.place(1):
            await gate.wait()

    inside, waiting = asyncio.create_task(hold()), asyncio.create_task(hold())
    await asyncio.sleep(0)
    gate.set()
    waiting.cancel()
    results = await asyncio.gather(inside, waiting, return_exceptions=True)
    assert results[0] is None
    assert isinstance(results[1], asyncio.CancelledError)
    assert await free(where, 1)


async def test_one_too_many_comes_just_when_the_last_one_leaves() -> None:
    where, gate = places(1, most=1), asyncio.Event()

    async def hold(size: int) -> None:
        async with where.place(size):
            await gate.wait()

    inside, waiting = asyncio.create_task(hold(1)), asyncio.create_task(hold(500))
    await asyncio.sleep(0)
    newcomer = asyncio.create_task(hold(1))  # runs before the other one learns that it is cancelled
    waiting.cancel()
    await asyncio.sleep(0)
    gate.set()
    results = await asyncio.gather(inside, waiting, newcomer, return_exceptions=True)
    assert (results[0], type(results[1]), results[2]) == (None, asyncio.CancelledError, None)
    assert await free(where, 1)


@pytest.mark.parametrize("seed", range(60))
async def test_no_place_is_lost_whoever_leaves_when(seed: int) -> None:
    """Work that ends, is cancelled, runs out of patience or is pushed out, in any order, many in one turn."""
    rng = random.Random(seed)
    size = rng.randint(1, 3)
    where = places(size, most=rng.choice((1, 3, 100)), wait_s=rng.choice((0.002, 0.01)))

    async def work() -> None:
        async with where.place(rng.choice((1, 50, LONG, 5 * LONG))):
            await asyncio.sleep(rng.choice((0, 0, 0.001, 0.002)))

    tasks: list[asyncio.Task[None]] = []
    for _ in range(120):
        tasks.append(asyncio.create_task(work()))
        if rng.random() < 0.5:
            rng.choice(tasks).cancel()
        if rng.random() < 0.4:
            await asyncio.sleep(rng.choice((0, 0, 0.001)))
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert {type(result) for result in results} <= {type(None), asyncio.CancelledError, HttpError}
    assert await free(where, size)
