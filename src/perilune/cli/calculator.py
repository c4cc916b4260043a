"""A calculator that a model may call: arithmetic on numbers, nothing else.

The text comes from a model, so from anyone. It is parsed to a syntax tree and only number literals and arithmetic
operators are walked; names, calls, attributes and strings are refused. Length, depth, exponents and the size of every
intermediate result are bounded, so no expression takes noticeable time or memory.
"""

from __future__ import annotations

import ast
import json
import math
import operator
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

from perilune.errors import RequestError

NAME: Final = "calculator"
DECLARATION: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "type": "function",
        "function": {
            "name": NAME,
            "description": "Evaluate an arithmetic expression",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string"}},
                "required": ["expression"],
            },
        },
    }
)
"""The tool as a chat request declares it. The bundled models have seen these very words in training."""

MAX_CHARS: Final = 500
MAX_DEPTH: Final = 50
MAX_BITS: Final = 2048
MAX_EXPONENT: Final = 1024

Number = int | float

_SPELLINGS: Final = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "^": "**"})
_BINARY: Final[Mapping[type[ast.operator], Callable[[Any, Any], Any]]] = MappingProxyType(
    {
        ast.Add: operator.add,
        ast.Sub: operator.sub,
        ast.Mult: operator.mul,
        ast.Div: operator.truediv,
        ast.FloorDiv: operator.floordiv,
        ast.Mod: operator.mod,
        ast.Pow: operator.pow,
    }
)


def run_call(arguments: str) -> str:
    """The result of a call, or what is wrong with it, as the text of a tool message."""
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return "error: the arguments are not JSON"
    values = list(parsed.values()) if isinstance(parsed, dict) else []
    if len(values) != 1 or not isinstance(values[0], (str, int, float)):
        return 'error: one argument is needed: {"expression": "…"}'
    try:
        return calculate(str(values[0]))
    except RequestError as error:
        return f"error: {error.message}"


def calculate(expression: str) -> str:
    """The value of an arithmetic expression: whole numbers exactly, others to 12 significant digits.

    Raises:
        RequestError: no arithmetic, too large, or undefined.
    """
    if len(expression) > MAX_CHARS:
        raise RequestError(f"the expression has {len(expression)} characters, at most {MAX_CHARS} are allowed")
    try:
        tree = ast.parse(expression.translate(_SPELLINGS).strip(), mode="eval")
        value = _value(tree.body, 0)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise RequestError(f"{expression[:80]!r} is no arithmetic expression") from None
    except ZeroDivisionError:
        raise RequestError("division by zero") from None
    except OverflowError:
        raise RequestError("the result is too large") from None
    return _shown(value)


def _value(node: ast.expr, depth: int) -> Number:
    if depth > MAX_DEPTH:
        raise RequestError(f"the expression is nested deeper than {MAX_DEPTH} levels")
    match node:
        case ast.Constant(value=bool() | complex()):
            raise RequestError("only whole and decimal numbers are allowed")
        case ast.Constant(value=int() | float() as number):
            return _bounded(number)
        case ast.UnaryOp(op=ast.UAdd(), operand=inner):
            return _value(inner, depth + 1)
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return -_value(inner, depth + 1)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            a, b = _value(left, depth + 1), _value(right, depth + 1)
            if isinstance(op, ast.Pow):
                _check_power(a, b)
            return _bounded(_BINARY[type(op)](a, b))
    raise RequestError("only numbers, + - * / // % ** and parentheses are allowed")


def _check_power(base: Number, exponent: Number) -> None:
    """Bounds the result before it is computed."""
    if abs(exponent) > MAX_EXPONENT:
        raise RequestError(f"exponents beyond {MAX_EXPONENT} are not allowed")
    if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * exponent > MAX_BITS:
        raise RequestError("the result is too large")
    if base < 0 and not float(exponent).is_integer():
        raise RequestError("a negative number has no real power of that exponent")


def _bounded(value: Number) -> Number:
    if isinstance(value, int):
        if value.bit_length() > MAX_BITS:
            raise RequestError("the result is too large")
    elif not math.isfinite(value):
        raise RequestError("the result is too large")
    return value


def _shown(value: Number) -> str:
    if isinstance(value, float):
        if value.is_integer() and abs(value) < 1e15:
            return str(int(value))
        return f"{value:.12g}"
    return str(value)
