"""One step of arithmetic, worked in lines of fixed shape that are each true.

Sums and differences are pico's columns. Products go column by column with a carry, quotients place by place with a
remainder, comparisons digit by digit from the left; each ends in its result in three digits, so that wherever a number
stands, what it depends on stands at fixed distances before it.

    47*6            252/6           47?52
    47*6            252/6           047?052
    7*6+0=42        02=6*0+2        0=0
    4*6+4=28        25=6*4+1        4<5
    282             12=6*2+0        7>2
                    042             47<52
"""

from __future__ import annotations

from dataclasses import dataclass

from training.arithmetic import Problem, columns

LIMIT = 999
"""Whatever is worked in the head has operands up to this."""


@dataclass(frozen=True, slots=True)
class Step:
    """Two operands and ``+ - * /`` or ``?``, which compares."""

    op: str
    a: int
    b: int

    @property
    def text(self) -> str:
        return f"{self.a}{self.op}{self.b}"

    @property
    def value(self) -> int:
        """The result; of a comparison, the sign of ``a - b``."""
        if self.op == "+":
            return self.a + self.b
        if self.op == "-":
            return self.a - self.b
        if self.op == "*":
            return self.a * self.b
        if self.op == "/":
            return self.a // self.b
        return (self.a > self.b) - (self.a < self.b)

    @property
    def fits(self) -> bool:
        """True where the head is enough: no negative number, no remainder, nothing beyond ``LIMIT``."""
        if not (0 <= self.a <= LIMIT and 0 <= self.b <= LIMIT):
            return False
        if self.op == "*":
            return max(self.a, self.b) <= 99 and min(self.a, self.b) <= 9
        if self.op == "/":
            return 2 <= self.b <= 9 and self.a % self.b == 0
        return self.op == "?" or 0 <= self.value <= LIMIT

    @property
    def held_out(self) -> bool:
        """True for the tenth of all steps that training never sees.

        Products and differences are worked from their larger number, so both orders are held out together.
        """
        pair = (max(self.a, self.b), min(self.a, self.b)) if self.op in "*-" else (self.a, self.b)
        return Problem(self.op, pair).held_out

    @property
    def lines(self) -> str:
        """The step worked; its first line is ``text``."""
        if self.op in "+-":
            return columns(Problem(self.op, (self.a, self.b)))
        return "\n".join((self.text, *{"*": _product, "/": _quotient, "?": _comparison}[self.op](self.a, self.b)))


def _product(a: int, b: int) -> list[str]:
    big, small = max(a, b), min(a, b)
    tens, ones = divmod(big, 10)
    carry, digit = divmod(ones * small, 10)
    high = tens * small + carry
    return [
        f"{big:02}*{small}",
        f"{ones}*{small}+0={ones * small}",
        f"{tens}*{small}+{carry}={high}",
        f"{high:02}{digit}",
    ]


def _quotient(a: int, b: int) -> list[str]:
    lines, rest, digits = [f"{a:03}/{b}"], 0, ""
    for digit in map(int, f"{a:03}"):
        part = 10 * rest + digit
        rest = part % b
        digits += str(part // b)
        lines.append(f"{part:02}={b}*{part // b}+{rest}")
    return [*lines, digits]


def _comparison(a: int, b: int) -> list[str]:
    first, second = f"{a:03}", f"{b:03}"
    return [
        f"{first}?{second}",
        *(f"{x}{sign(x, y)}{y}" for x, y in zip(first, second, strict=True)),
        f"{a}{sign(a, b)}{b}",
    ]


def sign(a: int | str, b: int | str) -> str:
    """``<``, ``=`` or ``>``; digits compare as characters."""
    if a == b:
        return "="
    return "<" if str(a).zfill(3) < str(b).zfill(3) else ">"
