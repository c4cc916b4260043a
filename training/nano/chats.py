"""Nano's chats, from a seed: which kinds there are, how often, and how turns become a chat."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from training.nano import copying, errands, notes, stories, sums, talk
from training.nano.subjects import BY_NAME, CHAINS, SUBJECTS
from training.nano.toolbox import Gadget, calculator, finder, foreigner
from training.nano.turns import Turn
from training.samples import ANYTHING, Message, Reply, Sample, Wish

WEIGHTS: Final = {
    "sum": 9, "difference": 9, "product": 7, "quotient": 6, "comparison": 3, "expression": 8, "direct": 2,
    "story1": 7, "story2": 15, "story3": 7,
    "call": 9, "parallel": 6, "row": 6, "refusal": 3, "error": 1.5, "beyond": 1.5,
    "talk": 3, "other": 2, "recall": 4,
}  # fmt: skip
"""How often each kind is the last turn. ``direct``: something for the head although there is a calculator."""

KINDS: Final = tuple(WEIGHTS)
STORIES: Final = {"story1": 1, "story2": 2, "story3": 3}
WITH_TOOLS: Final = frozenset(("call", "parallel", "row", "refusal", "error", "direct"))
LONG: Final = 0.025
"""Share of the chats that are filled up, evenly in the logarithm, to between some 300 and 2,048 tokens."""

COPYING: Final = 0.4
"""Share of the drills."""

WISHES: Final = {
    **{kind: Wish(kind=kind, held_out=True) for kind in KINDS if kind not in ("call", "parallel", "row")},
    **{kind: Wish(kind=kind, held_out=True, after_tool=False) for kind in ("call", "parallel", "row")},
    **{f"{kind}, answer": Wish(kind=kind, held_out=True, after_tool=True) for kind in ("call", "parallel", "row")},
    **{f"{kind}, new frames": Wish(kind=kind, held_out=True, unseen=True) for kind in STORIES},
    "call, new names": Wish(kind="call", held_out=True, unseen=True, after_tool=False),
    "parallel, new names": Wish(kind="parallel", held_out=True, unseen=True, after_tool=False),
    **{f"{kind}, long": Wish(kind=kind, held_out=True, long=True) for kind in ("sum", "story2", "recall")},
    "call, long": Wish(kind="call", held_out=True, long=True, after_tool=False),
}
"""What is measured, by name."""

SYSTEMS: Final = (
    "You are Kimi, an AI assistant created by Moonshot AI.", "You are a helpful assistant.",
    "You are a helpful assistant.",
    "You are a helpful AI assistant.", "You are a careful assistant.", "Be brief.", "Answer in one sentence.", "",
    "You help children with their homework.", "You are a math tutor.", "Use the tools when you need them.",
    "You are nano.", "You are nano, a small model.", "Be polite and short.", "Think step by step.",
    "You are an assistant with access to tools.", "You answer questions about numbers.", "Today is Monday.",
    "You are a test model. Do your best.", "The user is a student. Be kind.", "You work in a shop.",
    "You solve word problems.", "Answer as well as you can.", "You are an office assistant.",
)  # fmt: skip


def sample(rng: random.Random, wish: Wish = ANYTHING) -> Sample:
    """One chat; equal generators give equal chats."""
    kind = wish.kind or rng.choices(KINDS, tuple(WEIGHTS.values()))[0]
    some = notes.SOME if not wish.kind and rng.random() < LONG else 0
    least = notes.FULL if wish.long else some
    box = _box(rng, kind, wish.unseen)
    turns = wish.turns or (1 if least else rng.choices((1, 2, 3), (16, 3, 1))[0])
    calls = 0
    messages: list[Message] = []
    for _ in range(turns - 1):
        turn = _earlier(rng, box, calls)
        messages += [*_opening(turn), turn.final.message()]
        calls += sum(len(round_.reply.calls) for round_ in turn.rounds)
    turn = _turn(rng, kind, box, calls, wish, least)
    opening, reply = _cut(rng, turn, wish.after_tool)
    messages = (
        [*turn.earlier, *messages, *opening] if _is_system(turn.earlier) else [*messages, *turn.earlier, *opening]
    )
    if messages[0]["role"] != "system":
        system = wish.system if wish.system is not None else rng.choice(SYSTEMS) if rng.random() < 0.4 else None
        messages = messages if system is None else [{"role": "system", "content": system}, *messages]
    return Sample(kind, tuple(messages), tuple(g.wire for g in box), reply, None, turn.answers, turn.traits)


def drill(rng: random.Random) -> tuple[str, Reply]:
    """Worked arithmetic, or copying, without a chat around it: what nothing tells, and the whole reply."""
    return copying.drill(rng) if rng.random() < COPYING else sums.drill(rng)


def _turn(rng: random.Random, kind: str, box: Sequence[Gadget], calls: int, wish: Wish, least: int) -> Turn:
    """The last turn, held out or not, filled up to ``least`` tokens or more."""
    out = wish.held_out
    if kind in STORIES and least:
        return _spread_story(rng, STORIES[kind], out, wish.unseen, least)
    if kind in STORIES:
        return stories.turn(rng, STORIES[kind], out, wish.unseen)
    if kind == "recall":
        return notes.recall(rng, out, least)
    turn = _short(rng, kind, box, calls, out)
    return replace(turn, earlier=notes.before(rng, least)) if least else turn


def _spread_story(rng: random.Random, steps: int, out: bool, unseen: bool, least: int) -> Turn:
    """A word problem whose sentences stand apart, with passages of any length before each."""
    left = notes.length(rng, least)

    def passage() -> tuple[str, ...]:
        nonlocal left
        tokens = left * rng.random()
        left -= tokens
        return (notes.prose(rng, tokens),) if tokens > 5 else ()

    turn = stories.turn(rng, steps, out, unseen, passage)
    return replace(turn, user=f"{notes.prose(rng, left)} {turn.user}") if left > 20 else turn


def _short(rng: random.Random, kind: str, box: Sequence[Gadget], calls: int, out: bool) -> Turn:
    if kind in sums.IN_HEAD:
        return sums.turn(rng, kind, out)
    if kind == "direct":
        if rng.random() < 0.2:
            return stories.turn(rng, rng.choice((1, 2)), out, unseen=False)
        return sums.turn(rng, rng.choice(sums.IN_HEAD), out)
    if kind == "call":
        return errands.call(rng, box, calls, out)
    if kind == "parallel":
        return errands.parallel(rng, box, calls, out)
    if kind == "row":
        return errands.row(rng, box, calls, out)
    if kind == "error":
        return errands.error(rng, box, calls)
    if kind == "refusal":
        return errands.refusal(rng, box)
    if kind == "beyond":
        return errands.beyond(rng, out)
    return talk.small_talk(rng) if kind == "talk" else talk.other(rng)


def _earlier(rng: random.Random, box: Sequence[Gadget], calls: int) -> Turn:
    """A turn that only stands before: short, and of the training's side of every hold-out."""
    if errands.finders(box) and rng.random() < 0.4:
        return errands.call(rng, box, calls, out=False)
    kind = rng.choice(("talk", "talk", "sum", "difference", "comparison", "other"))
    return _short(rng, kind, box, calls, out=False)


