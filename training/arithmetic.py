"""Problems with whole numbers, and how a very small model thinks them through.

Sums and differences of up to three digits are worked column by column, least significant digit first, one line per
column, so that every token depends on a few earlier ones only (Lee et al., "Teaching Arithmetic to Small
Transformers", arXiv 2307.03381). A tenth of all operand pairs is held out: ``Problem.held_out`` decides by a hash, so
training and evaluation agree on it without a list.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass

MAX_DIGITS = 3
"""Sums and differences up to this length are worked in the head."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Operands joined by one operator: ``+``, ``-``, ``*`` or ``/``."""

    op: str
    operands: tuple[int, ...]

    @property
    def spaced(self) -> str:
        return f" {self.op} ".join(map(str, self.operands))

    @property
    def compact(self) -> str:
        return self.op.join(map(str, self.operands))

    @property
    def value(self) -> str:
        """The result in decimal; a quotient that does not come out even is rounded to four places."""
        first, *rest = self.operands
        if self.op == "+":
            return str(first + sum(rest))
        if self.op == "-":
            return str(first - sum(rest))
        if self.op == "*":
            return str(first * rest[0])
        return str(first // rest[0]) if first % rest[0] == 0 else f"{first / rest[0]:.4f}".rstrip("0")

    @property
    def held_out(self) -> bool:
        """True for the tenth of all problems that training never sees."""
        return hashlib.blake2b(self.compact.encode(), digest_size=1).digest()[0] % 10 == 0


def draw(rng: random.Random, make: Callable[[random.Random], Problem], held_out: bool) -> Problem:
    """The first problem of ``make`` on the wanted side of the hold-out."""
    while (problem := make(rng)).held_out != held_out:
        pass
    return problem


def number(rng: random.Random, digits: int) -> int:
    """A number of exactly ``digits`` digits, zero included among the one-digit ones."""
    return rng.randrange(10 ** (digits - 1) if digits > 1 else 0, 10**digits)


def any_length(rng: random.Random) -> int:
    """A number of up to three digits, longer ones more often."""
    return number(rng, rng.choices((1, 2, 3), (2, 3, 4))[0])


def easy_sum(rng: random.Random) -> Problem:
    return Problem("+", (any_length(rng), any_length(rng)))


def easy_difference(rng: random.Random) -> Problem:
    """Mostly with a result that is not negative."""
    a, b = any_length(rng), any_length(rng)
    return Problem("-", (a, b) if rng.random() < 0.15 else (max(a, b), min(a, b)))


def product(rng: random.Random) -> Problem:
    lengths = rng.choice(((1, 1), (1, 2), (2, 1), (2, 2), (2, 2), (2, 3), (3, 1), (3, 2), (3, 3), (4, 2)))
    return Problem("*", (number(rng, lengths[0]), number(rng, lengths[1])))


def long_problem(rng: random.Random) -> Problem:
    """Beyond the head: a long sum or difference, three addends, or a quotient."""
    kind = rng.randrange(4)
    if kind == 0:
        return Problem("+", tuple(any_length(rng) for _ in range(3)))
    if kind == 1:
        return Problem("/", (number(rng, rng.choice((2, 3, 4))), rng.randrange(1, 100)))
    pair = [number(rng, 4), number(rng, rng.choice((2, 3, 4)))]
    if kind == 2:
        rng.shuffle(pair)
        return Problem("+", tuple(pair))
    return Problem("-", (max(pair), min(pair)))


def columns(problem: Problem) -> str:
    """The thought behind a sum or difference: the problem, the same in three digits, a line per column, the result.

    Every line is true, and every line has the same shape, so that what a digit depends on stands at fixed distances
    before it: ``9+3+1=13`` adds a carry, ``1-3-0=8-10`` borrows ten. A difference that ends in a borrow is negative: it
    is turned round and worked again.

    >>> columns(Problem("+", (58, 7))).split()
    ['58+7', '058+007', '8+7+0=15', '5+0+1=6', '0+0+0=0', '065']
    >>> columns(Problem("-", (5, 12))).split()[1:6]
    ['005-012', '5-2-0=3', '0-1-0=9-10', '0-0-1=9-10', '012-005']
    """
    a, b = problem.operands
    lines, result, left_over = _worked(problem.op, a, b)
    if problem.op == "-" and left_over:
        again, result, _ = _worked("-", b, a)
        lines += again
    else:
        result += 1000 * left_over
    sign = "-" if problem.op == "-" and left_over else ""
    return "\n".join((problem.compact, *lines, f"{sign}{result:0{MAX_DIGITS}}"))


def _worked(op: str, a: int, b: int) -> tuple[list[str], int, int]:
    """Lines of the columns, the digits that come out as a number, and the carry or borrow that is left over."""
    lines, carry, result = [f"{a:0{MAX_DIGITS}}{op}{b:0{MAX_DIGITS}}"], 0, 0
    for place in range(MAX_DIGITS):
        x, y = a // 10**place % 10, b // 10**place % 10
        value = x + y + carry if op == "+" else x - y - carry
        shown = f"{value % 10}-10" if value < 0 else str(value)
        lines.append(f"{x}{op}{y}{op}{carry}={shown}")
        carry = abs(value // 10)
        result += value % 10 * 10**place
    return lines, result, carry
