"""The decoder stack and the network around it: token ids → logits.

``Stack.run`` is the seam where a backend may take over a whole run of layers in one call; ``RefStack`` composes it
from single ops. Neither knows requests, sampling or checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from perilune.config import ModelSpec
from perilune.model.mla import AttentionContext, AttentionForm, attention
from perilune.model.moe import mixture, router_spec
from perilune.model.rope import inverse_frequencies
from perilune.model.weights import LayerWeights, ModelWeights, MoEWeights
from perilune.ops import Batch, Ops, RouterSpec


class Stack(Protocol):
    """A run of decoder layers."""

    def run(self, x: Tensor, first: int, last: int, batch: Batch, kv: Tensor) -> Tensor:
        """Takes ``x`` [T, h] through layers ``first … last - 1``, writing ``kv`` [layers, blocks, bs, D]."""
        ...


@dataclass(frozen=True, slots=True)
class RefStack:
    """The stack composed from single ops."""

    context: AttentionContext
    layers: tuple[LayerWeights, ...]
    frequencies: Tensor  # float64 [P/2]
    router: RouterSpec

    def run(self, x: Tensor, first: int, last: int, batch: Batch, kv: Tensor) -> Tensor:
        scale = self.context.spec.rope.cos_sin_scale
        rotary = self.context.ops.rotary(batch.positions, self.frequencies, scale, x.dtype)
        for index in range(first, last):
            x = self._layer(x, self.layers[index], batch, kv[index], rotary)
        return x

    def _layer(self, x: Tensor, layer: LayerWeights, batch: Batch, kv: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        spec, ops = self.context.spec, self.context.ops
        normed = ops.rms_norm(x, layer.attn_norm, spec.rms_norm_eps)
        x = x + attention(normed, layer.attn, kv, batch, rotary, self.context)
        normed = ops.rms_norm(x, layer.ffn_norm, spec.rms_norm_eps)
        if isinstance(layer.ffn, MoEWeights):
            return x + mixture(normed, layer.ffn, self.router, ops)
        return x + ops.gated_mlp(normed, layer.ffn)


@dataclass(frozen=True, slots=True)
class Network:
    """Embedding, stack, final norm and head."""

    spec: ModelSpec
    weights: ModelWeights
    stack: Stack
    ops: Ops

    @classmethod
    def build(cls, spec: ModelSpec, weights: ModelWeights, ops: Ops, form: AttentionForm = "absorbed") -> Network:
        """A network on single ops; tensors stay where they are."""
        frequencies = inverse_frequencies(spec.rope, str(weights.embed.device))
        stack = RefStack(AttentionContext(spec, ops, form), weights.layers, frequencies, router_spec(spec))
        return cls(spec, weights, stack, ops)

    @torch.inference_mode()
    def forward(self, ids: Tensor, batch: Batch, kv: Tensor, wanted: Tensor) -> Tensor:
        """Logits of the tokens at indices ``wanted`` [n] among int64 ``ids`` [T] → [n, vocab], float32 or wider."""
        x = self.ops.embed(ids, self.weights.embed)
        x = self.stack.run(x, 0, self.spec.num_layers, batch, kv)
        x = self.ops.rms_norm(x[wanted], self.weights.norm, self.spec.rms_norm_eps)
        logits = self.ops.linear(x, self.weights.head)
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def new_cache(self, blocks: int, block_size: int) -> Tensor:
        """A cache [layers, blocks, block_size, L + P] in the weights' dtype and place.

        Not initialised: memory that no token has used yet costs nothing, and what was not written is never read.
        """
        shape = (self.spec.num_layers, blocks, block_size, self.spec.kv_dim)
        return self.weights.embed.new_empty(shape)
