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
_FEW: Final = 300

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


def length(rng: random.Random, long: bool) -> float:
    """Tokens to fill, from a few to ``MOST``: short or long ones, all sizes alike on a scale of ratios."""
    low, high = (_FEW, MOST) if long else (20, _FEW)
    return float(low * (high / low) ** rng.random())


def before(rng: random.Random, long: bool = True) -> tuple[Message, ...]:
    """An exchange about a text that doesn't matter."""
    text = f"{rng.choice(_KEEP)} {prose(rng, length(rng, long))}"
    return (
        {"role": "user", "content": text},
        {"role": "assistant", "content": rng.choice(_KEPT), "reasoning_content": ""},
    )


def recall(rng: random.Random, out: bool, long: bool) -> Turn:
    """A question about an entry of a list of notes, which stand in the question, before it or in the system prompt."""
    subject = rng.choice(SUBJECTS)
    form = rng.choice(("{k}: {v}", "- {k}: {v}", "{k} | {v}", "{k}, {v}", "{k} = {v}", "", ""))
    room = length(rng, long)
    entries: dict[str, str] = {}
    lines: list[str] = []
    misses = 0
    while room > 0 and misses < 20:
        key, value = subject.key(rng), subject.value(rng)
        if key in entries:
            misses += 1
            continue
        entries[key] = value
        lines.append((form or subject.answer).format(k=key, v=value))
        room -= estimate(lines[-1]) + 1
        if long and not form and rng.random() < 0.5:
            lines[-1] += " " + sentence(rng)
            room -= estimate(lines[-1]) - estimate(lines[-1].split(". ")[0])
    key = rng.choice(tuple(entries))
    if held_out("entry", f"{key}:{entries[key]}") != out:
        return recall(rng, out, long)
    notes = f"{rng.choice(_HEADINGS)} {_about(subject)}\n" + ("\n" if form else rng.choice((" ", "\n"))).join(lines)
    return _placed(rng, subject, notes, key, "" if rng.random() < 0.08 else entries[key])


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
