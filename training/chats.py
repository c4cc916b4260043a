"""Pico's chats, from a seed. What they say comes from ``phrases`` and ``arithmetic``."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any, Final

from training import phrases
from training.arithmetic import (
    Problem,
    columns,
    draw,
    easy_difference,
    easy_sum,
    long_problem,
    product,
)
from training.samples import ANYTHING, Call, Message, Reply, Sample, Tool, Wish

KINDS: Final = ("sum", "difference", "call", "beyond", "talk", "other")
"""``call``: only a calculator helps and there is one; ``beyond``: the same without one; ``other``: not arithmetic."""

_WITHOUT_CALCULATOR: Final = ((0.40, 0.26, 0.0, 0.10, 0.18, 0.06), KINDS)
_WITH_CALCULATOR: Final = ((0.15, 0.07, 0.60, 0.0, 0.12, 0.06), KINDS)


def calculator_tool(name: str, description: str, parameter: str, note: str = "") -> Tool:
    """A tool with one string parameter, keys in the order in which the wire's clients write them."""
    schema: dict[str, Any] = {"type": "string"}
    if note:
        schema["description"] = note
    parameters = {"type": "object", "properties": {parameter: schema}, "required": [parameter]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


PLAIN_CALCULATOR: Final = calculator_tool("calculator", "Evaluate an arithmetic expression", "expression")


def sample(rng: random.Random, wish: Wish = ANYTHING) -> Sample:
    """One chat; equal generators give equal chats."""
    tools = _tools(rng, wish) if wish.tools is None else wish.tools
    calculator = _calculator_among(tools)
    messages: list[Message] = []
    system = rng.choice(phrases.SYSTEMS) if rng.random() < 0.5 else None
    if wish.system is not None:
        system = wish.system
    if system is not None:
        messages.append({"role": "system", "content": system})
    turns = wish.turns or rng.choices((1, 2, 3, 4), (12, 4, 2, 1))[0]
    calls = 0
    for turn in range(turns):
        last = turn == turns - 1
        kind = wish.kind if last and wish.kind else _kind(rng, calculator is not None)
        user, problem = _question(rng, kind, wish.held_out and last)
        messages.append({"role": "user", "content": user})
        if kind == "call" and calculator is not None and problem is not None:
            name, parameter = calculator
            reply = _call(problem, name, parameter, calls)
            calls += 1
            stop = last and (rng.random() < 0.4 if wish.after_tool is None else not wish.after_tool)
            if not stop:
                result, final = _result(rng, problem)
                messages += (
                    reply.message(),
                    {"role": "tool", "tool_call_id": reply.calls[0].id, "content": result},
                )
                reply = final
        else:
            reply = _answer(kind, problem, user)
        if last:
            return Sample(kind, tuple(messages), tools, reply, problem)
        messages.append(reply.message())
    raise AssertionError("a chat has at least one turn")


def drill(rng: random.Random) -> tuple[str, Reply]:
    """A sum or a difference without a chat around it, and its worked answer, whose thought begins with it."""
    problem = draw(rng, rng.choice((easy_sum, easy_difference)), held_out=False)
    return problem.compact, _answer("drill", problem, "")


def _kind(rng: random.Random, calculator: bool) -> str:
    weights, kinds = _WITH_CALCULATOR if calculator else _WITHOUT_CALCULATOR
    return rng.choices(kinds, weights)[0]


def _tools(rng: random.Random, wish: Wish) -> tuple[Tool, ...]:
    """Usually none; otherwise a calculator, sometimes in company, sometimes only the company."""
    wanted = wish.kind == "call"
    if not wanted and rng.random() < 0.6:
        return ()
    tools: list[Tool] = []
    if wish.kind != "beyond" and (wanted or rng.random() < 0.88):
        note = rng.choice(phrases.PARAMETER_NOTES) if rng.random() < 0.2 else ""
        tools.append(calculator_tool(*rng.choice(phrases.CALCULATORS), note))
    if not tools or rng.random() < 0.2:
        tools += [calculator_tool(*tool) for tool in rng.sample(phrases.OTHER_TOOLS, rng.choice((1, 1, 2)))]
        rng.shuffle(tools)
    return tuple(tools)


def _calculator_among(tools: tuple[Tool, ...]) -> tuple[str, str] | None:
    """Name and parameter of the calculator."""
    others = {name for name, _, _ in phrases.OTHER_TOOLS}
    for tool in tools:
        function = tool["function"]
        if function["name"] not in others:
            return function["name"], next(iter(function["parameters"]["properties"]))
    return None


def _question(rng: random.Random, kind: str, held_out: bool) -> tuple[str, Problem | None]:
    if kind == "talk":
        return rng.choice(rng.choice(phrases.SMALL_TALK)[0]), None
    if kind == "other":
        return rng.choice(phrases.OTHER_SUBJECTS), None
    makers: dict[str, Callable[[random.Random], Problem]] = {
        "sum": easy_sum,
        "difference": easy_difference,
    }
    make = makers.get(kind) or rng.choices((product, long_problem), (3, 2))[0]
    problem = draw(rng, make, held_out)
    return _worded(rng, problem), problem


def _worded(rng: random.Random, problem: Problem) -> str:
    words = phrases.IN_WORDS[problem.op]
    if len(problem.operands) > 2 or rng.random() < 0.6:
        sign = rng.choice(phrases.SIGNS[problem.op])
        gap = " " if rng.random() < 0.7 else ""
        text = rng.choice(phrases.EXPRESSION).format(e=f"{gap}{sign}{gap}".join(map(str, problem.operands)))
    else:
        text = rng.choice(words).format(a=problem.operands[0], b=problem.operands[1])
    if rng.random() < 0.12:
        text = rng.choice(phrases.OPENERS) + (text[0].lower() + text[1:])
    elif rng.random() < 0.1:
        text = text[0].lower() + text[1:]
    return text.rstrip(".?") if rng.random() < 0.1 else text


def _call(problem: Problem, name: str, parameter: str, index: int) -> Reply:
    arguments = json.dumps({parameter: problem.compact})
    return Reply(f"{problem.compact} needs {name}.", "", (Call(name, index, arguments),))


def _result(rng: random.Random, problem: Problem) -> tuple[str, Reply]:
    """What the tool says, and the answer to it."""
    if rng.random() < 0.04:
        text = f"The tool failed, so I do not know {problem.spaced}."
        return rng.choice(phrases.TOOL_ERRORS), Reply("The tool failed.", text)
    result = f'{{"result": {problem.value}}}' if rng.random() < 0.12 else problem.value
    return result, Reply("The tool has answered.", f"{problem.spaced} = {problem.value}.")


def _answer(kind: str, problem: Problem | None, user: str) -> Reply:
    if problem is None:
        for questions, thought, text in phrases.SMALL_TALK:
            if user in questions:
                return Reply(thought, text)
        return Reply(phrases.OTHER_THOUGHT, phrases.OTHER_ANSWER)
    if kind == "beyond":
        return Reply(
            f"{problem.compact} needs a tool, and there is none.", f"I need a calculator for {problem.spaced}."
        )
    return Reply(columns(problem), f"{problem.spaced} = {problem.value}.")
