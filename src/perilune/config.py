"""What is served and how: ``ModelSpec`` (from config.json), ``EngineConfig``.

Frozen and validated on construction; a config object never rewrites itself or another. Every architecture
field is read from the file, never assumed: a field that is absent, absurd or of a kind that this code does not
implement is a ``ConfigError`` that names it. Knows the formats' field names, not torch, not files beyond JSON.

Sources: the Hugging Face config.json of the DeepSeek-V3 family (``rope_scaling`` and the newer ``rope_parameters``
spelling), compressed-tensors' ``quantization_config``.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from perilune.errors import ConfigError

MODEL_TYPES: Final = ("kimi_k2", "deepseek_v3")
MAX_JSON_BYTES: Final = 16 << 20
_MAX_DIM: Final = 1 << 24

WeightFormat = Literal["bf16", "int4"]
SchedulingPolicy = Literal["fcfs", "priority", "fair"]


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object from a file of the model directory.

    Raises:
        ConfigError: missing, not a regular file, too large, not JSON, duplicate keys, or not an object.
    """
    try:
        if not path.is_file():
            raise ConfigError(f"`{path}` is missing or not a file", hint="point at a directory in Hugging Face layout")
        size = path.stat().st_size
        if size > MAX_JSON_BYTES:
            raise ConfigError(f"`{path}` has {size} bytes, at most {MAX_JSON_BYTES} are read")
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"`{path}` cannot be read: {error.strerror or error}") from error
    try:
        value = json.loads(data, object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"`{path}` is not valid JSON: {type(error).__name__}: {str(error)[:200]}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"`{path}` holds a JSON {type(value).__name__}, an object is needed")
    return value


def toml_fault(error: Exception) -> str:
    """Where a TOML parser gave up, in brackets, or nothing. No more: its messages quote what stands there, and files of
    keys are TOML too."""
    found = re.search(r"\(at (line \d+, column \d+|end of document)\)$", str(error))
    return "" if found is None else f" {found[0]}"


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"key `{twice[:80]}` stands twice")
    return value


