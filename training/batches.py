"""Chats as tensors: rendering, loss masks, packing.

A sample becomes one document: the prompt as the server would render it, then the reply. Loss falls on what the model
itself writes after the last user message: every assistant message of the open tool chain, marks and end included.
Earlier assistant messages are context only, because rendering has emptied their thoughts. Documents are packed into
rows; a token attends to its own document only and counts positions from the document's start.
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
from training.chats import drill, sample
from training.samples import Reply, Sample, Wish


@dataclass(frozen=True, slots=True)
class Document:
    """Ids of one chat; ``learned[i]`` says whether the model is to predict ``ids[i]``."""

    ids: tuple[int, ...]
    learned: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Batch:
    """Packed documents. ``wanted`` are indices into the flattened rows whose next id is learned."""

    ids: Tensor  # int64 [B, T]
    positions: Tensor  # int64 [B, T], from 0 in every document
    documents: Tensor  # int64 [B, T], number of the document in its row, -1 on padding
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


def drill_document(rng: random.Random, tokenizer: Tokenizer) -> Document:
    """A bare worked answer: nearly every token of it teaches, where most of a chat is prompt.

    The restated problem comes from nowhere here and is not learned.
    """
    text, reply = drill(rng)
    ids = reply_ids(reply, tokenizer)
    given = 1 + len(tokenizer.encode(text))
    return Document(tuple(ids), tuple(index >= given for index in range(len(ids))))


def documents(seed: str, tokens: int, width: int, tokenizer: Tokenizer, drills: float = 0.0) -> list[Document]:
    """Chats of about ``tokens`` tokens together, none longer than ``width``; a function of its arguments alone.

    Args:
        drills: share of the documents that are drills.
    """
    rng = random.Random(seed)
    found: list[Document] = []
    while tokens > 0:
        doc = drill_document(rng, tokenizer) if rng.random() < drills else document(sample(rng), tokenizer)
        if len(doc.ids) <= width:
            found.append(doc)
            tokens -= len(doc.ids)
    return found


def wished(rng: random.Random, wish: Wish, count: int, tokenizer: Tokenizer) -> list[tuple[Sample, Document]]:
    """Chats of one kind, for evaluation."""
    chats = [sample(rng, wish) for _ in range(count)]
    return [(chat, document(chat, tokenizer)) for chat in chats]


def pack(docs: Sequence[Document], width: int) -> Batch:
    """Puts documents into rows of ``width``, longest first, each where it leaves least room (best fit).

    Raises:
        ValueError: a document is longer than a row.
    """
    rows: list[list[Document]] = []
    room: list[int] = []
    for doc in sorted(docs, key=lambda doc: -len(doc.ids)):
        size = len(doc.ids)
        if size > width:
            raise ValueError(f"a document of {size} tokens does not fit into rows of {width}")
        fitting = [(space, row) for row, space in enumerate(room) if space >= size]
        if fitting:
            row = min(fitting)[1]
            rows[row].append(doc)
            room[row] -= size
        else:
            rows.append([doc])
            room.append(width - size)
    return _fill(rows, width)


def one_per_row(docs: Sequence[Document]) -> Batch:
    """A row for each document, in the given order."""
    return _fill([[doc] for doc in docs], max(len(doc.ids) for doc in docs))


def _fill(rows: list[list[Document]], width: int) -> Batch:
    ids = torch.zeros(len(rows), width, dtype=torch.int64)
    positions, numbers = torch.zeros_like(ids), torch.full_like(ids, -1)
    wanted: list[int] = []
    for row, members in enumerate(rows):
        start = 0
        for number, doc in enumerate(members):
            end = start + len(doc.ids)
            ids[row, start:end] = torch.tensor(doc.ids)
            positions[row, start:end] = torch.arange(end - start)
            numbers[row, start:end] = number
            wanted += [row * width + start + i - 1 for i, learned in enumerate(doc.learned) if learned]
            start = end
    where = torch.tensor(wanted)
    return Batch(ids, positions, numbers, where, ids.flatten()[where + 1])
