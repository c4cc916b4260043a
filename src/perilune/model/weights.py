"""Weights as data: frozen dataclasses of tensors, and how they are taken from a source by their checkpoint names.

Knows the Hugging Face names of the DeepSeek-V3 family; does not know files. ``WeightSource`` is what a checkpoint (or
a test) offers. ``kv_b_proj`` is always dequantised and split, because the absorbed form multiplies by its halves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from perilune.config import ModelSpec
from perilune.ops import GatedMLP
from perilune.quant.tensors import Dense, Int4, Weight


class WeightSource(Protocol):
    """Gives tensors by their checkpoint names, cast and placed; see ``perilune.checkpoint.load``."""

    def vector(self, name: str) -> Tensor:
        """A norm weight, or the router and its bias (those in float32 or wider)."""
        ...

    def matrix(self, name: str) -> Dense | Int4:
        """A projection [out, in] by its logical name ``….weight``, packed if the file has it packed."""
        ...


@dataclass(frozen=True, slots=True)
class MLAWeights:
    """Latent attention of one layer. ``q_a`` and ``q_a_norm`` are None where queries have no latent."""

    q_a: Weight | None  # [Q, h]
    q_a_norm: Tensor | None  # [Q]
    q_b: Weight  # [H (N + P), Q], or [H (N + P), h] without a query latent
    kv_a: Weight  # [L + P, h]
    kv_a_norm: Tensor  # [L]
    w_uk: Tensor  # [H, N, L]: latent to keys
    w_uv: Tensor  # [H, V, L]: latent to values
    o: Weight  # [h, H V]


@dataclass(frozen=True, slots=True)
class MoEWeights:
    """Router, routed experts, and the shared expert that sees every token."""

    router: Tensor  # [E, h], float32 or wider
    bias: Tensor  # [E], float32 or wider: used to choose, never to weigh
    experts: tuple[GatedMLP, ...]
    shared: GatedMLP | None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer."""

    attn_norm: Tensor  # [h]
    attn: MLAWeights
    ffn_norm: Tensor  # [h]
    ffn: GatedMLP | MoEWeights


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """Everything between token ids and logits."""

    embed: Tensor  # [vocab, h]
    layers: tuple[LayerWeights, ...]
    norm: Tensor  # [h]
    head: Weight  # [vocab, h]


def take_weights(spec: ModelSpec, source: WeightSource, dtype: torch.dtype) -> ModelWeights:
    """Takes every weight of the model, in file order. ``dtype`` is that of the dequantised ``kv_b_proj``."""
    embed = source.matrix("model.embed_tokens.weight").dequantize(dtype)
    layers = tuple(_take_layer(spec, source, index, dtype) for index in range(spec.num_layers))
    return ModelWeights(embed, layers, source.vector("model.norm.weight"), source.matrix("lm_head.weight"))


def _take_layer(spec: ModelSpec, source: WeightSource, index: int, dtype: torch.dtype) -> LayerWeights:
    prefix = f"model.layers.{index}"
    return LayerWeights(
        attn_norm=source.vector(f"{prefix}.input_layernorm.weight"),
        attn=_take_attention(spec, source, f"{prefix}.self_attn", dtype),
        ffn_norm=source.vector(f"{prefix}.post_attention_layernorm.weight"),
        ffn=_take_moe(spec, source, f"{prefix}.mlp")
        if spec.is_moe_layer(index)
        else _take_mlp(source, f"{prefix}.mlp"),
    )


def _take_attention(spec: ModelSpec, source: WeightSource, prefix: str, dtype: torch.dtype) -> MLAWeights:
    latent_queries = spec.q_lora_rank is not None
    q_a = source.matrix(f"{prefix}.q_a_proj.weight") if latent_queries else None
    q_a_norm = source.vector(f"{prefix}.q_a_layernorm.weight") if latent_queries else None
    q_b = source.matrix(f"{prefix}.{'q_b_proj' if latent_queries else 'q_proj'}.weight")
    kv_a = source.matrix(f"{prefix}.kv_a_proj_with_mqa.weight")
    kv_a_norm = source.vector(f"{prefix}.kv_a_layernorm.weight")
    kv_b = source.matrix(f"{prefix}.kv_b_proj.weight").dequantize(dtype)
    kv_b = kv_b.view(spec.num_heads, spec.qk_nope_head_dim + spec.v_head_dim, spec.kv_lora_rank)
    w_uk, w_uv = kv_b.split((spec.qk_nope_head_dim, spec.v_head_dim), dim=1)
    o = source.matrix(f"{prefix}.o_proj.weight")
    return MLAWeights(q_a, q_a_norm, q_b, kv_a, kv_a_norm, w_uk.contiguous(), w_uv.contiguous(), o)


def _take_mlp(source: WeightSource, prefix: str) -> GatedMLP:
    gate, up, down = (source.matrix(f"{prefix}.{part}_proj.weight") for part in ("gate", "up", "down"))
    return GatedMLP(gate, up, down)


def _take_moe(spec: ModelSpec, source: WeightSource, prefix: str) -> MoEWeights:
    return MoEWeights(
        router=source.vector(f"{prefix}.gate.weight"),
        bias=source.vector(f"{prefix}.gate.e_score_correction_bias"),
        experts=tuple(_take_mlp(source, f"{prefix}.experts.{expert}") for expert in range(spec.num_experts)),
        shared=_take_mlp(source, f"{prefix}.shared_experts") if spec.num_shared_experts else None,
    )
