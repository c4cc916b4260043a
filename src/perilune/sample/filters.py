"""Which ids may be sampled: masks over one row of logits. Pure functions; order of use is the sampler's business."""

from __future__ import annotations

import torch
from torch import Tensor


def top_k_mask(logits: Tensor, top_k: int) -> Tensor:
    """True for the ``top_k`` highest logits of [V], equal logits by lower id."""
    order = logits.sort(descending=True, stable=True).indices
    mask = torch.zeros_like(logits, dtype=torch.bool)
    mask[order[:top_k]] = True
    return mask


def top_p_mask(logits: Tensor, top_p: float) -> Tensor:
    """True for the smallest set of most likely ids whose probability reaches ``top_p``; at least one."""
    order = logits.sort(descending=True, stable=True).indices
    probabilities = logits[order].softmax(-1, dtype=torch.float64)
    before = probabilities.cumsum(-1) - probabilities
    keep = before < top_p
    keep[0] = True
    mask = torch.zeros_like(logits, dtype=torch.bool)
    mask[order] = keep
    return mask


def min_p_mask(logits: Tensor, min_p: float) -> Tensor:
    """True for ids at least ``min_p`` times as likely as the most likely one."""
    probabilities = logits.softmax(-1, dtype=torch.float64)
    return probabilities >= min_p * probabilities.max()
