"""Where a recipe's chats come from: the seam between the generators and the trainer, which knows none of them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from perilune.chat.render import DEFAULT_SYSTEM
from training import chats, nano
from training.samples import ANYTHING, Reply, Sample, Wish

VOCAB_CHATS: Final = 4000


@dataclass(frozen=True, slots=True)
class Source:
    """A generator of chats; equal generators of chance give equal chats.

    Attributes:
        sample: one chat.
        drill: a problem and its bare worked answer, whose thought begins with the problem.
        held_out: what is watched while training, by name: chats about what training never sees.
    """

    sample: Callable[[random.Random, Wish], Sample]
    drill: Callable[[random.Random], tuple[str, Reply]]
    held_out: Mapping[str, Wish]

    def texts(self, seed: int) -> Iterator[str]:
        """The plain texts of chats that the vocabulary is learned on."""
        rng = random.Random(f"{seed}:vocabulary")
        for _ in range(VOCAB_CHATS):
            yield from _texts_of(self.sample(rng, ANYTHING))


def _texts_of(chat: Sample) -> Iterator[str]:
    yield DEFAULT_SYSTEM
    if chat.tools:
        yield json.dumps(chat.tools, separators=(",", ":"))
    for message in (*chat.messages, chat.reply.message()):
        yield from (message["role"], message["content"], message.get("reasoning_content", ""))
        for call in message.get("tool_calls", ()):
            yield from (call["id"], call["function"]["arguments"])


_NANO_WATCHED: Final = (
    "sum", "difference", "product", "quotient", "expression", "story1", "story2", "story3", "story2, new frames",
    "call", "parallel", "row", "call, answer", "call, new names", "refusal", "recall", "story2, long", "call, long",
)  # fmt: skip

SOURCES: Final[Mapping[str, Source]] = {
    "pico": Source(chats.sample, chats.drill, {kind: Wish(kind=kind, held_out=True) for kind in chats.KINDS}),
    "nano": Source(nano.sample, nano.drill, {name: nano.WISHES[name] for name in _NANO_WATCHED}),
}
"""By the name that a recipe gives."""
