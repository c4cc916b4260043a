"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1), in both of its forms.

    c = norm(W_kv_a x)[:L]                   the latent: what the cache keeps, with
    r = rope((W_kv_a x)[L:])                 one rotary key for all heads
    q = W_q_b norm(W_q_a x)                  per head N + P values, q = [q_n ‖ q_r], q_r rotated

Decompressed: k = [W_uk c ‖ r], v = W_uv c, ordinary attention of width N + P.
Absorbed: since q_n · (W_uk c) = (W_ukᵀ q_n) · c, queries are taken into the latent space and all heads attend over the
same [c ‖ r]; the weighted latent u gives the head's output W_uv u. Same result, and the context is never expanded.

Scores are scaled by (N + P)^-½ · m² (YaRN's m); cos and sin are not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from perilune.config import ModelSpec
from perilune.model.weights import MLAWeights
from perilune.ops import Batch, Ops

AttentionForm = Literal["absorbed", "decompressed"]


@dataclass(frozen=True, slots=True)
class AttentionContext:
    """What stays the same over all layers: dimensions, backend, form."""

    spec: ModelSpec
    ops: Ops
    form: AttentionForm


def attention(
    x: Tensor, weights: MLAWeights, kv: Tensor, batch: Batch, rotary: tuple[Tensor, Tensor], context: AttentionContext
) -> Tensor:
    """Writes the tokens' latents to the cache, then attends over it.

    Args:
        x: [T, h], already normed.
        kv: this layer's cache [blocks, block_size, L + P].
        rotary: cos and sin [T, P/2].

    Returns:
        [T, h], before the residual sum.
    """
    spec, ops = context.spec, context.ops
    q = _queries(x, weights, spec, ops)  # [T, H, N + P]
    q_nope, q_rope = q.split((spec.qk_nope_head_dim, spec.qk_rope_head_dim), dim=-1)
    q_rope = ops.rope(q_rope, *rotary)
    latent, k_rope = ops.linear(x, weights.kv_a).split((spec.kv_lora_rank, spec.qk_rope_head_dim), dim=-1)
    latent = ops.rms_norm(latent, weights.kv_a_norm, spec.latent_norm_eps)
    ops.kv_write(kv, latent, ops.rope(k_rope, *rotary), batch.slots)

    if context.form == "absorbed":
        q_latent = ops.head_linear(q_nope, weights.w_uk.transpose(1, 2))
        mixed, _ = ops.mla_absorbed(q_latent, q_rope, kv, batch, spec.softmax_scale)
        heads = ops.head_linear(mixed, weights.w_uv)  # [T, H, V]
    else:
        q = torch.cat((q_nope, q_rope), dim=-1)
        heads, _ = ops.mla_decompressed(q, kv, weights.w_uk, weights.w_uv, batch, spec.softmax_scale)
    return ops.linear(heads.flatten(-2), weights.o)


def _queries(x: Tensor, weights: MLAWeights, spec: ModelSpec, ops: Ops) -> Tensor:
    if weights.q_a is not None and weights.q_a_norm is not None:
        x = ops.rms_norm(ops.linear(x, weights.q_a), weights.q_a_norm, spec.latent_norm_eps)
    return ops.linear(x, weights.q_b).view(-1, spec.num_heads, spec.qk_head_dim)
