"""Long contexts: notes with one entry that is asked for, and text that has nothing to do with anything.

Lengths are estimated from characters, since a generator knows no vocabulary: no text gets beyond ``MOST`` by that
estimate, which leaves room for the rest of a chat within 2,048 tokens.
"""

from __future__ import annotations

import random
from typing import Final

from training.nano import lexicon
from training.nano.heldout import held_out
from training.nano.subjects import INTEGER_KEYS, SUBJECTS, Subject
from training.nano.turns import Turn
from training.samples import Message, Reply

MOST: Final = 1500
SOME: Final = 300
FULL: Final = 1150
"""From how many tokens a text is long in training, and in evaluation; 0 asks for a short one."""

_PLACES: Final = tuple(
    f"the {place}"
    for place in lexicon.words(
        "market station river mill harbour library museum bakery garden square bridge school theatre park beach farm "
        "church tower fountain stadium"
    )
)
_MOODS: Final = lexicon.words("happy tired hungry busy calm late early alone silent proud curious cold")
_DOINGS: Final = (
    "{p} went to {l}.", "{p} walked past {l}.", "{p} was {m}.", "Near {l} it was quiet.",
    "{p} talked with {q} about the {w}.",
    "The {w} belonged to {p}.", "{p} looked for the {w}.", "In {c} the sun was shining.", "{p} wrote to {q} from {c}.",
    "{p} forgot the {w} at {l}.", "{q} and {p} met at {l}.", "Nobody saw the {w}.", "{p} sang on the way to {l}.",
    "It rained in {c}.", "{p} dreamt of {c}.", "{q} was {m} because of the {w}.", "At {l} somebody sold {t}.",
    "{p} took a picture of {l}.", "The {t} from {c} are the best.", "{p} asked {q} for the {w}.",
    "They had lunch at {l}.",
    "The wind blew over {l}.", "{p} likes {t}.", "{q} never liked {c}.", "A {w} stood near {l}.",
)  # fmt: skip

_HEADINGS: Final = ("Notes:", "Here are my notes.", "A list:", "What I wrote down:", "Data:", "From my book:", "Table:")
_KEEP: Final = ("Remember this.", "Keep this in mind.", "Please read this.", "Here is some text.", "Read this first.")
_KEPT: Final = ("I have read it.", "All right.", "I will keep it in mind.")


def estimate(text: str) -> float:
    """About how many tokens a text has: digits and marks are single, words come in pieces of some letters."""
    letters = sum(map(str.isalpha, text))
    return letters / 2.9 + (len(text) - letters - text.count(" "))


def sentence(rng: random.Random) -> str:
    """A sentence without a number."""
    p, q = rng.sample(lexicon.WOMEN + lexicon.MEN, 2)
    words = {"p": p, "q": q, "l": rng.choice(_PLACES), "m": rng.choice(_MOODS), "w": rng.choice(lexicon.WARES),
             "c": rng.choice(lexicon.CITIES), "t": rng.choice(lexicon.THINGS)}  # fmt: skip
    text = rng.choice(_DOINGS).format_map(words)
    return text[0].upper() + text[1:]


def prose(rng: random.Random, tokens: float) -> str:
    """Sentences of about so many tokens."""
    found: list[str] = []
    while tokens > 0:
        found.append(sentence(rng))
        tokens -= estimate(found[-1])
    return " ".join(found)


def length(rng: random.Random, least: int) -> float:
    """Tokens to fill: from ``least`` to ``MOST``, all sizes alike on a scale of ratios; a few where ``least`` is 0."""
    low, high = (least, MOST) if least else (20, SOME)
    return float(low * (high / low) ** rng.random())


def before(rng: random.Random, least: int) -> tuple[Message, ...]:
    """An exchange about a text that doesn't matter."""
    text = f"{rng.choice(_KEEP)} {prose(rng, length(rng, least))}"
    return (
        {"role": "user", "content": text},
        {"role": "assistant", "content": rng.choice(_KEPT), "reasoning_content": ""},
    )


def recall(rng: random.Random, out: bool, least: int) -> Turn:
    """A question about an entry of a list of notes, which stand in the question, before it or in the system prompt."""
    subject = rng.choice(SUBJECTS)
    form = rng.choice(("{k}: {v}", "- {k}: {v}", "{k} | {v}", "{k}, {v}", "{k} = {v}", "", ""))
    room = length(rng, least)
    entries = _entries(rng, subject, form or subject.answer, room * (1 if rng.random() < 0.5 else rng.random()))
    key = rng.choice(tuple(entries))
    value = entries[key][0]
    if held_out("entry", f"{key}:{value}") != out:
        return recall(rng, out, least)
    between = "\n" if form or rng.random() < 0.5 else " "
    notes = f"{rng.choice(_HEADINGS)} {_about(subject)}\n" + between.join(line for _, line in entries.values())
    left = room - estimate(notes)
    if least and left > 20:
        ahead = left * rng.random()
        notes = f"{prose(rng, ahead)}\n{notes}\n{prose(rng, left - ahead)}"
    return _placed(rng, subject, notes, key, "" if rng.random() < 0.08 else value)


def _entries(rng: random.Random, subject: Subject, form: str, room: float) -> dict[str, tuple[str, str]]:
    """Key → value and line, about ``room`` tokens of them, fewer where there are not so many keys; at least one."""
    entries: dict[str, tuple[str, str]] = {}
    misses = 0
    while not entries or (room > 0 and misses < 20):
        key, value = subject.key(rng), subject.value(rng)
        if key in entries:
            misses += 1
            continue
        line = form.format(k=key, v=value)
        entries[key] = value, line
        room -= estimate(line) + 1
    return entries


def _about(subject: Subject) -> str:
    return {"occupant": "room and person", "platform": "train and platform", "status": "order and status"}.get(
        subject.name, f"{subject.params[0]} and {subject.nouns[0]}"
    )


def _placed(rng: random.Random, subject: Subject, notes: str, key: str, value: str) -> Turn:
    """The notes where they are to stand, and the question. Without a value: a question that they do not answer."""
    traits = frozenset((f"entry:{key}:{value}",))
    if not value:
        subject = rng.choice([s for s in SUBJECTS if s.name != subject.name and s.name not in INTEGER_KEYS])
        key = subject.key(rng)
        traits = frozenset()
    question = rng.choice(subject.questions).format(k=key)
    need = subject.need.format(k=key)
    final, answers = Reply(f"{need}: {value}", subject.answer.format(k=key, v=value)), (value,)
    if not value:
        final, answers = Reply(f"{need}: not there", f"The notes do not say the {need}."), ("do not say",)
    place = rng.randrange(4)
    if place == 0:
        return Turn("recall", question, final, answers, (), traits, ({"role": "system", "content": notes},))
    if place == 1:
        first: Message = {"role": "user", "content": f"{rng.choice(_KEEP)} {notes}"}
        kept: Message = {"role": "assistant", "content": rng.choice(_KEPT), "reasoning_content": ""}
        return Turn("recall", question, final, answers, (), traits, (first, kept))
    text = f"{notes}\n{question}" if place == 2 else f"{question}\n{notes}"
    return Turn("recall", text, final, answers, (), traits)
