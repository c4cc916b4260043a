"""Chooses one id from one row of logits, by a request's parameters.

Order: banned ids and grammar → bias → penalties → temperature → top-k, top-p, min-p → argmax of logits plus Gumbel
noise. The noise is keyed by (seed, position), so the id depends on nothing but the logits and the request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from perilune.errors import EngineError
from perilune.sample.filters import min_p_mask, top_k_mask, top_p_mask
from perilune.sample.penalties import add_bias, penalise
from perilune.sample.rng import gumbel
from perilune.types import SamplingParams

MIN_TEMPERATURE: Final = 1e-6
"""Below it sampling is greedy: logits divided by less would overflow, and nothing but the highest has a chance."""


@dataclass(slots=True)
class History:
    """What a request has said: ``prompt`` is filled only where penalties need it. ``generated`` grows."""

    prompt_len: int
    prompt: Sequence[int] = ()
    generated: list[int] = field(default_factory=list)


def sample(
    logits: Tensor, params: SamplingParams, seed: int, position: int, history: History, allowed: Tensor | None = None
) -> int:
    """The next id.

    Args:
        logits: float [V], raw.
        position: of the sampled token in its sequence.
        allowed: bool [V] from a grammar, or None.

    Raises:
        EngineError: a logit is not finite, or no id is left to choose from.
    """
    if not torch.isfinite(logits).all():
        # Never fall through to argmax: it would pick id 0 ("!" in Kimi's vocabulary) for ever.
        raise EngineError("the model produced logits that are not finite")
    logits = _forbid(logits, params, position - history.prompt_len, allowed)
    if params.logit_bias:
        logits = add_bias(logits, params.logit_bias)
    if params.penalised:
        logits = penalise(logits, params, history.prompt, history.generated)
    if params.temperature < MIN_TEMPERATURE:
        return _highest(logits)
    logits = logits.to(torch.float64) / params.temperature
    logits = _filter(logits, params)
    return _highest(logits + gumbel(seed, position, logits.shape[-1], str(logits.device)))


def _forbid(logits: Tensor, params: SamplingParams, generated: int, allowed: Tensor | None) -> Tensor:
    banned = list(params.banned_ids)
    if generated < params.min_tokens:
        banned += params.stop_token_ids
    if banned:
        logits = logits.clone()
        logits[banned] = -torch.inf
    if allowed is not None:
        logits = logits.masked_fill(~allowed, -torch.inf)
    if (banned or allowed is not None) and not torch.isfinite(logits).any():
        raise EngineError("no token is allowed at this position")
    return logits


def _highest(scores: Tensor) -> int:
    """The lowest id among the highest scores: argmax itself leaves ties open."""
    return int((scores == scores.max()).nonzero()[0])


def _filter(logits: Tensor, params: SamplingParams) -> Tensor:
    """Filters apply one after the other, each on what the last one left."""
    if 0 < params.top_k < logits.shape[-1]:
        logits = logits.masked_fill(~top_k_mask(logits, params.top_k), -torch.inf)
    if params.top_p < 1:
        logits = logits.masked_fill(~top_p_mask(logits, params.top_p), -torch.inf)
    if params.min_p > 0:
        logits = logits.masked_fill(~min_p_mask(logits, params.min_p), -torch.inf)
    return logits


def unpack_mask(mask: bytes, vocab_size: int, device: str = "cpu") -> Tensor:
    """A grammar row's packed mask (see ``GrammarRow``) as bool [vocab_size]."""
    octets = torch.tensor(list(mask), dtype=torch.uint8, device=device)
    bits = (octets.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=device)) & 1
    return bits.flatten()[:vocab_size].bool()
