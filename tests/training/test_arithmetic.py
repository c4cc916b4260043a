"""Problems and their worked columns are right, and the hold-out is a property of the problem."""

from __future__ import annotations

import random
import re
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from training.arithmetic import Problem, columns, draw, easy_difference, easy_sum, long_problem, product

operands = st.integers(0, 999)


@given(operands, operands, st.sampled_from("+-"))
def test_every_line_of_the_columns_is_true_and_the_last_is_the_result(a: int, b: int, op: str) -> None:
    problem = Problem(op, (a, b))
    first, padded, *rest, digits = columns(problem).split("\n")
    assert first == problem.compact
    assert padded == f"{a:03}{op}{b:03}"
    if int(problem.value) < 0:
        assert rest.pop(3) == f"{b:03}-{a:03}"
    for line in rest:
        left, right = (sum(map(int, re.findall(r"[+-]?\d+", side))) for side in line.split("="))
        assert left == right
    assert len(rest) == (6 if int(problem.value) < 0 else 3)
    assert int(digits) == int(problem.value)


@pytest.mark.parametrize(
    ("problem", "text", "value"),
    [
        (Problem("+", (12, 34, 5)), "12 + 34 + 5", "51"),
        (Problem("-", (5, 12)), "5 - 12", "-7"),
        (Problem("*", (12, 34)), "12 * 34", "408"),
        (Problem("/", (144, 12)), "144 / 12", "12"),
        (Problem("/", (1, 3)), "1 / 3", "0.3333"),
        (Problem("/", (10, 4)), "10 / 4", "2.5"),
    ],
)
def test_values(problem: Problem, text: str, value: str) -> None:
    assert (problem.spaced, problem.value) == (text, value)


def test_quotients_are_rounded_to_four_places() -> None:
    rng = random.Random(5)
    for _ in range(200):
        problem = long_problem(rng)
        if problem.op == "/":
            exact = Fraction(problem.operands[0], problem.operands[1])
            assert abs(Fraction(problem.value) - exact) <= Fraction(1, 20000)


@pytest.mark.parametrize("make", [easy_sum, easy_difference, product, long_problem])
def test_a_tenth_is_held_out_and_never_drawn_for_training(make) -> None:  # type: ignore[no-untyped-def]
    rng = random.Random(3)
    share = sum(make(rng).held_out for _ in range(4000)) / 4000
    assert 0.07 < share < 0.13
    assert not any(draw(rng, make, held_out=False).held_out for _ in range(200))
    assert all(draw(rng, make, held_out=True).held_out for _ in range(50))
