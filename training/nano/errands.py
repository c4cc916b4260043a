"""Turns that need tools: one call, several side by side, one after the other, failures, and tools that are missing.

The thought before a call says what is wanted and which tool gives it, after a mark rather than a space, so that the
name has the same tokens there as in the declaration and in the call; the thought after it says what came back. What the
head can work out from results it works out (``worked``); only beyond that does a calculator follow.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from training.nano import sums
from training.nano.subjects import ADDABLE, BY_NAME, CHAINED, CHAINS, FOREIGN, SUBJECTS, Subject
from training.nano.toolbox import Gadget
from training.nano.turns import Round, Turn
from training.nano.worked import Step
from training.samples import Call, Reply

ERRORS: Final = (
    "Error: timeout", "Error: not found", "error", "Error: the tool is not available", '{"error": "not found"}',
    '{"error": "timeout"}', "Error: no connection", '{"status": "failed"}', "Error 500",
)  # fmt: skip
_TIMES: Final = (
    "What do {n} kilos of {k} cost?",
    "How much are {n} kilos of {k}?",
    "What do I pay for {n} kilos of {k}?",
)
_TOGETHER: Final = (" What is that together?", " How much is that in all?", " Give me the total too.")
_DIFFERENCE: Final = (" What is the difference?", " How far apart are they?")
_USE: Final = ("Use {t}: {q}", "{q} Use {t}.", "{q} Please call {t}.", "With {t}: {q}")


@dataclass(frozen=True, slots=True)
class Wanted:
    """One fact that a call is to give."""

    subject: Subject
    gadget: Gadget
    key: str
    value: str
    option: str = ""

    @property
    def need(self) -> str:
        return self.subject.need.format(k=self.key)

    @property
    def answer(self) -> str:
        return self.subject.answer.format(k=self.key, v=self.value)

    def call(self, index: int) -> Call:
        return Call(self.gadget.name, index, self.gadget.look_up(self.key, self.option))


def finders(box: Sequence[Gadget]) -> list[Gadget]:
    """Those that look something up."""
    return [gadget for gadget in box if gadget.what in BY_NAME]


def calculator_in(box: Sequence[Gadget]) -> Gadget | None:
    return next((gadget for gadget in box if gadget.what == "calculator"), None)


def call(rng: random.Random, box: Sequence[Gadget], index: int, out: bool) -> Turn:
    """One call, and sometimes some arithmetic in the head with what it gives."""
    calculator, known = calculator_in(box), finders(box)
    if calculator is not None and (not known or rng.random() < 0.5):
        return _calculation(rng, calculator, index, out)
    wanted = _wanted(rng, rng.choice(known))
    if wanted.subject.name == "kilo price" and rng.random() < 0.5:
        step = _in_head(rng, wanted, out)
        if step is not None:
            return _multiple(rng, wanted, step, index)
    user = rng.choice(wanted.subject.questions).format(k=wanted.key)
    if wanted.option:
        user += f" Use {wanted.gadget.option[0]} {wanted.option}."
    elif rng.random() < 0.08:
        user = rng.choice(_USE).format(t=wanted.gadget.name, q=user)
    final = Reply(f"{wanted.need}: {wanted.value}", wanted.answer)
    return Turn("call", user, final, (wanted.value,), (_round(rng, (wanted,), index),), _traits(wanted))


def parallel(rng: random.Random, box: Sequence[Gadget], index: int, out: bool) -> Turn:
    """Two or three calls in one message."""
    known, calculator = finders(box), calculator_in(box)
    if calculator is not None and (not known or rng.random() < 0.3):
        return _calculations(rng, calculator, index, out)
    addable = [gadget for gadget in known if BY_NAME[gadget.what] in ADDABLE]
    if addable and rng.random() < 0.35:
        return _joined(rng, rng.choice(addable), index, out)
    first = rng.choice(known)
    count = 3 if rng.random() < 0.15 else 2
    gadgets = [first] * count if rng.random() < 0.6 else [first, *(rng.choice(known) for _ in range(count - 1))]
    wanted: list[Wanted] = []
    while len(wanted) < count:
        found = _wanted(rng, gadgets[len(wanted)], options=False)
        if found.key not in {w.key for w in wanted}:
            wanted.append(found)
    failed = rng.randrange(count) if rng.random() < 0.06 else -1
    thoughts = [f"{w.need}: {'failed' if i == failed else w.value}" for i, w in enumerate(wanted)]
    texts = [_failure(w) if i == failed else w.answer for i, w in enumerate(wanted)]
    answers: tuple[str, ...] = tuple("could not" if i == failed else w.value for i, w in enumerate(wanted))
    final = Reply("\n".join(thoughts), " ".join(texts))
    round_ = _round(rng, tuple(wanted), index, failed)
    return Turn("parallel", _asked(rng, wanted), final, answers, (round_,), _traits(*wanted))


def row(rng: random.Random, box: Sequence[Gadget], index: int, out: bool) -> Turn:
    """Two calls, the second about what the first one gave. The box has a chain, or a price by kilo and a calculator."""
    by_subject = {gadget.what: gadget for gadget in box}
    chains = [chain for chain in CHAINS if set(chain) <= set(by_subject)]
    calculator = calculator_in(box)
    if calculator is not None and "kilo price" in by_subject and (not chains or rng.random() < 0.5):
        return _bill(rng, by_subject["kilo price"], calculator, index)
    first_name, second_name = rng.choice(chains)
    first = _wanted(rng, by_subject[first_name], options=False)
    subject = BY_NAME[second_name]
    second = Wanted(subject, by_subject[second_name], first.value, subject.value(rng))
    later = _round(rng, (second,), index + 1)
    later = Round(Reply(f"{first.need}: {first.value}\n{later.reply.thought}", "", later.reply.calls), later.results)
    final = Reply(f"{second.need}: {second.value}", second.answer)
    user = rng.choice(CHAINED[second_name]).format(k=first.key)
    return Turn("row", user, final, (second.value,), (_round(rng, (first,), index), later), _traits(first, second))


def error(rng: random.Random, box: Sequence[Gadget], index: int) -> Turn:
    """A call that fails."""
    wanted = _wanted(rng, rng.choice(finders(box)), options=False)
    user = rng.choice(wanted.subject.questions).format(k=wanted.key)
    final = Reply(f"{wanted.need}: failed", _failure(wanted))
    return Turn("error", user, final, ("could not",), (_round(rng, (wanted,), index, 0),), _traits(wanted))


def refusal(rng: random.Random, box: Sequence[Gadget]) -> Turn:
    """A question that another tool would answer."""
    there = {gadget.what for gadget in box}
    need, key, question = _foreign(rng, there) if rng.random() < 0.5 else _unknown(rng, there)
    need = need.format(k=key)
    text = f"I have no tool for the {need}."
    return Turn("refusal", question.format(k=key), Reply(f"{need}: no tool", text), ("no tool",))


def _foreign(rng: random.Random, there: set[str]) -> tuple[str, str, str]:
    """Need, key and question that only a tool of another kind would answer."""
    _, need, _, _, keys, questions = rng.choice([entry for entry in FOREIGN if entry[0] not in there])
    return need, rng.choice(keys), rng.choice(questions)


def _unknown(rng: random.Random, there: set[str]) -> tuple[str, str, str]:
    """The same of one of our subjects; a price is a price, by the kilo or not."""
    prices = {"price", "kilo price"}
    there = there | prices if there & prices else there
    subject = rng.choice([subject for subject in SUBJECTS if subject.name not in there])
    return subject.need, subject.key(rng), rng.choice(subject.questions)


def beyond(rng: random.Random, out: bool) -> Turn:
    """Arithmetic that is too much without a calculator."""
    problem = sums.beyond(rng, out)
    text = f"I need a calculator for {problem.spaced}."
    traits = frozenset((f"step:{problem.compact}",))
    return Turn(
        "beyond",
        sums.asked_beyond(rng, problem),
        Reply(f"{problem.compact}: no tool", text),
        ("calculator",),
        (),
        traits,
    )


def _calculation(rng: random.Random, gadget: Gadget, index: int, out: bool) -> Turn:
    problem = sums.beyond(rng, out)
    user = sums.asked_beyond(rng, problem)
    if rng.random() < 0.08:
        user = rng.choice(_USE).format(t=gadget.name, q=user)
    a, b = problem.operands
    made = Call(gadget.name, index, gadget.calculate(problem.op, a, b))
    failed = rng.random() < 0.03
    result = rng.choice(ERRORS) if failed else _result(rng, "result", problem.value, "")
    text = f"{problem.spaced} = {problem.value}."
    final = Reply(f"{problem.compact}: {problem.value}", text)
    if failed:
        final = Reply(f"{problem.compact}: failed", f"I could not get {problem.spaced}: the tool failed.")
    rounds = (Round(Reply(f"{problem.compact} @{gadget.name}", "", (made,)), (result,)),)
    traits = frozenset((f"step:{problem.compact}", f"name:{gadget.name}"))
    return Turn("call", user, final, ("could not",) if failed else (problem.value,), rounds, traits)


def _calculations(rng: random.Random, gadget: Gadget, index: int, out: bool) -> Turn:
    """Two problems in one message."""
    problems = [sums.beyond(rng, out) for _ in range(2)]
    calls = tuple(
        Call(gadget.name, index + place, gadget.calculate(p.op, p.operands[0], p.operands[1]))
        for place, p in enumerate(problems)
    )
    joined = rng.choice(("What is {} and what is {}?", "{} and {}", "Work out {} and {}.", "I need {} and {}."))
    user = joined.format(*(p.spaced if rng.random() < 0.6 else p.compact for p in problems))
    thought = "\n".join(f"{p.compact} @{gadget.name}" for p in problems)
    results = tuple(_result(rng, "result", p.value, "") for p in problems)
    final = Reply(
        "\n".join(f"{p.compact}: {p.value}" for p in problems), " ".join(f"{p.spaced} = {p.value}." for p in problems)
    )
    traits = frozenset((*(f"step:{p.compact}" for p in problems), f"name:{gadget.name}"))
    answers = tuple(p.value for p in problems)
    return Turn("parallel", user, final, answers, (Round(Reply(thought, "", calls), results),), traits)


def _multiple(rng: random.Random, wanted: Wanted, step: Step, index: int) -> Turn:
    wanted = Wanted(wanted.subject, wanted.gadget, wanted.key, str(step.b))
    user = rng.choice(_TIMES).format(n=step.a, k=wanted.key)
    final = Reply(f"{wanted.need}: {wanted.value}\n{step.lines}", _cost(step.a, wanted, step.value))
    traits = _traits(wanted) | {f"step:{step.text}"}
    return Turn("call", user, final, (str(step.value),), (_round(rng, (wanted,), index),), traits)


def _bill(rng: random.Random, gadget: Gadget, calculator: Gadget, index: int) -> Turn:
    while True:
        wanted = _wanted(rng, gadget, options=False)
        step = Step("*", rng.randrange(10, 100), int(wanted.value))
        if not step.fits and not step.held_out:
            break
    first = _round(rng, (wanted,), index)
    made = Call(calculator.name, index + 1, calculator.work_out(step))
    second = Reply(f"{wanted.need}: {wanted.value}\n{step.text} @{calculator.name}", "", (made,))
    rounds = (first, Round(second, (_result(rng, "result", str(step.value), ""),)))
    final = Reply(f"{step.text}: {step.value}", _cost(step.a, wanted, step.value))
    user = rng.choice(_TIMES).format(n=step.a, k=wanted.key)
    traits = _traits(wanted) | {f"step:{step.text}", f"name:{calculator.name}"}
    return Turn("row", user, final, (str(step.value),), rounds, traits)


def _joined(rng: random.Random, gadget: Gadget, index: int, out: bool) -> Turn:
    """The sum or the difference of two results."""
    while True:
        pair = [_wanted(rng, gadget, options=False) for _ in range(2)]
        x, y = (int(wanted.value) for wanted in pair)
        total = rng.random() < 0.7
        step = Step("+", x, y) if total else Step("-", max(x, y), min(x, y))
        if step.fits and pair[0].key != pair[1].key and (out or not step.held_out):
            break
    user = _asked(rng, pair) + rng.choice(_TOGETHER if total else _DIFFERENCE)
    thought = "\n".join((*(f"{wanted.need}: {wanted.value}" for wanted in pair), step.lines))
    told = "Together that is" if total else "The difference is"
    final = Reply(thought, f"{told} {step.value} {pair[0].subject.unit}.")
    traits = _traits(*pair) | {f"step:{step.text}"}
    return Turn("parallel", user, final, (str(step.value),), (_round(rng, tuple(pair), index),), traits)


def _wanted(rng: random.Random, gadget: Gadget, options: bool = True) -> Wanted:
    subject = BY_NAME[gadget.what]
    option = rng.choice(gadget.option[1]) if options and gadget.option[0] and rng.random() < 0.4 else ""
    return Wanted(subject, gadget, subject.key(rng), subject.value(rng), option)


def _in_head(rng: random.Random, wanted: Wanted, out: bool) -> Step | None:
    step = Step("*", rng.randrange(2, 10), int(wanted.value))
    return step if step.fits and (out or not step.held_out) else None


def _round(rng: random.Random, wanted: tuple[Wanted, ...], index: int, failed: int = -1) -> Round:
    """The calls for some facts and their results; the one at ``failed`` goes wrong."""
    thought = "\n".join(f"{w.need} @{w.gadget.name}" for w in wanted)
    calls = tuple(w.call(index + place) for place, w in enumerate(wanted))
    results = tuple(
        rng.choice(ERRORS) if place == failed else _result(rng, w.subject.nouns[0], w.value, w.subject.unit)
        for place, w in enumerate(wanted)
    )
    return Round(Reply(thought, "", calls), results)


def _result(rng: random.Random, noun: str, value: str, unit: str) -> str:
    style = rng.random()
    if style < 0.55:
        return value
    if style < 0.65 and unit:
        return f"{value} {unit}"
    shown = int(value) if value.isdigit() else value
    field = noun if style < 0.85 else rng.choice(("result", "value", "answer", "output"))
    return json.dumps({field: shown} if style < 0.95 else {"ok": True, field: shown})


def _asked(rng: random.Random, wanted: Sequence[Wanted]) -> str:
    """All questions in one message; one of the same kind as the one before may be short."""
    texts: list[str] = []
    before = ""
    for each in wanted:
        question = rng.choice(each.subject.questions)
        if texts and before in each.subject.questions and rng.random() < 0.7:
            article = "the " if "the {k}" in before else ""
            noun = next((word for word in ("room", "train", "order") if f"{word} {{k}}" in before), "")
            texts.append(f"And {article}{noun + ' ' if noun else ''}{each.key}?")
        else:
            texts.append(question.format(k=each.key))
            before = question
    return " ".join(texts)


def _failure(wanted: Wanted) -> str:
    return f"I could not get the {wanted.need}: the tool failed."


def _cost(count: int, wanted: Wanted, value: int) -> str:
    return f"{count} kilos of {wanted.key} cost {value} dollars."


def _traits(*wanted: Wanted) -> frozenset[str]:
    return frozenset(f"name:{w.gadget.name}" for w in wanted)
