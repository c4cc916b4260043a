"""A model folder measured through the engine that serves it: real generation, parsed as the server parses it.

Unlike ``evaluate`` this judges what an answer says, not whether it is the taught one to the letter (``judge``).
Held-out operands only, all phrasings, with and without other turns.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from perilune.chat.messages import read_messages, read_tools
from perilune.chat.parse import CallDelta, CallStart, ContentDelta, OutputParser, ReasoningDelta
from perilune.chat.render import render
from perilune.engine.build import build_engine
from perilune.engine.engine import Engine
from perilune.engine.options import EngineOptions
from perilune.types import FinishReason, Request, SamplingParams, TokenOut
from training import chats, nano
from training.judge import Spoken, Verdict, judge
from training.samples import Sample, Wish

BATCH: Final = 32


@dataclass(frozen=True, slots=True)
class Exam:
    """What a model is measured on.

    Attributes:
        sample: the generator of its chats.
        wishes: kinds of chats by the names that figures have.
        max_tokens: of an answer.
        context: of a chat and its answer.
    """

    sample: Callable[[random.Random, Wish], Sample]
    wishes: Mapping[str, Wish]
    max_tokens: int
    context: int


PICO: Final = Exam(
    chats.sample,
    {
        "sum": Wish(kind="sum", held_out=True),
        "difference": Wish(kind="difference", held_out=True),
        "call": Wish(kind="call", held_out=True, after_tool=False),
        "answer": Wish(kind="call", held_out=True, after_tool=True),
        "beyond": Wish(kind="beyond", held_out=True),
        "talk": Wish(kind="talk"),
        "other": Wish(kind="other"),
    },
    max_tokens=192,
    context=1024,
)
NANO: Final = Exam(nano.sample, nano.WISHES, max_tokens=512, context=2560)
EXAMS: Final[Mapping[str, Exam]] = {"pico": PICO, "nano": NANO}
"""By the name of the model."""


def open_engine(folder: Path, exam: Exam = PICO) -> Engine:
    """The engine on one thread, with room for ``BATCH`` chats at once."""
    context = exam.context
    options = EngineOptions(
        max_model_len=context, max_num_seqs=BATCH, max_batched_tokens=1024, kv_tokens=BATCH * context, threads=1
    )
    return build_engine(folder, options)


def speak(engine: Engine, asked: Sequence[Sample], temperature: float, max_tokens: int = 192) -> list[Spoken]:
    """Lets the model answer chats, each with its index as its seed."""
    listeners: dict[str, _Listener] = {}
    for index, chat in enumerate(asked):
        tools = read_tools(chat.tools)
        rendered = render(read_messages(chat.messages), tools, engine.tokenizer)
        parser = OutputParser(engine.tokenizer, tools, rendered.history_calls, rendered.starts_in_think)
        listeners[str(index)] = _Listener(parser)
        sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=index)
        engine.add(Request(id=str(index), prompt=rendered.ids, sampling=sampling))
    while engine.has_work:
        for out in engine.step():
            listeners[out.request_id].hear(out)
    return [listener.spoken for listener in listeners.values()]


class _Listener:
    """Puts one answer together from the engine's news."""

    def __init__(self, parser: OutputParser) -> None:
        self._parser = parser
        self._content = self._thought = ""
        self._names: list[str] = []
        self._arguments: dict[int, str] = {}
        self._finish: FinishReason | None = None

    def hear(self, out: TokenOut) -> None:
        events = self._parser.feed(out.tokens)
        if out.finish is not None:
            self._finish = out.finish
            events += self._parser.finish(out.finish)
        for event in events:
            if isinstance(event, ContentDelta):
                self._content += event.text
            elif isinstance(event, ReasoningDelta):
                self._thought += event.text
            elif isinstance(event, CallStart):
                self._names.append(event.name)
            elif isinstance(event, CallDelta):
                self._arguments[event.index] = self._arguments.get(event.index, "") + event.arguments

    @property
    def spoken(self) -> Spoken:
        calls = tuple((name, self._arguments.get(index, "")) for index, name in enumerate(self._names))
        return Spoken(self._content, calls, self._finish, self._thought)


def group(name: str, chat: Sample) -> str:
    """Sums and differences are told apart by the digits of the longer operand."""
    if name not in ("sum", "difference"):
        return name
    asked = chat.problem.compact if chat.problem is not None else next(t for t in chat.traits if t.startswith("step:"))
    return f"{name}, {max(map(len, re.findall(r'[0-9]+', asked)))} digits"


@dataclass(frozen=True, slots=True)
class Answered:
    """A chat, what the model answered, and what that was worth."""

    group: str
    chat: Sample
    spoken: Spoken
    verdict: Verdict


def measure(engine: Engine, exam: Exam, count: int, temperature: float, seed: str = "figures") -> Iterator[Answered]:
    """``count`` chats of every kind, answered and judged."""
    for name, wish in exam.wishes.items():
        rng = random.Random(f"{seed}:{name}")
        asked = [exam.sample(rng, wish) for _ in range(count)]
        for chat, spoken in zip(asked, speak(engine, asked, temperature, exam.max_tokens), strict=True):
            yield Answered(group(name, chat), chat, spoken, judge(chat, spoken))
