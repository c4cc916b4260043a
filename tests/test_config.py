"""config.json: what is read, and that everything absent, absurd or unknown is refused by name."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perilune.config import ModelSpec, read_json
from perilune.errors import ConfigError

WEIGHTS = {
    "num_bits": 4,
    "type": "int",
    "symmetric": True,
    "strategy": "group",
    "group_size": 32,
    "dynamic": False,
    "actorder": None,
}
QUANT = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "kv_cache_scheme": None,
    "config_groups": {
        "group_0": {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": None, "output_activations": None}
    },
    "ignore": ["lm_head", "re:.*self_attn.*"],
}
K2: dict[str, Any] = {
    "model_type": "kimi_k2",
    "vocab_size": 163840,
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 384,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "routed_scaling_factor": 2.827,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 50000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 64.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "max_position_embeddings": 262144,
    "eos_token_id": 163586,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "num_nextn_predict_layers": 0,
    "quantization_config": QUANT,
}
ABSENT = object()


def changed(path: str, value: object) -> dict[str, Any]:
    """K2's configuration with one field replaced or taken away."""
    config: dict[str, Any] = json.loads(json.dumps(K2))
    *folders, key = path.split(".")
    node = config
    for folder in folders:
        node = node[folder]
    if value is ABSENT:
        node.pop(key)
    else:
        node[key] = value
    return config


def test_k2() -> None:
    spec = ModelSpec.from_config(K2)
    assert spec.softmax_scale == pytest.approx(0.1446796, rel=1e-6)
    assert (spec.kv_dim, spec.qk_head_dim, spec.expert_format) == (576, 192, "int4")
    assert [spec.is_moe_layer(i) for i in (0, 1, 60)] == [False, True, True]
    assert spec.latent_norm_eps == 1e-6
    assert spec.quant is not None
    assert spec.quant.ignore == ("lm_head", "re:.*self_attn.*")


def test_the_newer_spelling_of_rope_means_the_same() -> None:
    config = changed("rope_scaling", ABSENT)
    config.pop("rope_theta")
    scaling = {key: value for key, value in K2["rope_scaling"].items() if key != "type"}
    config["rope_parameters"] = {"rope_type": "yarn", "rope_theta": 50000.0, **scaling}
    assert ModelSpec.from_config(config).rope == ModelSpec.from_config(K2).rope