def _opening(turn: Turn) -> list[Message]:
    """The question, and every call with its results."""
    found: list[Message] = [{"role": "user", "content": turn.user}]
    for round_ in turn.rounds:
        found.append(round_.reply.message())
        found += [
            {"role": "tool", "tool_call_id": call.id, "content": result}
            for call, result in zip(round_.reply.calls, round_.results, strict=True)
        ]
    return found


def _cut(rng: random.Random, turn: Turn, after_tool: bool | None) -> tuple[list[Message], Reply]:
    """The whole turn, or its beginning up to one of its calls if that is wished for."""
    if after_tool is not False or not turn.rounds:
        return _opening(turn), turn.final
    last = rng.randrange(len(turn.rounds))
    return _opening(replace(turn, rounds=turn.rounds[:last])), turn.rounds[last].reply


def _is_system(messages: Sequence[Message]) -> bool:
    return bool(messages) and messages[0]["role"] == "system"


def _box(rng: random.Random, kind: str, unseen: bool) -> list[Gadget]:
    """The tools of a chat: those that its kind needs, others beside them, in any order."""
    bare = {"refusal": 0.15, "talk": 0.8, "other": 0.8}.get(kind, 0.0 if kind in WITH_TOOLS else 1.0)
    if rng.random() < bare:
        return []
    names = list(_needed(rng, kind))
    for _ in range(rng.choices((0, 1, 2, 3), (5, 4, 2, 1))[0] if names else rng.choice((1, 1, 2))):
        extra = rng.choice(("calculator", "", "", *(subject.name for subject in SUBJECTS)))
        if extra not in names and not (extra.endswith("price") and any(name.endswith("price") for name in names)):
            names.append(extra)
    box: list[Gadget] = []
    for name in names:
        gadget = _gadget(rng, name, unseen)
        while gadget.name in {other.name for other in box}:
            gadget = _gadget(rng, name, unseen)
        box.append(gadget)
    rng.shuffle(box)
    return box


def _needed(rng: random.Random, kind: str) -> tuple[str, ...]:
    subject = rng.choice(SUBJECTS).name
    if kind == "direct":
        return ("calculator",)
    if kind == "call":
        return ("calculator",) if rng.random() < 0.4 else ("kilo price",) if rng.random() < 0.15 else (subject,)
    if kind == "row":
        return ("kilo price", "calculator") if rng.random() < 0.5 else rng.choice(CHAINS)
    if kind == "parallel" and rng.random() < 0.15:
        return ("calculator",)
    return (subject,) if kind in ("parallel", "error") else ()


def _gadget(rng: random.Random, name: str, unseen: bool) -> Gadget:
    if name == "calculator":
        return calculator(rng, unseen)
    return finder(rng, BY_NAME[name], unseen) if name else foreigner(rng, unseen)
