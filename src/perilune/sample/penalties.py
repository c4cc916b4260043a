"""What was said before makes ids less likely, and biases that a client gives. Pure functions over one row of logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from perilune.types import SamplingParams


def add_bias(logits: Tensor, bias: Sequence[tuple[int, float]]) -> Tensor:
    """``logits`` [V] with each pair's bias added to its id."""
    ids = torch.tensor([token for token, _ in bias], device=logits.device)
    values = torch.tensor([value for _, value in bias], dtype=logits.dtype, device=logits.device)
    return logits.index_add(0, ids, values)


def penalise(logits: Tensor, params: SamplingParams, prompt: Sequence[int], generated: Sequence[int]) -> Tensor:
    """``logits`` [V] less what the penalties take.

    Presence and frequency (OpenAI's) count generated ids: ``logit - presence - frequency · count``. Repetition
    (Keskar et al., 2019, arXiv 1909.05858) divides positive and multiplies negative logits of every id seen, in the
    prompt too.
    """
    if params.repetition_penalty != 1:
        seen = torch.tensor(sorted({*prompt, *generated}), dtype=torch.int64, device=logits.device)
        values = logits[seen]
        penalty = params.repetition_penalty
        logits = logits.index_copy(0, seen, torch.where(values > 0, values / penalty, values * penalty))
    if generated and (params.presence_penalty or params.frequency_penalty):
        ids = torch.tensor(list(generated), dtype=torch.int64, device=logits.device)
        counts = torch.bincount(ids, minlength=logits.shape[-1]).to(logits.dtype)
        logits = logits - params.presence_penalty * (counts > 0) - params.frequency_penalty * counts
    return logits
