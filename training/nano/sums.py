"""Arithmetic asked in figures and in words: what is worked in the head, and what only a calculator can do."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from training import phrases
from training.arithmetic import Problem, any_length, easy_difference, easy_sum, long_problem, number, product
from training.nano.heldout import held_out
from training.nano.numerals import spelled
from training.nano.turns import Turn
from training.nano.worked import Step
from training.samples import Reply

IN_HEAD: Final = ("sum", "difference", "product", "quotient", "comparison", "expression")
SPOKEN: Final = {"+": "plus", "-": "minus", "*": "times", "/": "divided by"}

COMPARISONS: Final = {
    "larger": (
        "Which is larger, {a} or {b}?", "Which number is bigger: {a} or {b}?", "What is more, {a} or {b}?",
        "Is {a} or {b} the larger number?", "Compare {a} and {b}: which is greater?", "Find the larger of {a} and {b}.",
        "Tell me the greater of {a} and {b}.",
    ),
    "smaller": (
        "Which is smaller, {a} or {b}?", "Which number is less: {a} or {b}?", "Find the smaller of {a} and {b}.",
        "Is {a} or {b} the smaller number?", "Compare {a} and {b}: which is smaller?",
        "Tell me the lesser of {a} and {b}.",
    ),
}  # fmt: skip

QUOTIENTS: Final = (*phrases.IN_WORDS["/"], "Share {a} equally among {b}.", "How many times does {b} go into {a}?")

SHAPES: Final = (
    "a+b+c", "a-b+c", "a+b-c", "a-b-c", "a*b+c", "a*b-c", "c+a*b", "c-a*b", "(a+b)*c", "(a-b)*c", "c*(a+b)",
)  # fmt: skip
"""Two steps; the one that comes first is between ``a`` and ``b``."""


@dataclass(frozen=True, slots=True)
class Expression:
    """``shape`` with numbers for its letters."""

    shape: str
    numbers: tuple[int, int, int]

    @property
    def compact(self) -> str:
        return "".join(str(self.numbers["abc".index(c)]) if c in "abc" else c for c in self.shape)

    @property
    def steps(self) -> tuple[Step, Step]:
        a, b, c = self.numbers
        at = self.shape.index("a")
        first = Step(self.shape[at + 1], a, b)
        rest = self.shape.replace("(a+b)", "v").replace("(a-b)", "v").replace(self.shape[at : at + 3], "v")
        return first, Step(rest[1], c, first.value) if rest[0] == "c" else Step(rest[1], first.value, c)

    @property
    def held_out(self) -> bool:
        return held_out("expression", self.compact)


def turn(rng: random.Random, kind: str, out: bool) -> Turn:
    """A question that the head answers. ``out``: about operands that training never sees."""
    if kind == "expression":
        return _expression(rng, out)
    step = _drawn(rng, _MAKERS[kind], out)
    traits = frozenset((f"step:{step.text}",))
    if kind == "comparison":
        what = rng.choice(tuple(COMPARISONS))
        user = rng.choice(COMPARISONS[what]).format(a=_written(rng, step.a), b=_written(rng, step.b))
        wanted = (max if what == "larger" else min)(step.a, step.b)
        text = f"They are equal: {wanted}." if step.a == step.b else f"The {what} number is {wanted}."
        return Turn(kind, user, Reply(step.lines, text), (str(wanted),), traits=traits)
    user = _asked(rng, step)
    text = f"{step.a} {step.op} {step.b} = {step.value}."
    return Turn(kind, user, Reply(step.lines, text), (str(step.value),), traits=traits)


def beyond(rng: random.Random, out: bool) -> Problem:
    """What the head is too small for."""
    while True:
        problem = rng.choices((product, long_problem), (3, 2))[0](rng)
        pair = problem.operands
        if len(pair) == 2 and (step := Step(problem.op, *pair)).held_out == out and not step.fits:
            return problem


def asked_beyond(rng: random.Random, problem: Problem) -> str:
    """A question for it, in figures."""
    if len(problem.operands) > 2 or rng.random() < 0.6:
        return _in_figures(rng, problem.spaced)
    return rng.choice(phrases.IN_WORDS[problem.op]).format(a=problem.operands[0], b=problem.operands[1])


def drill(rng: random.Random) -> tuple[str, Reply]:
    """A worked answer that no question stands before: its first line, and all of it."""
    made = turn(rng, rng.choices(IN_HEAD, (6, 6, 5, 4, 2, 3))[0], out=False)
    return made.final.thought.split("\n")[0], made.final


def _expression(rng: random.Random, out: bool) -> Turn:
    while True:
        shape = rng.choice(SHAPES)
        small = "*" in shape
        found = Expression(shape, (_number(rng, small), _number(rng, small), _number(rng, small)))
        steps = found.steps
        usable = all(step.fits for step in steps) and found.held_out == out
        if usable and (out or not any(step.held_out for step in steps)):
            break
    gap = rng.choice(("", " ", " "))
    spaced = "".join(f"{gap}{c}{gap}" if c in "+-*" else c for c in found.compact)
    if "(" not in found.compact and rng.random() < 0.25:
        for mark, word in SPOKEN.items():
            spaced = spaced.replace(mark, f" {word} ")
        spaced = " ".join(map(_word_if_number, spaced.split()) if rng.random() < 0.5 else spaced.split())
    thought = "\n".join((found.compact, *(step.lines for step in steps)))
    text = "".join(f" {c} " if c in "+-*" else c for c in found.compact) + f" = {steps[1].value}."
    traits = frozenset((f"expression:{found.compact}", *(f"step:{step.text}" for step in steps)))
    user = rng.choice(phrases.EXPRESSION[:20]).format(e=spaced)
    return Turn("expression", _first_up(user), Reply(thought, text), (str(steps[1].value),), traits=traits)


def _number(rng: random.Random, small: bool) -> int:
    return rng.randrange(2, 10) if small and rng.random() < 0.6 else rng.randrange(2, rng.choice((30, 100, 100, 400)))


def _word_if_number(word: str) -> str:
    return spelled(int(word)) if word.isdigit() else word


def _drawn(rng: random.Random, make: Callable[[random.Random], Step], out: bool) -> Step:
    while (step := make(rng)).held_out != out:
        pass
    return step


def _from_problem(make: Callable[[random.Random], Problem]) -> Callable[[random.Random], Step]:
    def made(rng: random.Random) -> Step:
        problem = make(rng)
        return Step(problem.op, *problem.operands)

    return made


def _product(rng: random.Random) -> Step:
    pair = [number(rng, rng.choice((1, 2, 2))), rng.randrange(10)]
    rng.shuffle(pair)
    return Step("*", *pair)


def _quotient(rng: random.Random) -> Step:
    divisor = rng.randrange(2, 10)
    return Step("/", divisor * rng.randrange(1, rng.choice((11, 100, 999 // divisor))), divisor)


def _comparison(rng: random.Random) -> Step:
    a = any_length(rng)
    near = rng.random() < 0.3
    b = max(0, min(999, a + rng.choice((-100, -20, -10, -1, 0, 1, 9, 10, 30, 100)))) if near else any_length(rng)
    return Step("?", a, b)


_MAKERS: Final = {
    "sum": _from_problem(easy_sum),
    "difference": _from_problem(easy_difference),
    "product": _product,
    "quotient": _quotient,
    "comparison": _comparison,
}


def _asked(rng: random.Random, step: Step) -> str:
    if rng.random() < 0.22:
        a, b = spelled(step.a), spelled(step.b)
        if rng.random() < 0.6:
            return _first_up(_opened(rng, rng.choice(phrases.EXPRESSION).format(e=f"{a} {SPOKEN[step.op]} {b}")))
        return _first_up(_in_words(rng, step.op, a, b))
    if rng.random() < 0.6:
        return _in_figures(rng, f"{step.a} {step.op} {step.b}")
    return _opened(rng, _in_words(rng, step.op, str(step.a), str(step.b)))


def _in_words(rng: random.Random, op: str, a: str, b: str) -> str:
    return rng.choice(QUOTIENTS if op == "/" else phrases.IN_WORDS[op]).format(a=a, b=b)


def _in_figures(rng: random.Random, spaced: str) -> str:
    text = spaced if rng.random() < 0.7 else spaced.replace(" ", "")
    if "*" in text and rng.random() < 0.4:
        text = text.replace("*", rng.choice(("x", "×")))
    return _opened(rng, rng.choice(phrases.EXPRESSION).format(e=text))


def _opened(rng: random.Random, text: str) -> str:
    """Sometimes with a word before it, sometimes in small letters, sometimes without its last mark."""
    if rng.random() < 0.12:
        text = rng.choice(phrases.OPENERS) + text[0].lower() + text[1:]
    elif rng.random() < 0.1:
        text = text[0].lower() + text[1:]
    return text.rstrip(".?") if rng.random() < 0.1 else text


def _written(rng: random.Random, value: int) -> str:
    return spelled(value) if rng.random() < 0.12 else str(value)


def _first_up(text: str) -> str:
    return text[0].upper() + text[1:]
