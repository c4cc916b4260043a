"""The parts that word problems are made of, as arithmetic: which numbers a part brings and what is done with them.

A part is worked in lines. Each names the quote that it rests on, and holds a number that is only read or a step. ``v``
is the value before the part.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Final

from training.nano.worked import Step

Line = tuple[int, "int | Step"]
"""Index of a quote, in the order of the numbers that it belongs to, and what it leads to."""


@dataclass(frozen=True, slots=True)
class Role:
    """``draw`` gives the part's numbers, ``lines`` what is done with them; ``steps`` counts its operations."""

    steps: int
    draw: Callable[[random.Random], tuple[int, ...]]
    lines: Callable[[tuple[int, ...], int], tuple[Line, ...]]


def _amount(rng: random.Random) -> int:
    return rng.randrange(2, rng.choices((13, 31, 100, 500), (2, 4, 8, 3))[0])


def _one(rng: random.Random) -> tuple[int]:
    return (_amount(rng),)


def _two(rng: random.Random) -> tuple[int, int]:
    return _amount(rng), _amount(rng)


def _few(rng: random.Random) -> tuple[int]:
    return (rng.randrange(2, 10),)


def _factors(rng: random.Random) -> tuple[int, int]:
    pair = rng.randrange(2, 10), rng.randrange(2, rng.choices((11, 31, 100), (4, 3, 3))[0])
    return pair if rng.random() < 0.7 else pair[::-1]


def _times(rng: random.Random) -> tuple[int, int]:
    return rng.randrange(3, rng.choice((13, 41, 100))), rng.randrange(2, 10)


def _target(rng: random.Random) -> tuple[int]:
    return (rng.randrange(10, rng.choice((60, 100, 200, 1000))),)


def _joined(op: str) -> Callable[[tuple[int, ...], int], tuple[Line, ...]]:
    """Two numbers of the part, the first joined with the second."""
    return lambda x, v: ((0, x[0]), (1, Step(op, x[0], x[1])))


def _after(op: str) -> Callable[[tuple[int, ...], int], tuple[Line, ...]]:
    """The value joined with the part's number."""
    return lambda x, v: ((0, Step(op, v, x[0])),)


def _read_then(op: str) -> Callable[[tuple[int, ...], int], tuple[Line, ...]]:
    """The part's number is read, then the value joined with it; the second quote says why."""
    return lambda x, v: ((0, x[0]), (1, Step(op, v, x[0])))


def _groups_then(op: str) -> Callable[[tuple[int, ...], int], tuple[Line, ...]]:
    return lambda x, v: ((0, x[0]), (1, Step("*", x[0], x[1])), (2, Step(op, v, x[0] * x[1])))


SOURCES: Final = {
    "own": Role(0, _one, lambda x, v: ((0, x[0]),)),
    "total": Role(1, _two, _joined("+")),
    "groups": Role(1, _factors, _joined("*")),
    "more": Role(1, _two, _joined("+")),
    "fewer": Role(1, _two, _joined("-")),
    "times": Role(1, _times, _joined("*")),
}
DAYS: Final = {"rise": SOURCES["more"], "fall": SOURCES["fewer"]}
"""One person on two days: only both days together can be asked for."""

EVENTS: Final = {
    "gain": Role(1, _one, _after("+")),
    "loss": Role(1, _one, _after("-")),
    "gain_groups": Role(2, _factors, _groups_then("+")),
    "loss_groups": Role(2, _factors, _groups_then("-")),
}
ENDINGS: Final = {
    "now": Role(0, lambda rng: (), lambda x, v: ()),
    "plain": Role(0, lambda rng: (), lambda x, v: ()),
    "share": Role(1, _few, _after("/")),
    "more_than": Role(1, _one, _read_then("-")),
    "together": Role(1, _one, _read_then("+")),
    "need": Role(1, _target, lambda x, v: ((0, x[0]), (1, Step("-", x[0], v)))),
}
ROLES: Final = SOURCES | DAYS | EVENTS | ENDINGS


@dataclass(frozen=True, slots=True)
class Plan:
    """A chain of parts in one domain.

    ``both`` asks for the sum of the two that a comparison speaks of. A plan from ``some`` to ``first`` tells events
    from an unknown beginning to a known end, and is worked back from there.
    """

    domain: str
    parts: tuple[str, ...]

    @property
    def steps(self) -> int:
        """Operations from the facts to the answer."""
        if self.parts[0] == "some":
            return len(self.parts) - 3
        return sum(1 if part == "both" else ROLES[part].steps for part in self.parts)


def plans(domain: str, roles: frozenset[str]) -> list[Plan]:
    """Every chain of a source, up to three events and an ending that a domain has sentences for."""
    found: list[Plan] = []
    events = tuple(role for role in EVENTS if role in roles)
    chains = [chain for count in range(4) for chain in product(events, repeat=count)]
    for source in (role for role in SOURCES if role in roles):
        for chain in chains:
            fitting = (role for role in ENDINGS if role in roles and role != ("now" if not chain else "plain"))
            found += [Plan(domain, (source, *chain, ending)) for ending in fitting]
    if "both" in roles:
        found += [Plan(domain, (source, "both")) for source in ("more", "fewer", "times", *DAYS) if source in roles]
    if "some" in roles:
        found += [Plan(domain, ("some", *chain, "finally", "first")) for chain in chains if chain and _simple(chain)]
    return [plan for plan in found if 1 <= plan.steps <= 3]


def _simple(chain: tuple[str, ...]) -> bool:
    return set(chain) <= {"gain", "loss"}
