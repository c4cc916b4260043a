"""Counter-based random numbers: Philox4x32-10 (Salmon et al., SC 2011, "Parallel random numbers: as easy as 1, 2, 3").

A number is a pure function of (seed, position, token id): it depends on no batch-mate, no chunking, no preemption, no
rank and no history. Everything here is integer arithmetic, so devices agree to the bit.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

_WORD: Final = 0xFFFFFFFF
_MULTIPLIERS: Final = (0xD2511F53, 0xCD9E8D57)
_WEYL: Final = (0x9E3779B9, 0xBB67AE85)
_ROUNDS: Final = 10


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]) -> tuple[Tensor, ...]:
    """Four 32-bit words for each counter. Words are int64 tensors holding 0 … 2³²-1, of one shape."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # int64 products wrap modulo 2^64, which keeps both halves right.
        low, high = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((high >> 32) & _WORD) ^ c1 ^ k0,
            high & _WORD,
            ((low >> 32) & _WORD) ^ c3 ^ k1,
            low & _WORD,
        )
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    return c0, c1, c2, c3


def uniform(seed: int, position: int, count: int, device: str = "cpu") -> Tensor:
    """``count`` numbers strictly between 0 and 1, one for each token id: float64 [count].

    Args:
        seed: 64 bits; taken modulo 2⁶⁴.
        position: of the sampled token in its sequence.
    """
    blocks = torch.arange((count + 3) // 4, dtype=torch.int64, device=device)
    low = torch.full_like(blocks, position & _WORD)
    high = torch.full_like(blocks, (position >> 32) & _WORD)
    words = philox((blocks, low, high, torch.zeros_like(blocks)), (seed & _WORD, (seed >> 32) & _WORD))
    flat = torch.stack(words, dim=-1).flatten()[:count]
    return (flat.to(torch.float64) + 0.5) * 2.0**-32


def gumbel(seed: int, position: int, count: int, device: str = "cpu") -> Tensor:
    """Standard Gumbel noise for each token id: float64 [count]. ``argmax(logits + gumbel)`` samples the softmax."""
    return -torch.log(-torch.log(uniform(seed, position, count, device)))
