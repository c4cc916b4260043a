"""Muon for the matrices inside the network, AdamW for embeddings, head, router and norms; rates; averaged weights.

Muon (Jordan et al., 2024): momentum, then the nearest (semi-)orthogonal matrix by five Newton–Schulz steps, so that
every direction of a weight is trained at the same pace. Stacked experts are a batch of matrices.
"""

from __future__ import annotations

import math
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from perilune.layout.names import EMBEDDING, HEAD
from training.configs import Course
from training.model import Params, is_bias

MOMENTUM = 0.95
BETAS = (0.9, 0.98)
EPS = 1e-10
_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic from Muon's authors: singular values end between about 0.7 and 1.2."""


@dataclass(frozen=True, slots=True)
class State:
    """All that training carries from step to step, updated in place."""

    params: Params
    momentum: Params
    square: Params
    average: Params

    @classmethod
    def fresh(cls, params: Params) -> State:
        trained = {name: p for name, p in params.items() if not is_bias(name)}
        return cls(
            params=params,
            momentum={name: torch.zeros_like(p) for name, p in trained.items()},
            square={name: torch.zeros_like(p) for name, p in trained.items() if not by_muon(name, p)},
            average={name: p.clone() for name, p in params.items()},
        )


def by_muon(name: str, param: Tensor) -> bool:
    """True for matrices that map hidden values to hidden values."""
    return param.dim() > 1 and name not in (EMBEDDING, HEAD) and not name.endswith("mlp.gate.weight")


def rate(course: Course, step: int) -> float:
    """The factor on the learning rates at a step: a line between the knots around it."""
    (start, low), (end, high) = next(pair for pair in pairwise(course.knots) if step <= pair[1][0])
    return (low * (end - step) + high * (step - start)) / (end - start)


def update(state: State, grads: Params, course: Course, step: int, pool: Executor | None = None) -> None:
    """One step of all parameters, then of their average; parameters are independent and spread over ``pool``."""
    work = partial(_update_one, state, grads, course, step)
    largest_first = sorted(state.average, key=lambda name: -state.params[name].numel())
    for _ in map(work, largest_first) if pool is None else pool.map(work, largest_first):
        pass


@torch.no_grad()
def _update_one(state: State, grads: Params, course: Course, step: int, name: str) -> None:
    param, factor = state.params[name], rate(course, step)
    if name in grads and name in state.square:
        momentum, square, grad = state.momentum[name], state.square[name], grads[name]
        momentum.lerp_(grad, 1 - BETAS[0])
        square.lerp_(grad.square(), 1 - BETAS[1])
        m = momentum / (1 - BETAS[0] ** (step + 1))
        v = square / (1 - BETAS[1] ** (step + 1))
        param.sub_(m / (v.sqrt() + EPS), alpha=course.adam_lr * factor)
    elif name in grads:
        momentum, grad = state.momentum[name], grads[name]
        momentum.lerp_(grad, 1 - MOMENTUM)
        direction = _orthogonal(grad.lerp(momentum, MOMENTUM), course.halve)
        scale = math.sqrt(max(1.0, param.shape[-2] / param.shape[-1]))
        param.sub_(direction, alpha=course.muon_lr * factor * scale)
    state.average[name].lerp_(param, 1 - min(course.average, step / (step + 10)))


def _orthogonal(matrix: Tensor, halve: bool) -> Tensor:
    """The orthogonal factor of ``matrix`` [..., out, in], about; in bfloat16 if told, as Muon's authors do."""
    tall = matrix.shape[-2] > matrix.shape[-1]
    x = matrix.transpose(-2, -1) if tall else matrix
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + 1e-7)
    if halve:
        x = x.bfloat16()
    a, b, c = _NEWTON_SCHULZ
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    factor: Tensor = x.transpose(-2, -1) if tall else x
    return factor.to(matrix.dtype)


@torch.no_grad()
def balance(state: State, loads: dict[str, Tensor], step_size: float) -> None:
    """Moves each router's bias towards equal loads (DeepSeek-V3, arXiv 2412.19437, section 2.1.2).

    Args:
        loads: name of the bias → tokens that each expert got.
    """
    for name, load in loads.items():
        mean = load.float().mean()
        state.params[name].add_((mean - load).sign(), alpha=step_size)
