"""Word problems: a plan of parts, a sentence frame for each part, then names and numbers.

A template is the plan, its frames and its tense; a tenth of all templates is held out, and apart from that a tenth of
all tuples of numbers. A tenth of the frames, where a part has enough of them, is never seen in training at all. The
thought goes through the problem part by part: it quotes what it rests on and works it. Problems of one template differ
in names, things, connecting words and numbers.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from training.nano import frames, lexicon, measures
from training.nano.heldout import held_out
from training.nano.numerals import spelled
from training.nano.roles import EVENTS, ROLES, Line, Plan, plans
from training.nano.turns import Turn
from training.nano.worked import Step
from training.samples import Reply

DOMAINS: Final = {
    "things": frames.THINGS, "crowd": frames.CROWD, "shop": measures.SHOP, "length": measures.LENGTH,
    "stock": measures.STOCK, "work": measures.WORK,
}  # fmt: skip
_DOMAIN_WEIGHTS: Final = {"things": 8, "crowd": 3, "shop": 4, "length": 2, "stock": 2, "work": 3}
_NEXT: Final = ("Then ", "Later ", "After that ", "The next day ", "In the evening ", "On Friday ", "Soon ")
_ASK_FOR_MARK: Final = (
    " End with #### and the number.", " Write the final number after ####.", " Put the result behind ####.",
)  # fmt: skip
Filler = Callable[[], Iterable[str]]
_TENSE: Final = re.compile(r"([A-Za-z]+)/([A-Za-z]+)")
_QUOTE: Final = re.compile(r"\[([^\]]*)\]")


@dataclass(frozen=True, slots=True)
class Frame:
    """One sentence form in both tenses. ``order``: the quotes by the part's numbers, then those without a number."""

    name: str
    tenses: tuple[str, str]
    order: tuple[int, ...]
    unseen: bool


@dataclass(frozen=True, slots=True)
class Story:
    """A problem before it is worded.

    Attributes:
        numbers: those of each part.
        lines: worked lines of each part, in the order of thinking: (part, quote, number or step).
        value: the answer.
    """

    plan: Plan
    numbers: tuple[tuple[int, ...], ...]
    lines: tuple[tuple[int, int, int | Step], ...]
    value: int

    @property
    def operands(self) -> str:
        return ",".join(str(n) for part in self.numbers for n in part)


def _frame(domain: str, role: str, index: int, text: str) -> Frame:
    quotes = _QUOTE.findall(text)
    numbered = [next((i for i, quote in enumerate(quotes) if mark in quote), -1) for mark in ("{n}", "{m}")]
    order = [i for i in numbered if i >= 0]
    order += [i for i in range(len(quotes)) if i not in order]
    tenses = _TENSE.sub(r"\1", text), _TENSE.sub(r"\2", text)
    return Frame(f"{domain}.{role}.{index}", tenses, tuple(order), False)


def _frames(domain: str, role: str, texts: tuple[str, ...]) -> tuple[Frame, ...]:
    """All frames of a role; of roles that have enough, a tenth is kept from training."""
    found = [_frame(domain, role, index, text) for index, text in enumerate(texts)]
    if len(found) < 4:
        return tuple(found)
    return tuple(
        Frame(f.name, f.tenses, f.order, held_out("frame", text)) for f, text in zip(found, texts, strict=True)
    )


FRAMES: Final = {
    (domain, role): _frames(domain, role, texts) for domain, roles in DOMAINS.items() for role, texts in roles.items()
}
_SEEN: Final = {key: tuple(f for f in found if not f.unseen) or found for key, found in FRAMES.items()}
_UNSEEN: Final = {key: tuple(f for f in found if f.unseen) for key, found in FRAMES.items()}
PLANS: Final = {
    steps: {
        domain: [plan for plan in plans(domain, frozenset(roles)) if plan.steps == steps]
        for domain, roles in DOMAINS.items()
    }
    for steps in (1, 2, 3)
}


