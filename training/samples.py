"""What a generator of training data hands out: chats in the wire's own form, and the reply that the model is to give.

A ``Sample`` ends where the model speaks last. Generators (``chats``, ``nano``) decide what is said, ``batches`` how it
becomes tokens, ``measure`` whether an answer is right.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from training.arithmetic import Problem

Message = dict[str, Any]
Tool = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Call:
    """A call of ``functions.{name}:{index}``; ``arguments`` is JSON as the model writes it."""

    name: str
    index: int
    arguments: str

    @property
    def id(self) -> str:
        return f"functions.{self.name}:{self.index}"


@dataclass(frozen=True, slots=True)
class Reply:
    """One assistant message. ``calls`` stand side by side: none needs another's result."""

    thought: str
    text: str
    calls: tuple[Call, ...] = ()

    def message(self) -> Message:
        """The wire's form."""
        message: Message = {"role": "assistant", "content": self.text, "reasoning_content": self.thought}
        if self.calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.calls
            ]
        return message


@dataclass(frozen=True, slots=True)
class Sample:
    """``reply`` follows ``messages``. The messages after the last user message are the model's own and the tools'.

    Attributes:
        problem: what pico's last question asks for.
        answers: words and numbers that a right answer says; nothing else that it counts or names may be a number. Where
            there is one only, and it is a number, it has to be the last. Empty: the reply's text, to the letter.
        traits: what the chat is made of, as far as some of its kind are held out (``nano.heldout``).
    """

    kind: str
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...]
    reply: Reply
    problem: Problem | None = None
    answers: tuple[str, ...] = ()
    traits: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Wish:
    """What a sample is to be, for evaluation; training takes what comes.

    Attributes:
        held_out: the last question is about what training never sees: operands, and a template where there is one.
        unseen: its sentence frames or tool names are among those that training never sees at all (nano only).
        long: the chat is filled up to somewhere between 1,150 and 2,048 tokens, by estimate (nano only).
    """

    kind: str = ""
    held_out: bool = False
    turns: int = 0
    system: str | None = None
    after_tool: bool | None = None
    tools: tuple[Tool, ...] | None = None
    unseen: bool = False
    long: bool = False


ANYTHING: Final = Wish()
"""What training wishes for."""
