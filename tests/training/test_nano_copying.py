"""Drills in copying say what they were told, in the order that was asked for."""

from __future__ import annotations

import random
import re

from training.nano.copying import drill
from training.nano.heldout import held_out


def test_answers_are_the_pairs_that_were_asked_for() -> None:
    rng = random.Random(4)
    for _ in range(500):
        text, reply = drill(rng)
        given, _, question = text.partition("\n?")
        pairs = dict(re.findall(r"[\w/]+", line.replace(" is ", " "))[:2] for line in given.split("\n"))
        answered = reply.thought.removeprefix(text + "\n").split("\n")
        told = [tuple(re.findall(r"[\w/]+", line.replace(" is ", " "))) for line in answered]
        assert [key for key, _ in told] == question.split()
        assert all(pairs[key] == value for key, value in told)
        assert len(pairs) == len(given.split("\n")), "each key once"
        assert text[-1].isalnum(), "the first learned token is a line's end of its own"


def test_no_name_is_one_that_training_must_not_see() -> None:
    rng = random.Random(5)
    words = {word for _ in range(2000) for word in re.findall(r"\w+", drill(rng)[1].thought)}
    names = {word for word in words if "_" in word}
    assert len(names) > 1000
    assert not any(held_out("name", name) for name in names)
