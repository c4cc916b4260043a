"""Chats as tensors: rendering, loss masks, joining.

A sample becomes one document: the prompt as the server would render it, then the reply. Loss falls on what the model
itself writes after the last user message: every assistant message of the open tool chain, marks and end included.
Earlier assistant messages are context only, because rendering has emptied their thoughts. The documents of a batch lie
one behind the other without padding; a token attends to its own document only and counts positions from its start.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from perilune.chat.markers import Marker
from perilune.chat.messages import read_messages, read_tools
from perilune.chat.render import render
from perilune.text.tokenizer import Tokenizer
from training.samples import ANYTHING, Reply, Sample, Wish
from training.sources import Source


@dataclass(frozen=True, slots=True)
class Document:
    """Ids of one chat; ``learned[i]`` says whether the model is to predict ``ids[i]``."""

    ids: tuple[int, ...]
    learned: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Batch:
    """N tokens of joined documents. ``wanted`` are the indices whose next id is learned."""

    ids: Tensor  # int64 [N]
    positions: Tensor  # int64 [N], from 0 in every document
    documents: Tensor  # int64 [N], number of the document
    lengths: tuple[int, ...]
    wanted: Tensor  # int64 [n]
    targets: Tensor  # int64 [n]


def reply_ids(reply: Reply, tokenizer: Tokenizer) -> list[int]:
    """What the model is to generate, stop id included."""
    pieces: list[Marker | str] = [Marker.THINK, reply.thought, Marker.THINK_END, reply.text]
    if reply.calls:
        pieces.append(Marker.SECTION)
        for call in reply.calls:
            pieces += [Marker.CALL, call.id, Marker.ARGUMENTS, call.arguments, Marker.CALL_END]
        pieces.append(Marker.SECTION_END)
    ids: list[int] = []
    for piece in (*pieces, Marker.END):
        ids += [tokenizer.special(piece)] if isinstance(piece, Marker) else tokenizer.encode(piece)
    return ids


def prompt_ids(chat: Sample, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The prompt as the server renders it."""
    return render(read_messages(chat.messages), read_tools(chat.tools), tokenizer).ids


def document(chat: Sample, tokenizer: Tokenizer) -> Document:
    """Renders a sample and marks what is learned."""
    prompt, reply = prompt_ids(chat, tokenizer), reply_ids(chat.reply, tokenizer)
    return Document((*prompt, *reply), (*_own_words(prompt, tokenizer), *([True] * len(reply))))


def _own_words(prompt: Sequence[int], tokenizer: Tokenizer) -> Iterator[bool]:
    """True on assistant messages after the last user message, from behind ``MIDDLE`` up to and with ``END``."""
    user, assistant = tokenizer.special(Marker.USER), tokenizer.special(Marker.ASSISTANT)
    openers = (user, assistant, tokenizer.special(Marker.SYSTEM))
    middle, end = tokenizer.special(Marker.MIDDLE), tokenizer.special(Marker.END)
    last_user = max(i for i, token in enumerate(prompt) if token == user)
    own = inside = False
    for index, token in enumerate(prompt):
        yield inside
        if token in openers:
            own = token == assistant and index > last_user
        elif token == middle:
            inside = own
        elif token == end:
            inside = False


def drill_document(source: Source, rng: random.Random, tokenizer: Tokenizer) -> Document:
    """A bare worked answer: nearly every token of it teaches, where most of a chat is prompt.

    The restated problem comes from nowhere here and is not learned.
    """
    text, reply = source.drill(rng)
    ids = reply_ids(reply, tokenizer)
    given = 1 + len(tokenizer.encode(text))
    return Document(tuple(ids), tuple(index >= given for index in range(len(ids))))


@dataclass(frozen=True, slots=True)
class Order:
    """What one step asks for: documents of about ``tokens`` tokens together, none longer than ``width``.

    Attributes:
        drills: share of the documents that are drills.
    """

    seed: str
    tokens: int
    width: int
    drills: float = 0.0


def documents(source: Source, order: Order, tokenizer: Tokenizer) -> list[Document]:
    """The documents of a step, a function of the arguments alone."""
    rng = random.Random(order.seed)
    found: list[Document] = []
    tokens = order.tokens
    while tokens > 0:
        if rng.random() < order.drills:
            doc = drill_document(source, rng, tokenizer)
        else:
            doc = document(source.sample(rng, ANYTHING), tokenizer)
        if len(doc.ids) <= order.width:
            found.append(doc)
            tokens -= len(doc.ids)
    return found


def wished(
    source: Source, rng: random.Random, wish: Wish, count: int, tokenizer: Tokenizer
) -> list[tuple[Sample, Document]]:
    """Chats of one kind, for evaluation."""
    chats = [source.sample(rng, wish) for _ in range(count)]
    return [(chat, document(chat, tokenizer)) for chat in chats]


def shares(docs: Sequence[Document], count: int) -> list[list[Document]]:
    """Cuts documents into ``count`` lists of about equal size: longest first, each to the list with fewest tokens."""
    lists: list[list[Document]] = [[] for _ in range(count)]
    sizes = [0] * count
    for doc in sorted(docs, key=lambda doc: -len(doc.ids)):
        least = sizes.index(min(sizes))
        lists[least].append(doc)
        sizes[least] += len(doc.ids)
    return lists


def join(docs: Sequence[Document]) -> Batch:
    """One behind the other, in the given order."""
    lengths = tuple(len(doc.ids) for doc in docs)
    ids = torch.tensor([token for doc in docs for token in doc.ids])
    learned = torch.tensor([learned for doc in docs for learned in doc.learned])
    targets = learned.nonzero().squeeze(1)
    return Batch(
        ids=ids,
        positions=torch.cat([torch.arange(length) for length in lengths]),
        documents=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
        lengths=lengths,
        wanted=targets - 1,
        targets=ids[targets],
    )
