"""Log-probabilities of ids, from raw logits: before bias, penalties, temperature and filters."""

from __future__ import annotations

import torch
from torch import Tensor

from perilune.types import TokenLogprobs


def token_logprobs(logits: Tensor, token: int, top: int) -> TokenLogprobs:
    """Of ``token`` and of the ``top`` most likely ids at one position; ``logits`` is float [V]."""
    total = logits.logsumexp(-1)
    values, ids = torch.topk(logits, min(top, logits.shape[-1]))
    return TokenLogprobs(
        chosen=float(logits[token] - total), top_ids=tuple(ids.tolist()), top=tuple((values - total).tolist())
    )
