"""Random checkpoints: the same bytes every time, and models that transformers loads."""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from perilune.checkpoint.load import Checkpoint
from perilune.checkpoint.match import Packed
from perilune.checkpoint.tiny import TinyFormat, tiny_config, write_tiny
from perilune.errors import ConfigError, UsageError
from perilune.layout.names import expected_tensors
from perilune.quant.tensors import Int4


def digest(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize("fmt", ["bf16", "int4", "float32"])
def test_same_seed_same_bytes(tmp_path: Path, fmt: TinyFormat) -> None:
    spec = write_tiny(tmp_path / "a", fmt=fmt, seed=7, shard_bytes=150_000)
    assert write_tiny(tmp_path / "b", fmt=fmt, seed=7, shard_bytes=150_000) == spec
    write_tiny(tmp_path / "c", fmt=fmt, seed=8, shard_bytes=150_000)
    a, b, c = (digest(tmp_path / name) for name in "abc")
    assert a == b
    assert a.keys() == c.keys()
    assert all((a[name] != c[name]) == name.startswith("model-0") for name in a)
    assert Checkpoint.open(tmp_path / "a").spec == spec


def test_formats_hold_the_same_weights_up_to_rounding(tmp_path: Path) -> None:
    sources = {}
    for fmt in ("float32", "bf16", "int4"):
        write_tiny(tmp_path / fmt, fmt=fmt)
        sources[fmt] = Checkpoint.open(tmp_path / fmt).source(torch.float32)
    spec = Checkpoint.open(tmp_path / "bf16").spec
    for info in expected_tensors(spec):
        if len(info.shape) == 1:
            wide, *others = (source.vector(info.name) for source in sources.values())
        else:
            wide, *others = (source.matrix(info.name).dequantize(torch.float32) for source in sources.values())
        for fmt, other in zip(("bf16", "int4"), others, strict=True):
            limit = 0.15 if fmt == "int4" and info.kind == "expert" else 2.0**-8
            assert (other - wide).norm() <= limit * wide.norm(), info.name
    for source in sources.values():
        source.finish()


def test_int4_packs_exactly_the_routed_experts(tmp_path: Path) -> None:
    write_tiny(tmp_path, fmt="int4")
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.notes == ()  # the ignore list of its quantization_config agrees
    for stored in checkpoint.weights.values():
        assert isinstance(stored, Packed) == (stored.info.kind == "expert")


def test_values_tell_mistakes_apart(tmp_path: Path) -> None:
    """Gate and up differ in size, norms are not 1, correction biases are float32 and not 0, codes use 15 levels."""
    write_tiny(tmp_path, fmt="int4")
    source = Checkpoint.open(tmp_path).source(torch.float32)
    mlp = "model.layers.1.mlp."
    gate, up = (source.matrix(f"{mlp}experts.3.{part}_proj.weight") for part in ("gate", "up"))
    assert isinstance(gate, Int4)
    assert gate.dequantize(torch.float32).norm() > 1.5 * up.dequantize(torch.float32).norm()
    bias = source.vector(f"{mlp}gate.e_score_correction_bias")
    assert bias.dtype == torch.float32
    assert 0.03 < bias.std() < 0.3
    norm = source.vector("model.norm.weight")
    assert 0.05 < norm.std() < 0.2
    assert abs(norm.mean() - 1) < 0.1
    source.close()


def test_config_can_be_overridden() -> None:
    config = tiny_config(num_attention_heads=8, n_routed_experts=6, extra="kept")
    assert (config["num_key_value_heads"], config["n_routed_experts"], config["extra"]) == (8, 6, "kept")
    assert tiny_config()["eos_token_id"] == 258
    assert tiny_config()["rope_scaling"]["factor"] == 64.0


def test_tokenizer_is_kimis_without_merges(tmp_path: Path, kimi_tokenizer_dir: Path) -> None:
    write_tiny(tmp_path)
    lines = (tmp_path / "tiktoken.model").read_text().splitlines()
    ranks = {base64.b64decode(line.split()[0]): int(line.split()[1]) for line in lines}
    assert sorted(ranks) == [bytes([byte]) for byte in range(256)]
    real = (kimi_tokenizer_dir / "tiktoken.model").read_text().splitlines()[:256]
    assert lines == real  # Kimi's first 256 ranks are the bytes in the same order

    def by_offset(folder: Path, ranks: int) -> dict[int, Any]:
        added = json.loads((folder / "tokenizer_config.json").read_text())["added_tokens_decoder"]
        return {int(token) - ranks: value for token, value in added.items()}

    assert by_offset(tmp_path, 256) == by_offset(kimi_tokenizer_dir, 163_584)


def test_tokenizer_can_be_copied(tmp_path: Path, kimi_tokenizer_dir: Path) -> None:
    write_tiny(tmp_path, tiny_config(vocab_size=163840, eos_token_id=163586), tokenizer=kimi_tokenizer_dir)
    assert (tmp_path / "tiktoken.model").read_bytes() == (kimi_tokenizer_dir / "tiktoken.model").read_bytes()


def test_refusals_come_before_anything_is_written(tmp_path: Path, kimi_tokenizer_dir: Path) -> None:
    with pytest.raises(UsageError, match="format is `int8`, known: bf16, int4, float32"):
        write_tiny(tmp_path, fmt="int8")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="vocab_size is 400, the tokenizer needs 512"):
        write_tiny(tmp_path, tiny_config(vocab_size=400))
    with pytest.raises(ConfigError, match="vocab_size is 512, the tokenizer needs 163840"):
        write_tiny(tmp_path, tokenizer=kimi_tokenizer_dir)
    with pytest.raises(ConfigError, match="group size 32 must divide it"):
        write_tiny(tmp_path, tiny_config(moe_intermediate_size=48), fmt="int4")
    with pytest.raises(ConfigError, match=r"tiktoken.model.* is missing"):
        write_tiny(tmp_path, tokenizer=tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("fmt", ["bf16", "float32"])
def test_transformers_loads_it(tmp_path: Path, fmt: TinyFormat) -> None:
    """Every weight arrives, none is left over, and the logits of a random model differ between tokens."""
    transformers = pytest.importorskip("transformers")
    write_tiny(tmp_path, tiny_config(model_type="deepseek_v3"), fmt=fmt, shard_bytes=100_000)
    model, info = transformers.DeepseekV3ForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, local_files_only=True, output_loading_info=True
    )
    assert not any(info.values()), info
    source = Checkpoint.open(tmp_path).source(torch.float32)
    theirs = model.state_dict()
    assert torch.equal(theirs["lm_head.weight"], source.matrix("lm_head.weight").dequantize(torch.float32))
    down = source.matrix("model.layers.2.mlp.experts.5.down_proj.weight").dequantize(torch.float32)
    assert torch.equal(theirs["model.layers.2.mlp.experts.down_proj"][5], down)
    source.close()
    with torch.no_grad():
        logits = model(torch.arange(40).unsqueeze(0)).logits[0]
    assert logits.std(0).min() > 0.2
    assert 0.2 < logits.std(1).mean() < 5
