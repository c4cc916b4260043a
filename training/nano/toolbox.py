"""Declarations of tools: names, descriptions and schemas that differ from chat to chat.

A model can't know these names, it has to read them: they are composed of words for what the tool does, or of syllables
that mean nothing. A tenth of all names is held out.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from training.nano import lexicon
from training.nano.heldout import held_out
from training.nano.subjects import FOREIGN, INTEGER_KEYS, Subject
from training.nano.worked import Step
from training.samples import Tool

_VERBS: Final = ("get", "find", "fetch", "lookup", "query", "read", "show", "check", "ask", "give", "search", "load")
_OPERATIONS: Final = (
    ("add", "subtract", "multiply", "divide"), ("plus", "minus", "times", "over"), ("+", "-", "*", "/"),
    ("sum", "difference", "product", "quotient"),
)  # fmt: skip
_PAIRS: Final = (("a", "b"), ("x", "y"), ("left", "right"), ("first", "second"), ("n1", "n2"), ("num1", "num2"))
_CALCULATIONS: Final = (
    "Evaluate an arithmetic expression", "A simple calculator", "Calculates a formula", "Works out an expression",
    "Compute the value of an expression", "Does arithmetic",
)  # fmt: skip

_PAIRINGS: Final = ("Joins two numbers", "Calculates with two numbers", "One operation on two numbers")


@dataclass(frozen=True, slots=True)
class Gadget:
    """A declared tool and how to call it.

    Attributes:
        what: the subject's name, "calculator", or the name of something foreign that nobody asks for where it is.
        parameters: of a look-up the key's; of a calculator the expression's, or two numbers and the operation.
        integer: whether the key is declared as an integer.
        operations: the words for + - * / where a calculator has them.
        option: an optional parameter and its values.
        note: what the first parameter's description says; none if empty.
        closed: whether the schema says that there are no other parameters.
    """

    what: str
    name: str
    description: str
    parameters: tuple[str, ...]
    integer: bool = False
    operations: tuple[str, ...] = ()
    option: tuple[str, tuple[str, ...]] = ("", ())
    note: str = ""
    closed: bool = False

    @property
    def wire(self) -> Tool:
        """The declaration."""
        kind = {"type": "integer"} if self.integer else {"type": "string"}
        properties: dict[str, Any] = {name: dict(kind) for name in self.parameters}
        if self.operations:
            properties[self.parameters[2]] = {"type": "string", "enum": list(self.operations)}
        if self.note:
            properties[self.parameters[0]]["description"] = self.note
        if self.option[0]:
            properties[self.option[0]] = {"type": "string", "enum": list(self.option[1])}
        schema: dict[str, Any] = {"type": "object", "properties": properties, "required": list(self.parameters)}
        if self.closed:
            schema["additionalProperties"] = False
        function = {"name": self.name, "description": self.description, "parameters": schema}
        return {"type": "function", "function": function}

    def look_up(self, key: str, option: str = "") -> str:
        """Arguments of a look-up."""
        arguments: dict[str, Any] = {self.parameters[0]: int(key) if self.integer else key}
        return json.dumps(arguments | ({self.option[0]: option} if option else {}))

    def calculate(self, op: str, a: int, b: int) -> str:
        """Arguments of a calculation."""
        if not self.operations:
            return json.dumps({self.parameters[0]: f"{a}{op}{b}"})
        first, second, operation = self.parameters
        numbers = (a, b) if self.integer else (str(a), str(b))
        return json.dumps({first: numbers[0], second: numbers[1], operation: self.operations["+-*/".index(op)]})

    def work_out(self, step: Step) -> str:
        return self.calculate(step.op, step.a, step.b)


def calculator(rng: random.Random, unseen: bool) -> Gadget:
    """One with an expression, or one with two numbers and an operation."""
    names = ("calculator", "calculator", "calculate", "calc", "compute", "math", "evaluate", "do_math")
    name = _named(rng, lambda: _composed(rng, names), unseen)
    if rng.random() < 0.65:
        parameter = _parameter(rng, ("expression", "expression", "expr", "formula", "input", "query", "term"))
        note = rng.choice(("such as 2*3", "what to evaluate")) if rng.random() < 0.25 else ""
        return Gadget(
            "calculator", name, rng.choice(_CALCULATIONS), (parameter,), note=note, closed=rng.random() < 0.08
        )
    pair = rng.choice(_PAIRS) if rng.random() < 0.85 else tuple(rng.sample(("one", "two", "p", "q", "u", "v"), 2))
    parameters = (*pair, _parameter(rng, ("op", "operation", "operator", "what")))
    integer = rng.random() < 0.8
    return Gadget("calculator", name, rng.choice(_PAIRINGS), parameters, integer, rng.choice(_OPERATIONS))


def finder(rng: random.Random, subject: Subject, unseen: bool) -> Gadget:
    """A tool that looks up one kind of fact."""
    name = _named(rng, lambda: _composed(rng, subject.nouns, _VERBS), unseen)
    integer = subject.name in INTEGER_KEYS and rng.random() < 0.6
    option: tuple[str, tuple[str, ...]] = ("", ())
    if rng.random() < 0.12:
        option = rng.choice((("format", ("short", "long")), ("lang", ("en", "fr")), ("source", ("new", "old"))))
    note = rng.choice((f"the {subject.params[0]}", subject.params[0])) if rng.random() < 0.2 else ""
    parameter = _parameter(rng, subject.params)
    return Gadget(subject.name, name, rng.choice(subject.descriptions), (parameter,), integer, option=option, note=note)


def foreigner(rng: random.Random, unseen: bool) -> Gadget:
    """A tool for something else."""
    name, _, parameter, description, _, _ = rng.choice(FOREIGN)
    return Gadget(name, _named(rng, lambda: _composed(rng, (name,)), unseen), description, (parameter,))


def _named(rng: random.Random, make: Callable[[], str], unseen: bool) -> str:
    while held_out("name", name := make()) != unseen:
        pass
    return name


def _composed(rng: random.Random, nouns: tuple[str, ...], verbs: tuple[str, ...] = ()) -> str:
    """``get_price``, ``priceFinder``, ``tivoka_price``, ``tivoka`` …"""
    noun = rng.choice(nouns)
    style = rng.random()
    if style < 0.2:
        return nonsense(rng)
    if style < 0.35:
        return f"{nonsense(rng)}_{noun}" if rng.random() < 0.5 else f"{noun}_{nonsense(rng)}"
    if not verbs or style < 0.45:
        return noun if style < 0.9 else f"{noun}{rng.randrange(1, 10)}"
    joined = f"{rng.choice(verbs)}_{noun}"
    return joined if style < 0.85 else _camel(joined)


def _parameter(rng: random.Random, words: tuple[str, ...]) -> str:
    return rng.choice(words) if rng.random() < 0.85 else nonsense(rng)


def nonsense(rng: random.Random) -> str:
    """A word that nobody knows."""
    return "".join(rng.choice(lexicon.SYLLABLES) for _ in range(rng.choice((2, 2, 3))))


def _camel(text: str) -> str:
    first, *rest = text.split("_")
    return first + "".join(word.capitalize() for word in rest)