def turn(rng: random.Random, steps: int, out: bool, unseen: bool, filler: Filler = tuple) -> Turn:
    """A word problem of ``steps`` steps.

    Args:
        out: of a template and with numbers that training never sees.
        unseen: with at least one frame that training never sees.
        filler: gives sentences about other things to stand before each of the problem's own.
    """
    while True:
        domain = rng.choices(tuple(_DOMAIN_WEIGHTS), tuple(_DOMAIN_WEIGHTS.values()))[0]
        plan = rng.choice(PLANS[steps][domain])
        plan = plan if rng.random() > 0.1 else Plan(domain, (plan.parts[0], "noise", *plan.parts[1:]))
        chosen, tense = _chosen(rng, plan, unseen), 1 if plan.parts[0] == "some" else rng.randrange(2)
        template = "|".join((*(frame.name for frame in chosen), str(tense)))
        if any(frame.unseen for frame in chosen) if unseen else held_out("template", template) == out:
            break
    story = numbered(rng, plan, out or unseen)
    user, quotes, told = _worded(rng, story, chosen, tense, filler)
    thought = "\n".join(
        f"{quotes[part][quote]}: {what.lines if isinstance(what, Step) else what}" for part, quote, what in story.lines
    )
    text = told.format(v=story.value)
    if rng.random() < 0.1:
        user += rng.choice(_ASK_FOR_MARK)
        text += f"\n#### {story.value}"
    traits = {f"template:{template}", f"operands:{story.operands}", *(f"frame:{frame.name}" for frame in chosen)}
    traits |= {f"step:{what.text}" for _, _, what in story.lines if isinstance(what, Step)}
    return Turn(f"story{steps}", user, Reply(thought, text), (str(story.value),), traits=frozenset(traits))


def numbered(rng: random.Random, plan: Plan, out: bool) -> Story:
    """Numbers for a plan with which every step stays within the head."""
    while True:
        story = _solved(plan, tuple(ROLES[p].draw(rng) if p in ROLES else _drawn(rng, p) for p in plan.parts))
        steps = [what for _, _, what in story.lines if isinstance(what, Step)]
        if not all(step.fits and step.value > 1 for step in steps) or held_out("operands", story.operands) != out:
            continue
        if out or not any(step.held_out for step in steps):
            return story


def _drawn(rng: random.Random, part: str) -> tuple[int, ...]:
    if part == "finally":
        return (rng.randrange(5, rng.choice((30, 100, 300))),)
    return (rng.randrange(2, 60),) if part == "noise" else ()


def _solved(plan: Plan, numbers: tuple[tuple[int, ...], ...]) -> Story:
    lines: list[tuple[int, int, int | Step]] = []
    value = 0

    def add(part: int, found: tuple[Line, ...]) -> None:
        nonlocal value
        for quote, what in found:
            value = what.value if isinstance(what, Step) else what
            lines.append((part, quote, what))

    if plan.parts[0] == "some":
        end = len(plan.parts) - 2
        add(end, ((0, numbers[end][0]),))
        for part in range(end - 1, 0, -1):
            if plan.parts[part] != "noise":
                add(part, ((0, Step("-" if plan.parts[part] == "gain" else "+", value, numbers[part][0])),))
    else:
        for part, role in enumerate(plan.parts):
            if role == "both":
                add(part, ((0, Step("+", numbers[0][0], value)),))
            elif role != "noise":
                add(part, ROLES[role].lines(numbers[part], value))
    return Story(plan, numbers, tuple(lines), value)


def _chosen(rng: random.Random, plan: Plan, unseen: bool) -> list[Frame]:
    keys = [(plan.domain, part) for part in plan.parts]
    chosen = [rng.choice(_SEEN[key]) for key in keys]
    places = [place for place, key in enumerate(keys) if _UNSEEN[key]]
    if unseen and places:
        place = rng.choice(places)
        chosen[place] = rng.choice(_UNSEEN[keys[place]])
    return chosen


def _worded(
    rng: random.Random, story: Story, chosen: list[Frame], tense: int, filler: Filler
) -> tuple[str, list[list[str]], str]:
    """The problem's text, the quotes of every part in the order of its numbers, and the answer around ``{v}``."""
    words = _cast(rng, story.plan.domain, tense)
    in_words = rng.random() < 0.1 and max(n for part in story.numbers for n in (0, *part)) < 100
    others = rng.sample(lexicon.MEN if words["he"] == "she" else lexicon.WOMEN, len(chosen))
    sentences: list[str] = []
    quotes: list[list[str]] = []
    for part, frame, numbers in zip(story.plan.parts, chosen, story.numbers, strict=True):
        shown = [spelled(n) if in_words else str(n) for n in numbers]
        words |= dict(zip("nm", shown, strict=False)) | _containers(rng)
        if part != "both":
            words["G"] = others.pop()
        sentences += filler()
        known = filler is tuple and sentences and rng.random() < 0.5 and words["H"] in sentences[-1]
        words["S"] = words["he"] if known else words["H"]
        text = frame.tenses[tense].format_map(words)
        if part in EVENTS and rng.random() < 0.35 and not text.startswith(_NO_LEAD):
            text = rng.choice(_NEXT if story.plan.domain in ("things", "crowd") else _NEXT[:3]) + text
        text = _first_up(text)
        found = _QUOTE.findall(text)
        quotes.append([found[index] for index in frame.order])
        sentences.append(text.replace("[", "").replace("]", ""))
    told = _ANSWERS.get((story.plan.domain, story.plan.parts[-1]), _PLAIN_ANSWER)
    return " ".join(sentences), quotes, _in_tense(told, tense).format_map(words | {"v": "{v}"})