@pytest.mark.parametrize("beta_fast", [1.0, 32.0])
def test_beta_fast_is_read_and_not_assumed(beta_fast: float) -> None:
    assert ModelSpec.from_config(changed("rope_scaling.beta_fast", beta_fast)).rope.beta_fast == beta_fast


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("model_type", "llama", "known: kimi_k2, deepseek_v3"),
        ("model_type", ABSENT, "`model_type` is absent"),
        ("hidden_size", ABSENT, "`hidden_size` is absent"),
        ("hidden_size", 0, "`hidden_size` is 0"),
        ("hidden_size", -7168, "-7168"),
        ("hidden_size", "7168", "'7168'"),
        ("hidden_size", True, "True"),
        ("hidden_size", 7168.5, "7168.5"),
        ("hidden_size", 1 << 60, "from 1 to"),
        ("hidden_size", 7170, "INT4 group size 32 must divide it"),
        ("moe_intermediate_size", 2040, "INT4 group size 32 must divide it"),
        ("num_key_value_heads", 8, "must equal num_attention_heads"),
        ("qk_rope_head_dim", 63, "even number"),
        ("n_group", 5, "must divide n_routed_experts"),
        ("n_group", 384, "chosen groups hold 1 experts"),
        ("topk_group", 2, "at most n_group"),
        ("num_experts_per_tok", 385, "hold 384 experts"),
        ("scoring_func", "softmax", "known: sigmoid"),
        ("topk_method", "greedy", "known: noaux_tc"),
        ("hidden_act", "gelu", "known: silu"),
        ("attention_bias", True, "only false"),
        ("tie_word_embeddings", True, "only false"),
        ("rope_interleave", False, "only true"),
        ("rms_norm_eps", float("nan"), "nan"),
        ("routed_scaling_factor", float("inf"), "inf"),
        ("eos_token_id", 163840, "163839"),
        ("eos_token_id", -1, "-1"),
        ("eos_token_id", [1, "2"], "list of at most 64 ids"),
        ("rope_scaling", [], "an object or null"),
        ("rope_scaling.type", "longrope", "known: default, yarn"),
        ("rope_scaling.factor", ABSENT, "`factor` is absent"),
        ("rope_scaling.factor", 0.5, "from 1 to"),
        ("rope_scaling.attention_factor", 1.2, "explicit factor"),
        ("rope_theta", ABSENT, "`rope_theta` is None"),
        ("rope_theta", 1.0, "from 1.001 to"),
        ("moe_layer_freq", 2, "from 1 to 1"),
        ("quantization_config.transform_config", {"config_groups": {"a": 1}}, "`transform_config` is"),
        ("quantization_config.sparsity_config", {"format": "sparse-24-bitmask"}, "`sparsity_config` is"),
        ("quantization_config.config_groups.group_0.format", "float-quantized", "`format` must be pack-quantized"),
        ("quantization_config", "int4", "an object is needed"),
        ("quantization_config.quant_method", "gptq", "known: compressed-tensors"),
        ("quantization_config.format", "marlin-24", "known: pack-quantized"),
        ("quantization_config.config_groups", {}, "exactly one group"),
        ("quantization_config.config_groups.group_0.input_activations", {"num_bits": 8}, "quantised activations"),
        ("quantization_config.config_groups.group_0.weights.num_bits", 8, "from 4 to 4"),
        ("quantization_config.config_groups.group_0.weights.group_size", 128, "from 32 to 32"),
        ("quantization_config.config_groups.group_0.weights.symmetric", False, "only true"),
        ("quantization_config.config_groups.group_0.weights.strategy", "channel", "known: group"),
        ("quantization_config.config_groups.group_0.weights.actorder", "static", "only null"),
        ("quantization_config.ignore", [1], "list of names"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(field: str, value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelSpec.from_config(changed(field, value))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def read_or_refuse(config: dict[str, Any]) -> None:
    """No other exception than a short ``ConfigError``."""
    message = ""
    try:
        ModelSpec.from_config(config)
    except ConfigError as error:
        message = str(error)
    assert len(message) < 400


@given(st.sampled_from(sorted(K2)), JSON)
def test_any_value_in_any_field_is_read_or_refused(field: str, value: object) -> None:
    read_or_refuse({**K2, field: value})


@given(st.sampled_from(sorted(QUANT)), JSON)
def test_any_value_in_quantization_config_is_read_or_refused(field: str, value: object) -> None:
    read_or_refuse({**K2, "quantization_config": {**QUANT, field: value}})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not valid JSON"),
        (b"[1]", "an object is needed"),
        (b"{" * 100_000, "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"a": 1, "a": 2}', "`a` stands twice"),
        (b"\xff\xfe", "not valid JSON"),
        (b'{"a": ' + b"1" * 10_000 + b"}", "not valid JSON"),
    ],
)
def test_files_that_are_no_json_object(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read_json(path)


def test_files_that_are_no_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="missing or not a file"):
        read_json(tmp_path / "config.json")
    with pytest.raises(ConfigError, match="missing or not a file"):
        read_json(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="missing or not a file"):
        read_json(tmp_path / "pipe")
    large = tmp_path / "large.json"
    with large.open("wb") as stream:
        stream.truncate(1 << 40)
    with pytest.raises(ConfigError, match="at most"):
        read_json(large)


def test_names_that_no_file_can_have(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: File name too long"):
        read_json(tmp_path / ("x" * 5000))