class _Fields:
    """Typed, bounded access to a JSON object; every refusal names the field and its value."""

    def __init__(self, data: Mapping[str, Any], where: str) -> None:
        self.data, self.where = data, where

    def fail(self, key: str, allowed: str) -> ConfigError:
        shown = repr(self.data[key])[:80] if key in self.data else "absent"
        return ConfigError(f"{self.where}: `{key}` is {shown}, {allowed}")

    def integer(self, key: str, low: int = 1, high: int = _MAX_DIM, default: int | None = None) -> int:
        value = self.data.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.fail(key, f"an integer from {low} to {high} is needed")
        return value

    def number(self, key: str, low: float, high: float, default: float | None = None) -> float:
        value = self.data.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
            raise self.fail(key, f"a number from {low:g} to {high:g} is needed")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        value = self.data.get(key, default)
        if not isinstance(value, bool):
            raise self.fail(key, "true or false is needed")
        return value

    def choice(self, key: str, allowed: tuple[str, ...], default: str | None = None) -> str:
        value = self.data.get(key, default)
        if not isinstance(value, str) or value not in allowed:
            raise self.fail(key, f"known: {', '.join(allowed)}")
        return value


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding of ``dim`` dimensions, plain (``factor`` 1) or YaRN.

    Attributes:
        softmax_mscale: m of the YaRN attention scale; the softmax scale is multiplied by m².
        cos_sin_scale: multiplier of cos and sin; 1 when mscale equals mscale_all_dim, as in K2.
    """

    dim: int
    theta: float
    kind: Literal["default", "yarn"] = "default"
    factor: float = 1.0
    original_max_position: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0

    @property
    def softmax_mscale(self) -> float:
        if self.kind == "default" or not self.mscale_all_dim:
            return 1.0
        return _yarn_mscale(self.factor, self.mscale_all_dim)

    @property
    def cos_sin_scale(self) -> float:
        if self.kind == "default":
            return 1.0
        if self.mscale and self.mscale_all_dim:
            return _yarn_mscale(self.factor, self.mscale) / _yarn_mscale(self.factor, self.mscale_all_dim)
        return _yarn_mscale(self.factor, 1.0)


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


@dataclass(frozen=True, slots=True)
class QuantSpec:
    """compressed-tensors ``pack-quantized`` INT4, symmetric, in groups along the input dimension.

    ``ignore`` is the file's own list: informative, since the presence of packed tensors decides what is quantised.
    """

    group_size: int
    ignore: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Architecture of one checkpoint, as its config.json states it. Symbols as in docs/shapes.md."""

    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    intermediate_size: int
    moe_intermediate_size: int
    num_experts: int
    num_shared_experts: int
    top_k: int
    first_dense_layers: int
    n_group: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    rms_norm_eps: float
    max_position: int
    rope: RopeSpec
    eos_token_ids: tuple[int, ...]
    nextn_layers: int = 0
    quant: QuantSpec | None = None
    latent_norm_eps: float = 1e-6
    """Norms of the q and kv latents. Moonshot's and transformers' code build them without the config's eps, so 1e-6."""

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def kv_dim(self) -> int:
        """Values that one token keeps in one layer of the cache: latent ‖ rope."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """``qk_head_dim**-0.5 · m²`` (K2: 0.1446796)."""
        return self.rope.softmax_mscale**2 / math.sqrt(self.qk_head_dim)

    @property
    def expert_format(self) -> WeightFormat:
        return "bf16" if self.quant is None else "int4"

    def is_moe_layer(self, layer: int) -> bool:
        return layer >= self.first_dense_layers

    @classmethod
    def from_config(cls, data: Mapping[str, Any], where: str = "config.json") -> ModelSpec:
        """Reads a parsed config.json.

        Raises:
            ConfigError: a field is absent, absurd, or names something that is not implemented.
        """
        f = _Fields(data, where)
        model_type = f.choice("model_type", MODEL_TYPES)
        f.choice("hidden_act", ("silu",), "silu")
        f.choice("scoring_func", ("sigmoid",), "sigmoid")
        f.choice("topk_method", ("noaux_tc",), "noaux_tc")
        f.integer("moe_layer_freq", 1, 1, default=1)  # no model of the family has another
        if f.boolean("attention_bias", False):
            raise f.fail("attention_bias", "only false is implemented")
        if f.boolean("tie_word_embeddings", False):
            raise f.fail("tie_word_embeddings", "only false is implemented")
        if not f.boolean("rope_interleave", True):
            raise f.fail("rope_interleave", "only true (rotation of neighbouring pairs) is implemented")
        heads = f.integer("num_attention_heads", high=4096)
        if data.get("num_key_value_heads") not in (None, heads):
            raise f.fail(
                "num_key_value_heads", f"MLA shares one latent, so it must equal num_attention_heads ({heads})"
            )
        q_lora = None if data.get("q_lora_rank") is None else f.integer("q_lora_rank")
        rope_dim = f.integer("qk_rope_head_dim", low=2)
        if rope_dim % 2:
            raise f.fail("qk_rope_head_dim", "rotation works on pairs, an even number is needed")
        spec = cls(
            model_type=model_type,
            vocab_size=f.integer("vocab_size"),
            hidden_size=f.integer("hidden_size"),
            num_layers=f.integer("num_hidden_layers", high=4096),
            num_heads=heads,
            q_lora_rank=q_lora,
            kv_lora_rank=f.integer("kv_lora_rank"),
            qk_nope_head_dim=f.integer("qk_nope_head_dim"),
            qk_rope_head_dim=rope_dim,
            v_head_dim=f.integer("v_head_dim"),
            intermediate_size=f.integer("intermediate_size"),
            moe_intermediate_size=f.integer("moe_intermediate_size"),
            num_experts=f.integer("n_routed_experts", high=65536),
            num_shared_experts=f.integer("n_shared_experts", low=0, high=1024),
            top_k=f.integer("num_experts_per_tok", high=65536),
            first_dense_layers=f.integer("first_k_dense_replace", low=0),
            n_group=f.integer("n_group", default=1),
            topk_group=f.integer("topk_group", default=1),
            norm_topk_prob=f.boolean("norm_topk_prob", True),
            routed_scaling_factor=f.number("routed_scaling_factor", 1e-6, 1e6),
            rms_norm_eps=f.number("rms_norm_eps", 0.0, 1.0),
            max_position=f.integer("max_position_embeddings"),
            rope=_rope_spec(f, rope_dim),
            eos_token_ids=_eos_ids(f),
            nextn_layers=f.integer("num_nextn_predict_layers", low=0, high=64, default=0),
            quant=_quant_spec(data, where),
        )
        _check_counts(spec, f)
        return spec


def _check_counts(spec: ModelSpec, f: _Fields) -> None:
    if spec.num_experts % spec.n_group:
        raise f.fail("n_group", f"it must divide n_routed_experts ({spec.num_experts})")
    if spec.topk_group > spec.n_group:
        raise f.fail("topk_group", f"at most n_group ({spec.n_group})")
    per_group = spec.num_experts // spec.n_group
    if spec.top_k > per_group * spec.topk_group:
        raise f.fail("num_experts_per_tok", f"the chosen groups hold {per_group * spec.topk_group} experts")
    if spec.n_group > 1 and per_group < 2:
        raise f.fail("n_group", "a group needs two experts: its score is the sum of its best two")
    if any(not 0 <= token < spec.vocab_size for token in spec.eos_token_ids):
        raise f.fail("eos_token_id", f"ids from 0 to {spec.vocab_size - 1} (vocab_size) are needed")
    if spec.quant is not None:
        for key, size in (("hidden_size", spec.hidden_size), ("moe_intermediate_size", spec.moe_intermediate_size)):
            if size % spec.quant.group_size:
                raise f.fail(key, f"the INT4 group size {spec.quant.group_size} must divide it")


def _rope_spec(f: _Fields, dim: int) -> RopeSpec:
    scaling = f.data.get("rope_parameters")
    if scaling is None:
        scaling = f.data.get("rope_scaling")
    if scaling is None:
        scaling = {}
    if not isinstance(scaling, Mapping):
        raise f.fail("rope_scaling", "an object or null is needed")
    r = _Fields({"rope_theta": f.data.get("rope_theta"), **scaling}, f"{f.where}: rope_scaling")
    theta = r.number("rope_theta", 1.001, 1e12)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return RopeSpec(dim=dim, theta=theta)
    if kind != "yarn":
        raise ConfigError(f"{f.where}: rope type is {kind!r}, known: default, yarn")
    if scaling.get("attention_factor") is not None:
        raise r.fail("attention_factor", "an explicit factor is not implemented, mscale and mscale_all_dim are")
    if scaling.get("truncate") is False:
        raise r.fail("truncate", "only a correction range in whole dimensions (true) is implemented")
    return RopeSpec(
        dim=dim,
        theta=theta,
        kind="yarn",
        factor=r.number("factor", 1.0, 1e6),
        original_max_position=r.integer("original_max_position_embeddings"),
        beta_fast=r.number("beta_fast", 1e-3, 1e6, default=32.0),
        beta_slow=r.number("beta_slow", 1e-3, 1e6, default=1.0),
        mscale=r.number("mscale", 0.0, 100.0, default=0.0),
        mscale_all_dim=r.number("mscale_all_dim", 0.0, 100.0, default=0.0),
    )


def _eos_ids(f: _Fields) -> tuple[int, ...]:
    value = f.data.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if len(ids) > 64 or any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
        raise f.fail("eos_token_id", "an id, or a list of at most 64 ids, is needed")
    return tuple(ids)


def _quant_spec(data: Mapping[str, Any], where: str) -> QuantSpec | None:
    raw = data.get("quantization_config", data.get("compression_config"))
    if raw is None:
        return None
    where = f"{where}: quantization_config"
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{where} is {type(raw).__name__}, an object is needed")
    q = _Fields(raw, where)
    q.choice("quant_method", ("compressed-tensors",))
    q.choice("format", ("pack-quantized",))
    for key in ("kv_cache_scheme", "transform_config", "sparsity_config"):
        if raw.get(key):
            raise q.fail(key, "only null is implemented")
    groups = raw.get("config_groups")
    if not isinstance(groups, Mapping) or len(groups) != 1:
        raise q.fail("config_groups", "exactly one group is implemented")
    group = next(iter(groups.values()))
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping):
        raise q.fail("config_groups", "its group needs an object `weights`")
    if group.get("input_activations") is not None or group.get("output_activations") is not None:
        raise q.fail("config_groups", "quantised activations are not implemented, only weights")
    if group.get("format") not in (None, "pack-quantized"):
        raise q.fail("config_groups", "its group's `format` must be pack-quantized, or absent")
    w = _Fields(weights, f"{where}: weights")
    w.integer("num_bits", 4, 4)
    w.choice("type", ("int",))
    w.choice("strategy", ("group",))
    if not w.boolean("symmetric", True):
        raise w.fail("symmetric", "only true is implemented")
    if weights.get("actorder") not in (None, False):
        raise w.fail("actorder", "only null is implemented")
    ignore = raw.get("ignore") or []
    if not isinstance(ignore, list) or not all(isinstance(entry, str) for entry in ignore):
        raise q.fail("ignore", "a list of names is needed")
    return QuantSpec(group_size=w.integer("group_size", 32, 32), ignore=tuple(ignore))


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How a model is run.

    Attributes:
        max_model_len: longest prompt plus answer, in tokens.
        max_batched_tokens: tokens of one step; longer prompts run in chunks.
        max_num_seqs: requests that run at once.
        block_size: tokens of one cache block.
        policy: order of waiting requests; see ``perilune.sched.queue``.
        prefix_cache: reuse the latents of prompts that begin alike.
        watermark: share of the blocks that stays free when a request is admitted beside others.
        depth: steps in flight; a plan is made before the results of ``depth - 1`` earlier ones are known.
        record_events: keep what the prefix cache stores and removes, to be published.
        row_invariant: each token's bits depend on its own inputs only (slow: the reference backend token by token).
        device: ``cpu`` or ``cuda``.
        dtype: of activations and cache; ``float64`` is the oracle's.
        attention: form of MLA: ``absorbed`` attends over latents, ``decompressed`` over keys and values made of them.
    """

    max_model_len: int
    max_batched_tokens: int = 512
    max_num_seqs: int = 16
    block_size: int = 32
    policy: SchedulingPolicy = "fcfs"
    prefix_cache: bool = True
    watermark: float = 0.01
    depth: int = 1
    row_invariant: bool = False
    record_events: bool = False
    device: Literal["cpu", "cuda"] = "cpu"
    dtype: Literal["bfloat16", "float32", "float64"] = "float32"
    attention: Literal["absorbed", "decompressed"] = "absorbed"
