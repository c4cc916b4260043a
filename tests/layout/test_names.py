"""Which tensors a configuration implies."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest

from perilune.checkpoint.tiny import tiny_config
from perilune.config import ModelSpec
from perilune.layout.names import expected_tensors, is_ignored


def spec_of(**overrides: Any) -> ModelSpec:
    return ModelSpec.from_config(tiny_config(**overrides))


@pytest.fixture(scope="module")
def k2() -> ModelSpec:
    """Kimi K2 Thinking's sizes."""
    return spec_of(
        vocab_size=163840, hidden_size=7168, num_hidden_layers=61, num_attention_heads=64, q_lora_rank=1536,
        kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, intermediate_size=18432,
        moe_intermediate_size=2048, n_routed_experts=384, num_experts_per_tok=8, eos_token_id=163586,
    )  # fmt: skip


def test_k2_has_its_published_number_of_weights(k2: ModelSpec) -> None:
    infos = list(expected_tensors(k2))
    assert sum(math.prod(info.shape) for info in infos) == 1_026_408_232_448
    assert Counter(info.kind for info in infos) == {
        "embedding": 1, "head": 1, "norm": 61 * 4 + 1, "attention": 61 * 5, "router": 60, "router_bias": 60,
        "dense": 3, "shared": 180, "expert": 69_120,
    }  # fmt: skip
    assert len({info.name for info in infos}) == len(infos) == 69_975


def test_k2_shapes(k2: ModelSpec) -> None:
    shapes = {info.name: info.shape for info in expected_tensors(k2)}
    layer = "model.layers.60."
    assert shapes["model.embed_tokens.weight"] == shapes["lm_head.weight"] == (163840, 7168)
    assert shapes[f"{layer}self_attn.q_a_proj.weight"] == (1536, 7168)
    assert shapes[f"{layer}self_attn.q_b_proj.weight"] == (12288, 1536)
    assert shapes[f"{layer}self_attn.kv_a_proj_with_mqa.weight"] == (576, 7168)
    assert shapes[f"{layer}self_attn.kv_a_layernorm.weight"] == (512,)
    assert shapes[f"{layer}self_attn.kv_b_proj.weight"] == (16384, 512)
    assert shapes[f"{layer}self_attn.o_proj.weight"] == (7168, 8192)
    assert shapes[f"{layer}mlp.gate.weight"] == (384, 7168)
    assert shapes[f"{layer}mlp.gate.e_score_correction_bias"] == (384,)
    assert shapes[f"{layer}mlp.experts.383.down_proj.weight"] == (7168, 2048)
    assert shapes["model.layers.0.mlp.gate_proj.weight"] == (18432, 7168)


def test_names_are_those_of_the_reference_code() -> None:
    """The same keys and shapes as transformers' module tree holds, experts apart (it keeps them stacked)."""
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    config = tiny_config(model_type="deepseek_v3", q_lora_rank=None, n_shared_experts=2)
    with torch.device("meta"):
        model = transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**config))
    theirs = {name: tuple(value.shape) for name, value in model.state_dict().items() if ".experts." not in name}
    ours = {i.name: i.shape for i in expected_tensors(ModelSpec.from_config(config)) if i.kind != "expert"}
    assert ours == theirs


def test_query_without_a_latent() -> None:
    names = {info.name: info.shape for info in expected_tensors(spec_of(q_lora_rank=None))}
    assert names["model.layers.0.self_attn.q_proj.weight"] == (4 * 32, 64)
    assert not any("q_a" in name or "q_b" in name for name in names)


def test_shared_experts_are_one_wider_mlp_or_none() -> None:
    wide = {info.name: info.shape for info in expected_tensors(spec_of(n_shared_experts=3))}
    assert wide["model.layers.1.mlp.shared_experts.down_proj.weight"] == (64, 96)
    assert not any(info.kind == "shared" for info in expected_tensors(spec_of(n_shared_experts=0)))


def test_the_first_layers_are_dense_as_configured() -> None:
    kinds = spec_of(num_hidden_layers=4, first_k_dense_replace=2)
    routers = [info.name for info in expected_tensors(kinds) if info.kind == "router"]
    assert routers == [f"model.layers.{layer}.mlp.gate.weight" for layer in (2, 3)]


@pytest.mark.parametrize(
    ("name", "ignored"),
    [
        ("model.layers.3.mlp.gate.weight", True),
        ("model.layers.4.eh_proj.weight", True),
        ("model.layers.2.eh_proj.weight", False),
        ("model.layers.5.eh_proj.weight", False),
        ("model.layers.3", False),
        ("other.model.layers.3.x", False),
        ("model.layers.0.self_attn.rotary_emb.inv_freq", True),
        ("rotary_emb.inv_freq", False),
        ("model.layers.99999999999.x", False),
    ],
)
def test_ignore_list_is_explicit(name: str, ignored: bool) -> None:
    assert is_ignored(spec_of(num_nextn_predict_layers=2), name) is ignored


def test_no_layer_is_ignored_unless_the_configuration_announces_it() -> None:
    assert not is_ignored(spec_of(), "model.layers.3.mlp.gate.weight")
