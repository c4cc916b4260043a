"""The calculator tool: arithmetic, exactly; nothing else, ever; no expression that takes time."""

from __future__ import annotations

import contextlib
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perilune.cli.calculator import DECLARATION, calculate, run_call
from perilune.errors import RequestError


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("12+30", "42"),
        (" 2 * (3 + 4) ", "14"),
        ("7/2", "3.5"),
        ("6/2", "3"),
        ("7//2", "3"),
        ("-7 % 3", "2"),
        ("2**10", "1024"),
        ("2^10", "1024"),
        ("3 × 4 ÷ 2", "6"),
        ("5 − 8", "-3"),
        ("+5", "5"),
        ("0.1+0.2", "0.3"),
        ("1e3", "1000"),
        ("2**0.5", "1.41421356237"),
        ("10**-2", "0.01"),
        ("123456789012345678901234567890*2", "246913578024691357802469135780"),
        ("1_000", "1000"),
    ],
)
def test_values(expression: str, value: str) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("", "no arithmetic"),
        ("1+", "no arithmetic"),
        ("x", "only numbers"),
        ("__import__('os').system('touch /tmp/m')", "only numbers"),
        ("(1).__class__", "only numbers"),
        ("'a'*9", "only numbers"),
        ("[1]", "only numbers"),
        ("lambda: 1", "only numbers"),
        ("1 if 1 else 2", "only numbers"),
        ("1 < 2", "only numbers"),
        ("True", "only whole"),
        ("2j", "only whole"),
        ("x = 1", "no arithmetic"),
        ("1;2", "no arithmetic"),
        ("1/0", "division by zero"),
        ("1%0", "division by zero"),
        ("0**-1", "division by zero"),
        ("(-8)**0.5", "no real power"),
        ("9**9**9", "not allowed"),
        ("9**1000", "too large"),
        ("10.0**400", "too large"),
        ("1e308*10", "too large"),
        ("1e999", "too large"),
        ("(2**1000)**(2**10)", "too large"),
        ("(" * 220 + "1" + ")" * 220, "no arithmetic"),
        ("-" * 200 + "1", "nested deeper"),
        ("1+" * 300 + "1", "characters"),
        ("9" * 5000, "characters"),
        ("\x00", "no arithmetic"),
    ],
    ids=lambda value: value[:30],
)
def test_refuses(expression: str, message: str) -> None:
    start = time.perf_counter()
    with pytest.raises(RequestError, match=message):
        calculate(expression)
    assert time.perf_counter() - start < 0.5


@given(st.text(alphabet="0123456789+-*/%.()e ^_", max_size=60))
def test_is_total(expression: str) -> None:
    start = time.perf_counter()
    with contextlib.suppress(RequestError):
        assert calculate(expression)
    assert time.perf_counter() - start < 1


@given(st.integers(-(10**6), 10**6), st.integers(-(10**6), 10**6), st.sampled_from("+-*"))
def test_whole_numbers_are_exact(a: int, b: int, sign: str) -> None:
    expected = {"+": a + b, "-": a - b, "*": a * b}[sign]
    assert calculate(f"({a}) {sign} ({b})") == str(expected)


@pytest.mark.parametrize(
    ("arguments", "result"),
    [
        ('{"expression": "12+30"}', "42"),
        ('{"expr": "12+30"}', "42"),
        ('{"expression": 5}', "5"),
        ('{"expression": "1/0"}', "error: division by zero"),
        ("", "error: the arguments are not JSON"),
        ("[" * 100_000, "error: the arguments are not JSON"),
        ("{}", 'error: one argument is needed: {"expression": "…"}'),
        ('{"expression": ["1"]}', 'error: one argument is needed: {"expression": "…"}'),
    ],
    ids=lambda value: value[:30],
)
def test_calls(arguments: str, result: str) -> None:
    assert run_call(arguments) == result


def test_declaration_is_what_the_models_were_trained_on() -> None:
    function = DECLARATION["function"]
    assert (function["name"], function["description"]) == ("calculator", "Evaluate an arithmetic expression")
    assert list(DECLARATION) == ["type", "function"]
    assert list(function) == ["name", "description", "parameters"]
