"""Rotary frequencies, plain and YaRN. Tables and the rotation itself are ops.

YaRN (Peng et al., 2023, arXiv 2309.00071) as DeepSeek-V3 uses it: frequencies that turn fewer than ``beta_slow`` times
within the original context are divided by ``factor``, those that turn more than ``beta_fast`` times stay, in between
runs a linear ramp over the index of the pair.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from perilune.config import RopeSpec


def inverse_frequencies(spec: RopeSpec, device: str = "cpu") -> Tensor:
    """Radians per position of each pair: float64 [P/2]."""
    pairs = torch.arange(spec.dim // 2, dtype=torch.float64, device=device)
    plain = spec.theta ** (-2 * pairs / spec.dim)
    if spec.kind == "default":
        return plain
    low = max(math.floor(_pair_of_turns(spec, spec.beta_fast)), 0)
    high: float = min(math.ceil(_pair_of_turns(spec, spec.beta_slow)), spec.dim - 1)
    if low == high:
        high += 0.001
    ramp = ((pairs - low) / (high - low)).clamp(0, 1)
    return plain / spec.factor * ramp + plain * (1 - ramp)


def _pair_of_turns(spec: RopeSpec, turns: float) -> float:
    """Index of the pair that turns ``turns`` times within the original context (a real number)."""
    return spec.dim * math.log(spec.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(spec.theta))
