"""Moving rows of a matrix with cheap gradients.

The gradient of ``index_select`` is a scattered sum, by far slower on a CPU than moving rows. Where it is known which
places a row went to, the gradient is a gather as well. Both functions are exact and their gradients are tested against
``index_select``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None]:
        (places,) = ctx.saved_tensors
        if places.shape[1] == 1:
            return grads[0].index_select(0, places.flatten()), None, None
        return grads[0].index_select(0, places.flatten()).unflatten(0, places.shape).sum(1), None, None


class _Pick(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.rows = len(x)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        grad = grads[0]
        return grad.new_zeros(ctx.rows, *grad.shape[1:]).index_copy_(0, index, grad), None


def spread(x: Tensor, index: Tensor, places: Tensor) -> Tensor:
    """``x[index]``, where ``places`` [rows of x, c] says at which places of the result each row stands.

    Places that ``places`` leaves out are padding: nothing may depend on what stands there.
    """
    found: Tensor = _Spread.apply(x, index, places)  # type: ignore[no-untyped-call]
    return found


def pick(x: Tensor, index: Tensor) -> Tensor:
    """``x[index]`` for an index without repetition."""
    found: Tensor = _Pick.apply(x, index)  # type: ignore[no-untyped-call]
    return found
