"""Reports from headers alone, up to the size of Kimi K2 Thinking itself."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from perilune.checkpoint.header import DTYPE_BYTES
from perilune.checkpoint.index import INDEX_NAME
from perilune.checkpoint.inspect import inspect_model
from perilune.checkpoint.load import Checkpoint
from perilune.checkpoint.tiny import TinyFormat, int4_config, tiny_config, write_tiny
from perilune.checkpoint.write import write_checkpoint
from perilune.cli.inspect import inspect
from perilune.config import ModelSpec
from perilune.errors import CheckpointError, ConfigError
from perilune.layout.names import expected_tensors

K2 = tiny_config(
    vocab_size=163840, hidden_size=7168, num_hidden_layers=61, num_attention_heads=64, q_lora_rank=1536,
    kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, intermediate_size=18432,
    moe_intermediate_size=2048, n_routed_experts=384, num_experts_per_tok=8, bos_token_id=163584,
    eos_token_id=163586, pad_token_id=163839, quantization_config=int4_config(),
)  # fmt: skip

Stored = tuple[str, str, tuple[int, ...]]


def k2_tensors() -> list[Stored]:
    """Names, types and shapes of the published checkpoint's 208,215 tensors."""
    tensors: list[Stored] = []
    for info in expected_tensors(ModelSpec.from_config(K2)):
        if info.kind == "expert":
            out, width = info.shape
            tensors.append((f"{info.name}_packed", "I32", (out, width // 8)))
            tensors.append((f"{info.name}_scale", "BF16", (out, width // 32)))
            tensors.append((f"{info.name}_shape", "I32", (2,)))
        else:
            tensors.append((info.name, "BF16", info.shape))
    return tensors


def write_sparse(root: Path, tensors: list[Stored], shards: int) -> None:
    """Shards with true headers and holes for data: 594 GB that occupy 30 MB."""
    weight_map = {}
    per_shard = -(-len(tensors) // shards)
    for number in range(shards):
        name = f"model-{number + 1:05d}-of-{shards:06d}.safetensors"
        header, at = {}, 0
        for tensor, dtype, shape in tensors[number * per_shard : (number + 1) * per_shard]:
            end = at + math.prod(shape) * DTYPE_BYTES[dtype]
            header[tensor] = {"dtype": dtype, "shape": shape, "data_offsets": [at, end]}
            weight_map[tensor] = name
            at = end
        raw = json.dumps(header).encode()
        (root / name).write_bytes(len(raw).to_bytes(8, "little") + raw)
        os.truncate(root / name, 8 + len(raw) + at)
    (root / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (root / "config.json").write_text(json.dumps(K2))


def test_kimi_k2_thinking(tmp_path: Path) -> None:
    write_sparse(tmp_path, k2_tensors(), shards=62)
    start = time.process_time()
    report = inspect_model(tmp_path)
    seconds = time.process_time() - start
    assert report.loadable
    assert (report.tensors, report.shards, report.format) == (208_215, 62, "int4")
    assert report.parameters == 1_026_408_232_448
    idle = 60 * (384 - 8) * 3 * 2048 * 7168
    assert report.active_parameters == 1_026_408_232_448 - 163840 * 7168 - idle
    assert round(report.active_parameters / 1e9, 1) == 31.7
    # 594.206 GB, of which the shape hints are 69,120 pairs of int32.
    assert round(report.tensor_bytes / 1e9, 3) == 594.206
    assert report.bytes_by_kind["expert"] == 69_120 * (2048 * 7168 // 32 * 18 + 8)
    assert report.kv_token_bytes == 70_272
    assert sum(report.bytes_by_kind.values()) == report.tensor_bytes
    experts = 60 * 8 * 3 * 2048 * 7168 // 32 * 18
    rest = report.tensor_bytes - report.bytes_by_kind["expert"] - report.bytes_by_kind["embedding"]
    assert report.token_read_bytes == experts + rest + 7168 * 2
    assert (report.missing, report.wrong, report.unknown, report.ignored, report.notes) == ((), (), (), (), ())
    assert seconds < 30  # about 4 on a core of its own


@pytest.mark.parametrize("fmt", ["bf16", "int4", "float32"])
def test_facts_agree_with_the_tensors(tmp_path: Path, fmt: TinyFormat) -> None:
    spec = write_tiny(tmp_path, tiny_config(n_routed_experts=6, num_experts_per_tok=2), fmt=fmt, shard_bytes=100_000)
    report = inspect_model(tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    source = checkpoint.source(torch.float32)
    held, read = 0, 0.0
    for info in expected_tensors(spec):
        vector = len(info.shape) == 1
        count = (source.vector(info.name) if vector else source.matrix(info.name).dequantize(torch.float32)).numel()
        held += count
        if info.kind == "expert":
            read += count * 2 / 6
        elif info.kind != "embedding":
            read += count
    assert report.parameters == held
    assert report.active_parameters == round(read)
    assert report.format == fmt
    assert report.tensor_bytes == sum(meta.nbytes for meta in checkpoint.tensors.values())
    assert report.kv_token_bytes == 2 * (32 + 16) * 3
    if fmt == "float32":
        assert report.token_read_bytes == 4 * (report.active_parameters + spec.hidden_size)


def damaged(tmp_path: Path) -> Path:
    """One weight missing, one of a wrong shape, one unknown."""
    safetensors = pytest.importorskip("safetensors.torch")
    write_tiny(tmp_path / "good")
    config = json.loads((tmp_path / "good" / "config.json").read_text())
    tensors = safetensors.load_file(tmp_path / "good" / "model-00001-of-00001.safetensors")
    del tensors["model.norm.weight"]
    tensors["lm_head.weight"] = torch.zeros(3, 64)
    tensors["stranger"] = torch.zeros(1)
    write_checkpoint(tmp_path / "bad", config, tensors.items(), shard_bytes=1 << 30)
    return tmp_path / "bad"


def test_faults_are_reported_not_raised(tmp_path: Path) -> None:
    report = inspect_model(damaged(tmp_path))
    assert not report.loadable
    assert report.missing == ("model.norm.weight",)
    assert report.unknown == ("stranger",)
    assert len(report.wrong) == 1
    assert "`lm_head.weight` in `model-00001-of-00001.safetensors` has shape [3, 64]" in report.wrong[0]
    assert report.parameters > 200_000  # what can be used is counted


def test_the_report_is_json(tmp_path: Path) -> None:
    write_tiny(tmp_path)
    value = json.loads(json.dumps(inspect_model(tmp_path).to_json()))
    assert value["loadable"] is True
    assert value["format"] == "bf16"
    assert value["missing"] == []
    assert value["bytes_by_kind"]["head"] == 512 * 64 * 2


def test_broken_files_are_raised(tmp_path: Path) -> None:
    write_tiny(tmp_path)
    os.truncate(tmp_path / "model-00001-of-00001.safetensors", 100)
    with pytest.raises(CheckpointError, match=r"model-00001-of-00001.safetensors` announces a header"):
        inspect_model(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="holds a JSON list"):
        inspect_model(tmp_path)


def test_command_prints_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_tiny(tmp_path / "[red]model", fmt="int4")
    inspect(tmp_path / "[red]model", as_json=False)
    out = "".join(capsys.readouterr().out.split())  # the width of the terminal is not ours to choose
    assert "[red]model" in out
    assert "int4experts,187tensorsin1file" in out
    assert "cachepertoken288inbf16" in out


def test_command_prints_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_tiny(tmp_path)
    inspect(tmp_path, as_json=True)
    assert json.loads(capsys.readouterr().out) == inspect_model(tmp_path).to_json()


@pytest.mark.parametrize("as_json", [False, True])
def test_command_fails_after_its_report(tmp_path: Path, capsys: pytest.CaptureFixture[str], as_json: bool) -> None:
    with pytest.raises(CheckpointError, match="3 tensors prevent loading") as caught:
        inspect(damaged(tmp_path), as_json=as_json)
    assert caught.value.exit_code == 3
    out = capsys.readouterr().out
    assert "model.norm.weight" in out
    assert "stranger" in out


def test_inspecting_needs_no_torch(tmp_path: Path) -> None:
    write_tiny(tmp_path)
    code = (
        "import pathlib, sys\n"
        "from perilune.cli.inspect import inspect\n"
        f"inspect(pathlib.Path({str(tmp_path)!r}), True)\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["loadable"]
