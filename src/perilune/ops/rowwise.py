"""The reference backend one token at a time: slow, and the same bits for a token whatever runs beside it.

A matrix product may add up in another order when it has more rows, and a vectorised function may round its last few
elements differently. Here every op sees exactly one token, and attention exactly the context up to it, so a token's
result is a function of its own inputs: of no batch-mate, no chunk, no preemption, no prefix hit. The oracle for these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from perilune.ops import Batch, GatedMLP, RouterSpec
from perilune.ops.ref import RefOps
from perilune.quant.tensors import Weight

_REF = RefOps()


@dataclass(frozen=True, slots=True)
class RowwiseOps:
    """Implements ``perilune.ops.Ops`` by ``RefOps`` on single tokens."""

    def embed(self, ids: Tensor, table: Tensor) -> Tensor:
        return _REF.embed(ids, table)

    def linear(self, x: Tensor, weight: Weight) -> Tensor:
        dense = weight.dequantize(x.dtype)
        return _each(lambda row: torch.nn.functional.linear(row, dense), x, dense.shape[:1])

    def head_linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return _each(lambda row: _REF.head_linear(row, weight), x, weight.shape[:2])

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return _each(lambda row: _REF.rms_norm(row, weight, eps), x, x.shape[1:])

    def rotary(self, positions: Tensor, frequencies: Tensor, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return _each_pair(lambda t: _REF.rotary(positions[t], frequencies, scale, dtype), len(positions))

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return _REF.rope(x, cos, sin)  # sums of two exactly rounded products: nothing to depend on

    def kv_write(self, kv: Tensor, latent: Tensor, k_rope: Tensor, slots: Tensor) -> None:
        _REF.kv_write(kv, latent, k_rope, slots)

    def mla_absorbed(
        self, q_latent: Tensor, q_rope: Tensor, kv: Tensor, batch: Batch, scale: float
    ) -> tuple[Tensor, Tensor]:
        alone = _single_tokens(batch)
        return _each_pair(lambda t: _REF.mla_absorbed(q_latent[t], q_rope[t], kv, alone[t.start], scale), len(q_latent))

    def mla_decompressed(
        self, q: Tensor, kv: Tensor, w_uk: Tensor, w_uv: Tensor, batch: Batch, scale: float
    ) -> tuple[Tensor, Tensor]:
        alone = _single_tokens(batch)
        return _each_pair(lambda t: _REF.mla_decompressed(q[t], kv, w_uk, w_uv, alone[t.start], scale), len(q))

    def merge(self, outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        return _each_pair(lambda t: _REF.merge([out[t] for out in outs], [lse[t] for lse in lses]), len(outs[0]))

    def route(self, x: Tensor, router: Tensor, bias: Tensor, spec: RouterSpec) -> tuple[Tensor, Tensor]:
        return _each_pair(lambda t: _REF.route(x[t].clone(), router, bias, spec), len(x))

    def gated_mlp(self, x: Tensor, mlp: GatedMLP) -> Tensor:
        return _each(lambda row: _REF.gated_mlp(row, mlp), x, x.shape[1:])

    def moe(self, x: Tensor, ids: Tensor, weights: Tensor, experts: Sequence[GatedMLP]) -> Tensor:
        rows = (slice(t, t + 1) for t in range(len(x)))
        parts = [_REF.moe(x[row].clone(), ids[row], weights[row], experts) for row in rows]
        return torch.cat(parts) if parts else x


def _each(function: Callable[[Tensor], Tensor], x: Tensor, shape: Sequence[int]) -> Tensor:
    """``function`` of each token of ``x`` on its own; ``shape`` is that of one result."""
    # A fresh tensor each: an aligned address, whatever the token's place in the batch.
    rows = [function(x[t : t + 1].clone()) for t in range(len(x))]
    return torch.cat(rows) if rows else x.new_empty((0, *shape))


def _each_pair(function: Callable[[slice], tuple[Tensor, Tensor]], tokens: int) -> tuple[Tensor, Tensor]:
    """``function`` of each token's slice, results of all tokens joined. With no token, of the empty slice."""
    pairs = [function(slice(t, t + 1)) for t in range(tokens)] or [function(slice(0, 0))]
    return torch.cat([a for a, _ in pairs]), torch.cat([b for _, b in pairs])


def _single_tokens(batch: Batch) -> dict[int, Batch]:
    """For each token a batch of its own, whose context ends with it. For no token, an empty one at 0."""
    alone: dict[int, Batch] = {}
    for row in range(batch.num_rows):
        for token in range(batch.row_starts[row], batch.row_starts[row + 1]):
            part = slice(token, token + 1)
            position = batch.positions[part]
            alone[token] = Batch(
                position, batch.slots[part], (0, 1), (int(position) + 1,), batch.block_tables[row : row + 1]
            )
    return alone or {0: Batch(batch.positions, batch.slots, (0,), (), batch.block_tables[:0])}
