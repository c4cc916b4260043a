"""The readable backend: plain torch on any device and dtype. In float64 it is the oracle for every other backend.

Follows DeepSeek-V3's published forward pass (MLA, sigmoid router with a correction bias). Speed is not its business,
memory is: attention runs in tiles so that a 256k context does not ask for a score matrix of that size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from perilune.ops import Batch, GatedMLP, RouterSpec
from perilune.quant.tensors import Weight

_TILE_ELEMENTS = 1 << 24  # scores of one attention tile


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums: float64 for float64, else float32."""
    return torch.promote_types(dtype, torch.float32)


class RefOps:
    """Implements ``perilune.ops.Ops``; see there for shapes. Holds no state."""

    def embed(self, ids: Tensor, table: Tensor) -> Tensor:
        return table[ids]

    def linear(self, x: Tensor, weight: Weight) -> Tensor:
        return functional.linear(x, weight.dequantize(x.dtype))

    def head_linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return torch.einsum("thi,hoi->tho", x, weight)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.to(accumulate_dtype(x.dtype))
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return weight * normed.to(x.dtype)

    def rotary(self, positions: Tensor, frequencies: Tensor, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        angles = positions.to(torch.float64).unsqueeze(-1) * frequencies
        return (angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        shape = (x.shape[0], *([1] * (x.dim() - 2)), cos.shape[-1])
        cos, sin = cos.view(shape), sin.view(shape)
        even, odd = x[..., 0::2], x[..., 1::2]
        return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)

    def kv_write(self, kv: Tensor, latent: Tensor, k_rope: Tensor, slots: Tensor) -> None:
        kv.view(-1, kv.shape[-1])[slots] = torch.cat((latent, k_rope), dim=-1).to(kv.dtype)

    def mla_absorbed(
        self, q_latent: Tensor, q_rope: Tensor, kv: Tensor, batch: Batch, scale: float
    ) -> tuple[Tensor, Tensor]:
        queries = torch.cat((q_latent, q_rope), dim=-1)  # [T, H, D]
        rank = q_latent.shape[-1]

        def keys_values(context: Tensor) -> tuple[Tensor, Tensor]:
            keys = context.unsqueeze(1)  # [S, 1, D]: all heads share one latent
            return keys, keys[..., :rank]

        return _attend(queries, rank, kv, batch, scale, keys_values)

    def mla_decompressed(
        self, q: Tensor, kv: Tensor, w_uk: Tensor, w_uv: Tensor, batch: Batch, scale: float
    ) -> tuple[Tensor, Tensor]:
        heads, rank = w_uk.shape[0], w_uk.shape[-1]

        def keys_values(context: Tensor) -> tuple[Tensor, Tensor]:
            latent, k_rope = context[:, :rank], context[:, rank:]
            nope = torch.einsum("sl,hnl->shn", latent, w_uk.to(context.dtype))
            keys = torch.cat((nope, k_rope.unsqueeze(1).expand(-1, heads, -1)), dim=-1)  # [S, H, N + P]
            return keys, torch.einsum("sl,hvl->shv", latent, w_uv.to(context.dtype))  # [S, H, V]

        return _attend(q, w_uv.shape[1], kv, batch, scale, keys_values)

    def merge(self, outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        lse = torch.stack(tuple(lses))  # [parts, T, H]
        lse = torch.where(torch.isfinite(lse), lse, torch.full_like(lse, -torch.inf))
        seen = torch.isfinite(lse)
        top = lse.amax(0).nan_to_num(neginf=0.0)
        weights = torch.where(seen, torch.exp(lse - top), torch.zeros_like(lse))
        total = weights.sum(0)
        parts = torch.where(seen.unsqueeze(-1), torch.stack(tuple(outs)), torch.zeros_like(outs[0]))
        merged = (parts * (weights / total.clamp_min(torch.finfo(total.dtype).tiny)).unsqueeze(-1)).sum(0)
        return merged, torch.where(total > 0, top + total.log(), torch.full_like(total, -torch.inf))

    def route(self, x: Tensor, router: Tensor, bias: Tensor, spec: RouterSpec) -> tuple[Tensor, Tensor]:
        scores = functional.linear(x.to(router.dtype), router).sigmoid()  # [T, E]
        biased = scores + bias
        if spec.n_group > 1:
            grouped = biased.unflatten(-1, (spec.n_group, -1))  # [T, G, E/G]
            group_scores = grouped.topk(2, dim=-1).values.sum(-1)
            chosen = _best(group_scores, spec.topk_group)
            allowed = torch.zeros_like(group_scores, dtype=torch.bool).scatter(-1, chosen, value=True)
            biased = grouped.masked_fill(~allowed.unsqueeze(-1), -torch.inf).flatten(-2)
        ids = _best(biased, spec.top_k)
        weights = scores.gather(-1, ids)
        if spec.norm_topk_prob:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return ids, weights * spec.scaling

    def gated_mlp(self, x: Tensor, mlp: GatedMLP) -> Tensor:
        return self.linear(functional.silu(self.linear(x, mlp.gate)) * self.linear(x, mlp.up), mlp.down)

    def moe(self, x: Tensor, ids: Tensor, weights: Tensor, experts: Sequence[GatedMLP]) -> Tensor:
        wide = accumulate_dtype(x.dtype)
        parts = torch.zeros((*ids.shape, x.shape[-1]), dtype=wide, device=x.device)  # [T, K, h]
        for expert in ids.unique().tolist():
            token, place = (ids == expert).nonzero(as_tuple=True)
            parts[token, place] = self.gated_mlp(x[token], experts[expert]).to(wide)
        total = torch.zeros_like(x, dtype=wide)
        for place in range(ids.shape[1]):
            total += parts[:, place] * weights[:, place, None].to(wide)
        return total.to(x.dtype)


def _best(scores: Tensor, count: int) -> Tensor:
    """Indices of the ``count`` highest scores of each row, best first, equal scores by lower index."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def _attend(
    queries: Tensor,
    value_dim: int,
    kv: Tensor,
    batch: Batch,
    scale: float,
    keys_values: Callable[[Tensor], tuple[Tensor, Tensor]],
) -> tuple[Tensor, Tensor]:
    """Causal attention, row by row and tile by tile; ``keys_values`` turns a context [S, D] into keys and values."""
    wide = accumulate_dtype(queries.dtype)
    tokens, heads = queries.shape[:2]
    out = torch.zeros((tokens, heads, value_dim), dtype=wide, device=queries.device)
    lse = torch.full((tokens, heads), -torch.inf, dtype=wide, device=queries.device)
    flat, block_size = kv.view(-1, kv.shape[-1]), kv.shape[1]
    for row, length in enumerate(batch.kv_lens):
        start, stop = batch.row_starts[row], batch.row_starts[row + 1]
        if start == stop or length == 0:
            continue
        positions = torch.arange(length, device=kv.device)
        slots = batch.block_tables[row, positions // block_size] * block_size + positions % block_size
        keys, values = keys_values(flat[slots].to(wide))
        tile = max(1, _TILE_ELEMENTS // (length * heads))
        for first in range(start, stop, tile):
            part = slice(first, min(first + tile, stop))
            scores = torch.einsum("thd,shd->ths", queries[part].to(wide), keys.expand(-1, heads, -1)) * scale
            visible = positions <= batch.positions[part].unsqueeze(-1)  # [t, S]
            scores = scores.masked_fill(~visible.unsqueeze(1), -torch.inf)
            lse[part] = scores.logsumexp(-1)
            out[part] = torch.einsum("ths,shv->thv", scores.softmax(-1), values.expand(-1, heads, -1))
    return out.to(queries.dtype), lse
