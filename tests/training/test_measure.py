"""The judge of answers knows right from wrong; figures become a card; a log becomes a picture."""

from __future__ import annotations

import random
import xml.etree.ElementTree as ElementTree
from typing import Any

import pytest
from training.arithmetic import Problem
from training.chats import PLAIN_CALCULATOR, sample
from training.configs import PICO
from training.judge import Spoken, Verdict, judge
from training.measure import group
from training.plot import curve
from training.report import card, table
from training.samples import Call, Reply, Sample, Wish

from perilune.types import FinishReason

SUM = Sample("sum", ({"role": "user", "content": "2+5"},), (), Reply("…", "2 + 5 = 7."), Problem("+", (2, 5)))
CALL = Sample(
    "call",
    ({"role": "user", "content": "12*34"},),
    (PLAIN_CALCULATOR,),
    Reply("…", "", (Call("calculator", 0, '{"expression": "12*34"}'),)),
    Problem("*", (12, 34)),
)
STOP = FinishReason.STOP


@pytest.mark.parametrize(
    ("chat", "spoken", "verdict"),
    [
        (SUM, Spoken("2 + 5 = 7.", (), STOP), Verdict(True, True)),
        (SUM, Spoken("It makes 7.", (), STOP), Verdict(True, True)),
        (SUM, Spoken("2 + 5 = 17.", (), STOP), Verdict(True, False)),
        (SUM, Spoken("2 + 5 = 7.", (), FinishReason.LENGTH), Verdict(False, False)),
        (SUM, Spoken("2 + 5 = 7.", (("calculator", "{}"),), STOP), Verdict(False, False)),
        (SUM, Spoken("", (), STOP), Verdict(True, False)),
        (CALL, Spoken("", (("calculator", '{"expression":"12*34"}'),), STOP), Verdict(True, True)),
        (CALL, Spoken("", (("calculator", '{"expression": "12*33"}'),), STOP), Verdict(True, False)),
        (CALL, Spoken("", (("calculator", '{"expression": 408}'),), STOP), Verdict(False, False)),
        (CALL, Spoken("", (("calculator", '{"expression": "12*34'),), STOP), Verdict(False, False)),
        (CALL, Spoken("", (("calculator", "[1]"),), STOP), Verdict(False, False)),
        (CALL, Spoken("", (("abacus", '{"expression": "12*34"}'),), STOP), Verdict(False, False)),
        (CALL, Spoken("", (("calculator", '{"expression": "12*34"}'),) * 2, STOP), Verdict(False, False)),
        (CALL, Spoken("408", (), STOP), Verdict(False, False)),
    ],
)
def test_verdicts(chat: Sample, spoken: Spoken, verdict: Verdict) -> None:
    assert judge(chat, spoken) == verdict


def test_sentences_are_judged_to_the_letter() -> None:
    chat = sample(random.Random(0), Wish(kind="talk", turns=1))
    assert judge(chat, Spoken(chat.reply.text, (), STOP)).right
    assert not judge(chat, Spoken(chat.reply.text[:-1], (), STOP)).right


def test_groups_by_digits_of_the_longer_operand() -> None:
    assert group("sum", SUM) == "sum, 1 digits"
    assert group("call", CALL) == "call"
    assert group("sum", Sample("sum", (), (), SUM.reply, traits=frozenset(("step:12+345",)))) == "sum, 3 digits"


def test_the_card_states_counts_and_intervals() -> None:
    found = {"0": {"call": {"count": 100, "valid": 99, "right": 95}}}
    text = table(found)
    assert "95 of 100: 95.0% (88.8% to 97.8%)" in text
    assert "99 of 100: 99.0%" in text
    log = [{"step": 1, "tokens": 3000, "loss": 0.1, "cpu_s": 5.0, "wall_s": 6.0}]
    assert text in card(PICO, log, found, 1000)


def test_the_curve_is_well_formed() -> None:
    log: list[dict[str, Any]] = [
        {"step": 20, "tokens": 1000, "loss": 2.0},
        {"step": 40, "tokens": 2000, "loss": 0.5, "held_out": {"sum": (0.25, 0.1)}},
    ]
    root = ElementTree.fromstring(curve(log, "title"))  # noqa: S314  our own text
    labels = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "sum 25%" in labels