def _cast(rng: random.Random, domain: str, tense: int) -> dict[str, str]:
    """Who and what a story is about. Others in it are of the other sex, so that a pronoun says who is meant."""
    female = rng.random() < 0.5
    span = rng.choice(lexicon.SPANS)
    words = {
        "H": rng.choice(lexicon.WOMEN if female else lexicon.MEN), "he": "she" if female else "he",
        "P": "her" if female else "his", "P_": "her" if female else "him", "w": span[0], "ws": span[1],
    }  # fmt: skip
    if domain == "things":
        colours = rng.sample(lexicon.COLOURS, 2) if rng.random() < 0.7 else rng.choice(lexicon.QUALITIES)
        words |= {"t": rng.choice(lexicon.THINGS), "A": colours[0], "B": colours[1]}
    elif domain == "crowd":
        words |= dict(zip(("t", "where"), rng.choice(lexicon.CROWDS), strict=True))
    elif domain == "shop":
        x, y = rng.sample(lexicon.WARES, 2)
        words |= {"x": x, "y": y, "t": lexicon.plural(x), "u": rng.choice(lexicon.MONEY)}
    elif domain == "length":
        words |= dict(zip(("o", "u"), rng.choice(lexicon.LENGTHS), strict=True))
    elif domain == "stock":
        words |= dict(zip(("x", "u", "o"), rng.choice(lexicon.STOCKS), strict=True))
    else:
        does, do, what = rng.choice(lexicon.WORKS)
        words |= {"does": does.split("/")[tense], "do": do, "t": what}
    return words


def _containers(rng: random.Random) -> dict[str, str]:
    boxes, box = rng.choice(lexicon.BOXES)
    return {"boxes": boxes, "box": box, "kids": rng.choice(lexicon.SHARERS)}


def _in_tense(text: str, tense: int) -> str:
    return _TENSE.sub(rf"\{tense + 1}", text)


def _first_up(text: str) -> str:
    """A capital at the beginning, inside a bracket too."""
    place = 1 if text[0] == "[" else 0
    return text[:place] + text[place].upper() + text[place + 1 :]


_NO_LEAD: Final = ("every", "the next", "with ", "on ", "[the", "a ", "there")
_PLAIN_ANSWER: Final = "The answer is {v}."
_ANSWERS: Final[Mapping[tuple[str, str], str]] = {
    ("things", "now"): "{H} has/had {v} {t}.",
    ("things", "plain"): "{H} has/had {v} {t}.",
    ("things", "first"): "{H} had {v} {t} at first.",
    ("things", "more_than"): "{H} has/had {v} more {t}.",
    ("things", "together"): "Together they have/had {v} {t}.",
    ("things", "both"): "Together they have/had {v} {t}.",
    ("things", "need"): "{H} needs/needed {v} more {t}.",
    ("crowd", "now"): "There are/were {v} {t} {where}.",
    ("crowd", "plain"): "There are/were {v} {t} {where}.",
    ("shop", "now"): "{H} pays/paid {v} {u}.",
    ("shop", "plain"): "{H} pays/paid {v} {u}.",
    ("shop", "need"): "That leaves/left {v} {u}.",
    ("shop", "share"): "It is/was {v} {u} each.",
    ("shop", "together"): "Together they spend/spent {v} {u}.",
    ("length", "now"): "It is/was {v} {u} long.",
    ("length", "plain"): "It is/was {v} {u} long.",
    ("stock", "now"): "There are/were {v} {u} of {x}.",
    ("stock", "plain"): "There are/were {v} {u} of {x}.",
    ("work", "now"): "It is/was {v} {t} in all.",
    ("work", "plain"): "It is/was {v} {t} in all.",
    ("work", "together"): "Together it is/was {v} {t}.",
    ("work", "both"): "Together it is/was {v} {t}.",
}
"""By domain and ending."""
