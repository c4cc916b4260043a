"""The tensors that a configuration implies: names, shapes, kinds.

Owns the naming of the DeepSeek-V3 family's checkpoints. Names are *logical*: one ``….weight`` per matrix, whatever
form it is stored in (an INT4 matrix is three tensors in a file, one here). Knows nothing of files, dtypes or torch.

Shapes are ``(out_features, in_features)`` for matrices and ``(size,)`` for vectors. Source: the Hugging Face layout of
DeepSeek-V3 and Kimi K2 checkpoints.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from perilune.config import ModelSpec

Kind = Literal["embedding", "head", "norm", "attention", "router", "router_bias", "dense", "shared", "expert"]

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
FINAL_NORM = "model.norm.weight"

_LAYER = re.compile(r"model\.layers\.([0-9]{1,6})\.")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One logical weight. ``kind`` says which part of the model it belongs to."""

    name: str
    shape: tuple[int, ...]
    kind: Kind


def expected_tensors(spec: ModelSpec) -> Iterator[TensorInfo]:
    """Every weight that the model needs, in the order in which the forward pass meets them.

    K2 yields 69,975 of them: 69,120 expert matrices and 855 others.
    """
    yield TensorInfo(EMBEDDING, (spec.vocab_size, spec.hidden_size), "embedding")
    for layer in range(spec.num_layers):
        prefix = f"model.layers.{layer}."
        yield TensorInfo(f"{prefix}input_layernorm.weight", (spec.hidden_size,), "norm")
        yield from _attention(spec, f"{prefix}self_attn.")
        yield TensorInfo(f"{prefix}post_attention_layernorm.weight", (spec.hidden_size,), "norm")
        if spec.is_moe_layer(layer):
            yield from _moe(spec, f"{prefix}mlp.")
        else:
            yield from _mlp(f"{prefix}mlp.", spec.hidden_size, spec.intermediate_size, "dense")
    yield TensorInfo(FINAL_NORM, (spec.hidden_size,), "norm")
    yield TensorInfo(HEAD, (spec.vocab_size, spec.hidden_size), "head")


def is_ignored(spec: ModelSpec, name: str) -> bool:
    """Whether a stored tensor is known and deliberately unused. The list is explicit; all else must be consumed.

    * layers behind the last one, when the configuration announces them: multi-token-prediction heads;
    * ``rotary_emb.inv_freq`` buffers: derived from the configuration, written by old library versions.
    """
    if name.endswith(".rotary_emb.inv_freq"):
        return True
    match = _LAYER.match(name)
    return match is not None and spec.num_layers <= int(match[1]) < spec.num_layers + spec.nextn_layers


def _attention(spec: ModelSpec, prefix: str) -> Iterator[TensorInfo]:
    hidden, heads = spec.hidden_size, spec.num_heads
    if spec.q_lora_rank is None:
        yield TensorInfo(f"{prefix}q_proj.weight", (heads * spec.qk_head_dim, hidden), "attention")
    else:
        yield TensorInfo(f"{prefix}q_a_proj.weight", (spec.q_lora_rank, hidden), "attention")
        yield TensorInfo(f"{prefix}q_a_layernorm.weight", (spec.q_lora_rank,), "norm")
        yield TensorInfo(f"{prefix}q_b_proj.weight", (heads * spec.qk_head_dim, spec.q_lora_rank), "attention")
    yield TensorInfo(f"{prefix}kv_a_proj_with_mqa.weight", (spec.kv_dim, hidden), "attention")
    yield TensorInfo(f"{prefix}kv_a_layernorm.weight", (spec.kv_lora_rank,), "norm")
    kv_out = heads * (spec.qk_nope_head_dim + spec.v_head_dim)
    yield TensorInfo(f"{prefix}kv_b_proj.weight", (kv_out, spec.kv_lora_rank), "attention")
    yield TensorInfo(f"{prefix}o_proj.weight", (hidden, heads * spec.v_head_dim), "attention")


def _moe(spec: ModelSpec, prefix: str) -> Iterator[TensorInfo]:
    hidden, inner = spec.hidden_size, spec.moe_intermediate_size
    yield TensorInfo(f"{prefix}gate.weight", (spec.num_experts, hidden), "router")
    yield TensorInfo(f"{prefix}gate.e_score_correction_bias", (spec.num_experts,), "router_bias")
    if spec.num_shared_experts:
        yield from _mlp(f"{prefix}shared_experts.", hidden, inner * spec.num_shared_experts, "shared")
    for expert in range(spec.num_experts):
        yield from _mlp(f"{prefix}experts.{expert}.", hidden, inner, "expert")


def _mlp(prefix: str, hidden: int, inner: int, kind: Kind) -> Iterator[TensorInfo]:
    yield TensorInfo(f"{prefix}gate_proj.weight", (inner, hidden), kind)
    yield TensorInfo(f"{prefix}up_proj.weight", (inner, hidden), kind)
    yield TensorInfo(f"{prefix}down_proj.weight", (hidden, inner), kind)
