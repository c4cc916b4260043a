"""Drills in copying: pairs, a list of keys, and the pairs again in the order of that list.

What a chat asks of a model with tools is mostly this: to find the place in its prompt that fits, and to copy several
tokens from there to the letter. In a chat few tokens teach it, and the names that are copied are new in each; here
nearly all do.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final

from training.nano import lexicon
from training.nano.subjects import SUBJECTS
from training.nano.toolbox import calculator, finder
from training.samples import Reply

_MOST: Final = 8
_SPACED: Final = ("{}: {}", "{} = {}", "{} is {}", "{} {}", "{}, {}")
_TIGHT: Final = ("{} @{}", "{}:{}", '{} "{}"', "{} ({})", "{}={}")
"""A word behind a space is made of other tokens than the same word elsewhere: usually both sides are alike."""


def drill(rng: random.Random) -> tuple[str, Reply]:
    """Pairs and the keys that are asked for, which nothing tells; then the whole reply."""
    count = rng.randint(2, _MOST)
    keys = _different(rng, rng.choice((_person, _thing, _number, _name)), count)
    values = _different(rng, rng.choice((_name, _name, _name, _person, _thing, _number)), count)
    pairs = list(zip(keys, values, strict=True))
    asked = rng.sample(pairs, rng.randint((count + 1) // 2, count))
    forms = rng.choice((_SPACED, _TIGHT, _TIGHT, _SPACED + _TIGHT))
    told, answered = rng.choice(forms), rng.choice(forms)
    lines = [told.format(*pair) for pair in pairs]
    keys = [key for key, _ in asked]
    question = "? " + " ".join(keys) if rng.random() < 0.2 else "\n".join(("?", *keys))
    text = "\n".join((*lines, question))
    return text, Reply("\n".join((text, *(answered.format(*pair) for pair in asked))), "")


def _different(rng: random.Random, make: Callable[[random.Random], str], count: int) -> list[str]:
    found: dict[str, None] = {}
    while len(found) < count:
        found[make(rng)] = None
    return list(found)


def _name(rng: random.Random) -> str:
    """Of a tool, one of those that training may see."""
    gadget = calculator(rng, False) if rng.random() < 0.2 else finder(rng, rng.choice(SUBJECTS), False)
    return gadget.name


def _person(rng: random.Random) -> str:
    return rng.choice(lexicon.WOMEN + lexicon.MEN)


def _thing(rng: random.Random) -> str:
    return rng.choice(lexicon.THINGS + lexicon.WARES)


def _number(rng: random.Random) -> str:
    return str(rng.randrange(10, 1000))
