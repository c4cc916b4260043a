"""Every line of a thought about arithmetic is true, and its result is that of the integers."""

from __future__ import annotations

import random
import re
from fractions import Fraction

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from training.nano import sums
from training.nano.numerals import spelled
from training.nano.worked import Step

RELATION = re.compile(r"(\d+)([<=>])(\d+)")


def value_of(text: str) -> Fraction:
    """An expression of whole numbers, + - * / and brackets, in fractions: not ``Step``'s arithmetic."""
    while found := re.search(r"\(([^()]*)\)", text):
        text = text.replace(found[0], str(value_of(found[1])))
    total = Fraction(0)
    for sign, term in re.findall(r"([+-]?)([^+-]+)", text):
        first, *rest = re.split(r"([*/])", term)
        product = Fraction(int(first))
        for op, factor in zip(rest[::2], rest[1::2], strict=True):
            product = product * int(factor) if op == "*" else product / int(factor)
        total += -product if sign == "-" else product
    return total


def check_equation(line: str) -> None:
    """``8+7+0=15``, ``25=6*4+1`` or ``4<5``."""
    left, right = re.split("[<=>]", line)
    sign = re.sub(r"[^<=>]", "", line)
    a, b = value_of(left), value_of(right)
    assert sign == ("=" if a == b else "<" if a < b else ">"), line


def check_step(lines: list[str]) -> None:
    """A whole step: restated, its columns, its result."""
    if "?" in lines[0]:
        a, b = map(int, lines[0].split("?"))
        assert [int(part) for part in lines[1].split("?")] == [a, b]
        for line in lines[2:]:
            check_equation(line)
        assert RELATION.fullmatch(lines[-1])
        assert [int(part) for part in re.split("[<=>]", lines[-1])] == [a, b]
        return
    result = value_of(lines[0])
    assert int(lines[-1]) == result
    for line in lines[1:-1]:
        if "=" in line:
            check_equation(line)
        else:
            assert abs(value_of(line)) == abs(result), "the same problem in columns, maybe the other way round"


@given(st.sampled_from("+-*/?"), st.integers(0, 999), st.integers(0, 999))
def test_lines_are_true(op: str, a: int, b: int) -> None:
    if op == "*":
        a, b = a % 100, b % 10
    elif op == "/":
        b = 2 + b % 8
        a -= a % b
    step = Step(op, a, b)
    lines = step.lines.split("\n")
    assert lines[0] == step.text
    check_step(lines)
    if op in "*/":
        assert len(lines[-1]) == 3


@given(st.sampled_from(sums.SHAPES), st.tuples(*[st.integers(0, 40)] * 3))
def test_the_steps_of_an_expression_lead_to_its_value(shape: str, numbers: tuple[int, int, int]) -> None:
    expression = sums.Expression(shape, numbers)
    first, second = expression.steps
    assume(first.value >= 0)
    assert second.value == value_of(expression.compact)
    assert first.value in (second.a, second.b)


@pytest.mark.parametrize("kind", sums.IN_HEAD)
@pytest.mark.parametrize("out", [False, True])
def test_questions_have_their_answers(kind: str, out: bool) -> None:
    rng = random.Random(kind)
    for _ in range(300):
        turn = sums.turn(rng, kind, out)
        lines = turn.final.thought.split("\n")
        if kind == "expression":
            assert value_of(lines[0]) == int(turn.answers[0])
            starts = [i for i, line in enumerate(lines) if i and re.fullmatch(r"[1-9]\d*[+*-]\d+|0[+*-]\d+", line)]
            assert starts[0] == 1
        else:
            check_step(lines)
        if kind in ("sum", "difference", "product", "quotient"):
            assert value_of(lines[0]) == int(turn.answers[0])
        digits = re.findall(r"\d+", turn.user)
        assert set(digits) <= set(re.findall(r"\d+", lines[0])), "nothing is asked that the thought does not restate"
        assert turn.final.text.rstrip(".").endswith(turn.answers[0])


def test_what_is_too_much_for_the_head_is_told_apart() -> None:
    rng = random.Random(4)
    for _ in range(500):
        problem = sums.beyond(rng, out=False)
        a, b = problem.operands
        small = max(a, b) <= 999
        assert not (problem.op in "+-" and small)
        assert not (problem.op == "*" and max(a, b) <= 99 and min(a, b) <= 9)
        assert not (problem.op == "/" and a <= 999 and 2 <= b <= 9 and a % b == 0)


def test_a_drill_begins_with_what_it_is_given() -> None:
    rng = random.Random(5)
    for _ in range(100):
        text, reply = sums.drill(rng)
        assert reply.thought.startswith(text + "\n")


@pytest.mark.parametrize(
    ("number", "words"),
    [(0, "zero"), (13, "thirteen"), (40, "forty"), (99, "ninety-nine"), (100, "one hundred"),
     (347, "three hundred and forty-seven"), (905, "nine hundred and five")],
)  # fmt: skip
def test_numbers_in_words(number: int, words: str) -> None:
    assert spelled(number) == words


def test_no_two_numbers_share_their_words() -> None:
    assert len({spelled(number) for number in range(1000)}) == 1000
