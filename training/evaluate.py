"""How often a whole reply comes out as taught, from one forward pass over held-out chats.

Greedy decoding gives the taught reply exactly when every one of its ids is the most likely one after the ids before
it, and sampling at temperature 1 gives it with the product of their probabilities. So one pass over prompt and reply
measures both without generating. A reply that says the same in other words counts as wrong: a lower bound.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from perilune.config import ModelSpec
from perilune.text.tokenizer import Tokenizer
from training.batches import Document, join, wished
from training.model import Params, logits
from training.sources import Source


@dataclass(frozen=True, slots=True)
class Score:
    """``greedy`` of ``count`` replies exact at temperature 0; ``sampled``: expected share of them at temperature 1."""

    count: int
    greedy: int
    sampled: float

    @property
    def accuracy(self) -> float:
        return self.greedy / self.count


def wilson(right: int, count: int, z: float = 1.96) -> tuple[float, float]:
    """Interval of a share (Wilson, 1927); 95 % by default."""
    share = right / count
    middle = share + z * z / (2 * count)
    half = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return (middle - half) / (1 + z * z / count), (middle + half) / (1 + z * z / count)


@torch.no_grad()
def score(params: Params, spec: ModelSpec, docs: Sequence[Document], at_once: int = 64) -> Score:
    """Scores documents by everything that is learned in them."""
    greedy, sampled = 0, 0.0
    for start in range(0, len(docs), at_once):
        part = docs[start : start + at_once]
        batch = join(part)
        values = logits(params, spec, batch)[0]
        owner = batch.documents[batch.wanted]
        wrong = torch.zeros(len(part)).index_add(0, owner, (values.argmax(-1) != batch.targets).float())
        chosen = values.log_softmax(-1).gather(1, batch.targets.unsqueeze(1)).squeeze(1)
        greedy += int((wrong == 0).sum())
        sampled += float(torch.zeros(len(part)).index_add(0, owner, chosen).exp().sum())
    return Score(len(docs), greedy, sampled / len(docs))


def held_out_sets(
    source: Source, tokenizer: Tokenizer, count: int, width: int, seed: str
) -> Iterator[tuple[str, list[Document]]]:
    """``count`` chats of everything that the source holds out, as far as they are no longer than ``width``."""
    for name, wish in source.held_out.items():
        chats = wished(source, random.Random(f"{seed}:{name}"), wish, count, tokenizer)
        yield name, [doc for _, doc in chats if len(doc.ids) <= width]
