"""Random checkpoints of K2's architecture, of any size and in each format: for tests and for trying things out.

The same seed gives the same weights in every format, up to the format's rounding, and the same bytes every time.
Weights are scaled so that activations keep their size and logits differ; gate and up projections differ in size, norms
are not 1, correction biases not 0: an implementation that mixes any of these up is noticed. The tokenizer is Kimi's
without merges: 256 single-byte ranks, and the special ids behind them in Kimi's order. A random model speaks noise.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Literal

import torch
from torch import Tensor

from perilune.checkpoint.write import write_checkpoint
from perilune.config import ModelSpec
from perilune.errors import ConfigError, UsageError
from perilune.layout.names import TensorInfo, expected_tensors
from perilune.quant.int4 import GROUP_SIZE, quantize
from perilune.text.tokenizer import KIMI_SPECIALS, NUM_SPECIALS

TinyFormat = Literal["bf16", "int4", "float32"]

SHARD_BYTES: Final = 1 << 30
NUM_RANKS: Final = 256

_PLAIN_SPECIALS: Final = frozenset((11, 12, 13, 14, 15, 22, 23))
"""Those that the Hugging Face flag ``special`` does not mark: they stay in text when special tokens are skipped."""


def tiny_config(**overrides: Any) -> dict[str, Any]:
    """A config.json of K2's form and a toy's size. ``overrides`` replace fields of any name."""
    config: dict[str, Any] = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "kimi_k2",
        "vocab_size": NUM_RANKS + NUM_SPECIALS,
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "routed_scaling_factor": 2.827,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 262144,
        "rope_theta": 50000.0,
        "rope_scaling": {
            "type": "yarn",
            "factor": 64.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 1.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        "num_nextn_predict_layers": 0,
        "tie_word_embeddings": False,
        "bos_token_id": NUM_RANKS,
        "eos_token_id": NUM_RANKS + 2,
        "pad_token_id": NUM_RANKS + 255,
    }
    if "num_attention_heads" in overrides:
        config["num_key_value_heads"] = overrides["num_attention_heads"]
    return config | overrides


def int4_config() -> dict[str, Any]:
    """The ``quantization_config`` of Kimi K2 Thinking: routed experts in INT4, groups of 32, all else plain."""
    weights = {
        "num_bits": 4,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": GROUP_SIZE,
        "dynamic": False,
        "actorder": None,
        "block_structure": None,
        "observer": "minmax",
        "observer_kwargs": {},
    }
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "config_groups": {"group_0": group},
        "ignore": [
            "lm_head",
            "re:.*self_attn.*",
            "re:.*shared_experts.*",
            r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
        ],
    }


def write_tiny(
    out: Path,
    config: dict[str, Any] | None = None,
    fmt: TinyFormat = "bf16",
    seed: int = 0,
    tokenizer: Path | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> ModelSpec:
    """Writes a random checkpoint with a tokenizer; returns what its config.json says.

    Args:
        out: a folder without a checkpoint; made if it is not there.
        config: as ``tiny_config`` gives it (the default); the format's own fields are added here.
        fmt: ``bf16`` and ``float32`` store all matrices so; ``int4`` packs routed experts, the rest is bf16.
        tokenizer: a folder whose tokenizer files are copied; without it a byte-level one is written.

    Raises:
        ConfigError: the configuration is unusable, or its vocabulary too small for the tokenizer.
        UsageError: ``out`` already holds a checkpoint.
    """
    if fmt not in ("bf16", "int4", "float32"):
        raise UsageError(f"format is `{fmt}`, known: bf16, int4, float32")
    config = dict(tiny_config() if config is None else config)
    config["torch_dtype"] = "float32" if fmt == "float32" else "bfloat16"
    config.pop("quantization_config", None)
    if fmt == "int4":
        config["quantization_config"] = int4_config()
    spec = ModelSpec.from_config(config, where="tiny config")
    files = _byte_tokenizer() if tokenizer is None else _copied_tokenizer(tokenizer)
    needed = files["tiktoken.model"].count(b"\n") + NUM_SPECIALS
    if spec.vocab_size < needed:
        raise ConfigError(f"vocab_size is {spec.vocab_size}, the tokenizer needs {needed}")
    write_checkpoint(out, config, _tensors(spec, fmt, seed), shard_bytes)
    for name, content in files.items():
        (out / name).write_bytes(content)
    return spec


def _tensors(spec: ModelSpec, fmt: TinyFormat, seed: int) -> Iterator[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.float32 if fmt == "float32" else torch.bfloat16
    for info in expected_tensors(spec):
        weight = _random(info, generator)
        if fmt == "int4" and info.kind == "expert":
            packed, scale = quantize(weight)
            yield f"{info.name}_packed", packed
            yield f"{info.name}_scale", scale
            yield f"{info.name}_shape", torch.tensor(info.shape, dtype=torch.int32)
        else:
            # Kimi's code keeps the correction bias wide; rounding it would move experts that are nearly tied.
            yield info.name, weight if info.kind == "router_bias" else weight.to(dtype)


def _random(info: TensorInfo, generator: torch.Generator) -> Tensor:
    """float32 values of a size that suits the tensor's place."""
    noise = torch.randn(info.shape, generator=generator)
    if info.kind == "norm":
        return 1 + 0.1 * noise
    if info.kind == "router_bias":
        return 0.1 * noise
    if info.kind == "embedding":
        return noise
    gain = 1.5 if info.name.endswith("gate_proj.weight") else 0.75 if info.name.endswith("up_proj.weight") else 1.0
    return noise.mul_(gain / math.sqrt(info.shape[1]))


def _copied_tokenizer(source: Path) -> dict[str, bytes]:
    files = {}
    for name in ("tiktoken.model", "tokenizer_config.json"):
        if not (source / name).is_file():
            raise ConfigError(f"`{source / name}` is missing", hint="name a folder with Kimi's tokenizer files")
        files[name] = (source / name).read_bytes()
    return files


def _byte_tokenizer() -> dict[str, bytes]:
    ranks = [f"{base64.b64encode(bytes([byte])).decode()} {rank}\n" for rank, byte in enumerate(_byte_order())]
    added = {
        str(NUM_RANKS + offset): {
            "content": content,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": offset not in _PLAIN_SPECIALS,
        }
        for offset, content in KIMI_SPECIALS.items()
    }
    settings = {
        "added_tokens_decoder": added,
        "bos_token": "[BOS]",
        "eos_token": "<|im_end|>",
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "tokenizer_class": "TikTokenTokenizer",
    }
    return {"tiktoken.model": "".join(ranks).encode(), "tokenizer_config.json": json.dumps(settings, indent=2).encode()}


def _byte_order() -> list[int]:
    """GPT-2's order of bytes: those with a visible Latin-1 character first."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return visible + [byte for byte in range(256) if byte not in visible]
