"""What the makers of nano's chats hand to each other: a question, the calls it leads to, and the answer."""

from __future__ import annotations

from dataclasses import dataclass

from training.samples import Message, Reply


@dataclass(frozen=True, slots=True)
class Round:
    """Calls and what the tools say to each of them."""

    reply: Reply
    results: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Turn:
    """One user message and all that follows from it.

    Attributes:
        answers: what a right answer says (``Sample.answers``).
        earlier: messages that belong right before the question; a system prompt may be the first of them.
        traits: ``kind:text`` of everything by which chats are held out.
    """

    kind: str
    user: str
    final: Reply
    answers: tuple[str, ...] = ()
    rounds: tuple[Round, ...] = ()
    traits: frozenset[str] = frozenset()
    earlier: tuple[Message, ...] = ()
