"""From folder to tensors: equal to what was written, whatever the dtype; hostile folders are errors with names."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from perilune.checkpoint.index import INDEX_NAME
from perilune.checkpoint.load import Checkpoint, TensorSource
from perilune.checkpoint.tiny import TinyFormat, int4_config, tiny_config, write_tiny
from perilune.checkpoint.write import write_checkpoint
from perilune.config import ModelSpec
from perilune.errors import CheckpointError, ConfigError, ModelError
from perilune.layout.names import expected_tensors
from perilune.quant.int4 import quantize
from perilune.quant.tensors import Dense, Int4

NORM = "model.norm.weight"
HEAD = "lm_head.weight"
EXPERT = "model.layers.1.mlp.experts.3.down_proj.weight"
ROUTER = "model.layers.1.mlp.gate.weight"
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def take_all(checkpoint: Checkpoint, source: TensorSource) -> dict[str, Tensor]:
    taken = {}
    for info in expected_tensors(checkpoint.spec):
        vector = len(info.shape) == 1
        taken[info.name] = source.vector(info.name) if vector else source.matrix(info.name).dequantize(torch.float64)
    return taken


def reference_tensors(folder: Path) -> dict[str, Tensor]:
    """What the reference library reads."""
    safetensors = pytest.importorskip("safetensors.torch")
    tensors: dict[str, Tensor] = {}
    for path in folder.glob("*.safetensors"):
        tensors |= safetensors.load_file(path)
    return tensors


def rewrite(folder: Path, change: Callable[[dict[str, Tensor], dict[str, Any]], object]) -> Path:
    """A copy of a checkpoint with its tensors and configuration changed."""
    tensors, config = reference_tensors(folder), json.loads((folder / "config.json").read_text())
    change(tensors, config)
    out = folder.parent / f"{folder.name}-changed"
    write_checkpoint(out, config, tensors.items(), shard_bytes=100_000)
    return out


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[TinyFormat], Path]:
    """Read-only checkpoints, one for each format, in several shards."""
    root = tmp_path_factory.mktemp("tiny")

    def get(fmt: TinyFormat) -> Path:
        if not (root / fmt).exists():
            write_tiny(root / fmt, fmt=fmt, shard_bytes=100_000)
        return root / fmt

    return get


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An INT4 checkpoint to break."""
    write_tiny(tmp_path / "m", fmt="int4", shard_bytes=100_000)
    return tmp_path / "m"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, bytes]]:
    """A checkpoint of 41 tensors in three shards, and the bytes of its files."""
    folder = tmp_path_factory.mktemp("small")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "n_routed_experts": 4}
    write_tiny(folder, tiny_config(**sizes), fmt="int4", shard_bytes=40_000)
    return folder, {path.name: path.read_bytes() for path in folder.iterdir() if "token" not in path.name}


Written = Callable[[TinyFormat], Path]


@pytest.mark.parametrize("fmt", ["bf16", "int4", "float32"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_weights_are_those_that_were_written(written: Written, fmt: TinyFormat, dtype: torch.dtype) -> None:
    checkpoint = Checkpoint.open(written(fmt))
    source = checkpoint.source(dtype, "cpu")
    theirs = reference_tensors(checkpoint.path)
    for info in expected_tensors(checkpoint.spec):
        name = info.name
        if info.kind in ("router", "router_bias"):
            got, wide = source.vector(name), torch.float64 if dtype == torch.float64 else torch.float32
            assert got.dtype == wide
            assert torch.equal(got, theirs[name].to(wide))
        elif len(info.shape) == 1:
            assert torch.equal(source.vector(name), theirs[name].to(dtype))
        elif fmt == "int4" and info.kind == "expert":
            weight = source.matrix(name)
            assert isinstance(weight, Int4)
            assert torch.equal(weight.packed, theirs[f"{name}_packed"])
            assert torch.equal(weight.scale, theirs[f"{name}_scale"])
        else:
            weight = source.matrix(name)
            assert isinstance(weight, Dense)
            assert weight.weight.dtype == dtype
            assert torch.equal(weight.weight, theirs[name].to(dtype))
    source.finish()


def test_two_loads_give_the_same(written: Written) -> None:
    """cases/engine 11: nothing is transformed twice."""
    checkpoint = Checkpoint.open(written("int4"))
    first, second = (take_all(checkpoint, checkpoint.source(torch.float32)) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_tensors_outlive_the_files(tmp_path: Path) -> None:
    write_tiny(tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    with checkpoint.source(torch.bfloat16) as source:
        weight = source.matrix(HEAD).dequantize(torch.bfloat16)
        before = weight.clone()
    for path in tmp_path.glob("*.safetensors"):
        os.truncate(path, 0)
    assert torch.equal(weight, before)
    weight.zero_()  # memory of its own


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.skipif(sys.platform != "linux", reason="counts open files in /proc")
def test_a_shard_is_open_from_its_first_tensor_to_its_last(written: Written) -> None:
    checkpoint = Checkpoint.open(written("int4"))
    shards = len({meta.file for meta in checkpoint.tensors.values()})
    assert shards >= 4
    before, most = open_files(), 0
    source = checkpoint.source(torch.float32)
    for info in expected_tensors(checkpoint.spec):
        assert source.vector(info.name) is not None if len(info.shape) == 1 else source.matrix(info.name)
        most = max(most, open_files() - before)
    assert most < shards
    assert open_files() == before
    source.finish()


def test_progress_counts_bytes_to_the_end(written: Written) -> None:
    checkpoint = Checkpoint.open(written("int4"))
    calls: list[tuple[int, int]] = []
    take_all(checkpoint, checkpoint.source(torch.float32, "cpu", lambda done, total: calls.append((done, total))))
    total = sum(meta.nbytes for meta in checkpoint.tensors.values())
    assert [done for done, _ in calls] == sorted({done for done, _ in calls})
    assert calls[-1] == (total, total)
    assert len(calls) == len(checkpoint.weights)


def test_each_weight_once_and_all_of_them(written: Written) -> None:
    source = Checkpoint.open(written("int4")).source(torch.float32)
    source.vector(NORM)
    with pytest.raises(CheckpointError, match=f"`{NORM}` was taken before"):
        source.vector(NORM)
    with pytest.raises(CheckpointError, match="has no weight `x`"):
        source.matrix("x")
    with pytest.raises(CheckpointError, match=f"`{EXPERT}` is packed INT4, a plain tensor is needed"):
        source.vector(EXPERT)
    with pytest.raises(CheckpointError, match=r"`model.embed_tokens.weight` was not loaded \(\d+ in all\)"):
        source.finish()


def test_unaligned_data_of_other_writers(tmp_path: Path, written: Written) -> None:
    """The format does not demand alignment: a header of odd length shifts everything."""
    config = json.loads((written("float32") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = reference_tensors(written("float32"))
    header, data = {}, b""
    for name, tensor in tensors.items():
        raw = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (1 + len(text) % 2)
    assert (8 + len(text)) % 2 == 1
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    checkpoint = Checkpoint.open(tmp_path)
    taken = take_all(checkpoint, checkpoint.source(torch.float32))
    assert all(torch.equal(taken[name].float(), tensors[name]) for name in tensors)


def test_int4_outside_the_experts_is_loaded_as_well(folder: Path) -> None:
    def pack_head(tensors: dict[str, Tensor], _: dict[str, Any]) -> None:
        tensors[f"{HEAD}_packed"], tensors[f"{HEAD}_scale"] = quantize(tensors.pop(HEAD))

    checkpoint = Checkpoint.open(rewrite(folder, pack_head))
    assert isinstance(checkpoint.source(torch.float32).matrix(HEAD), Int4)
    assert any("lack weight_shape" in note for note in checkpoint.notes)
    assert any("covers 1 weights that are packed" in note for note in checkpoint.notes)


@pytest.mark.parametrize("garbage", [torch.tensor([-(1 << 31), 1 << 30], dtype=torch.int32), torch.ones(3, 2)])
def test_garbage_in_weight_shape_changes_nothing(
    folder: Path, garbage: Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    out = rewrite(folder, lambda tensors, _: tensors.update({f"{EXPERT}_shape": garbage}))
    with caplog.at_level(logging.WARNING):
        checkpoint = Checkpoint.open(out)
        source = checkpoint.source(torch.float32)
        taken = take_all(checkpoint, source)
        source.finish()
    good = Checkpoint.open(folder)
    assert torch.equal(taken[EXPERT], take_all(good, good.source(torch.float32))[EXPERT])
    assert [r.getMessage() for r in caplog.records if "1 weight_shape hints disagree" in r.getMessage()]
    assert f"`{EXPERT}_shape` is" in caplog.text


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", [HEAD, NORM, BIAS, f"{EXPERT}_scale"])
def test_nan_and_infinity_are_errors(folder: Path, name: str, value: float) -> None:
    out = rewrite(folder, lambda tensors, _: tensors[name].view(-1)[5:6].fill_(value))
    checkpoint = Checkpoint.open(out)
    with pytest.raises(CheckpointError, match=f"`{name}` holds NaN or infinity"):
        take_all(checkpoint, checkpoint.source(torch.bfloat16))


@pytest.mark.parametrize(("name", "factor"), [(HEAD, 20_000), (HEAD, 1e-6), (f"{EXPERT}_scale", 20_000)])
def test_absurd_sizes_are_warned_of(folder: Path, name: str, factor: float, caplog: pytest.LogCaptureFixture) -> None:
    """cases/engine 47: FP8 bytes read as integers were 20,000 times too large."""
    out = rewrite(folder, lambda tensors, _: tensors[name].mul_(factor))
    with caplog.at_level(logging.WARNING):
        checkpoint = Checkpoint.open(out)
        take_all(checkpoint, checkpoint.source(torch.float32))
    assert [record.getMessage().split()[0] for record in caplog.records] == [name]


def test_usual_weights_are_not_warned_of(written: Written, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for fmt in ("bf16", "int4", "float32"):
            checkpoint = Checkpoint.open(written(fmt))
            source = checkpoint.source(torch.bfloat16)
            take_all(checkpoint, source)
            source.finish()
    assert caplog.records == []


def drop(name: str) -> Callable[[dict[str, Tensor], dict[str, Any]], object]:
    return lambda tensors, _: tensors.pop(name)


def put(name: str, tensor: Tensor) -> Callable[[dict[str, Tensor], dict[str, Any]], object]:
    return lambda tensors, _: tensors.update({name: tensor})


def configure(**fields: Any) -> Callable[[dict[str, Tensor], dict[str, Any]], object]:
    return lambda _, config: config.update(fields)


STRANGER = "model.layers.1.mlp.gate.bias"
FP8_BYTES = torch.zeros(512, 64, dtype=torch.uint8)

CHANGES: list[tuple[str, Callable[[dict[str, Tensor], dict[str, Any]], object], str]] = [
    ("missing norm", drop(NORM), rf"weight `{NORM}` is missing \(1 missing in all\)"),
    ("missing expert", drop(f"{EXPERT}_packed"), rf"weight `{EXPERT}` is missing"),
    ("missing scale", drop(f"{EXPERT}_scale"), rf"`{EXPERT}_packed` has no `{EXPERT}_scale` beside it"),
    ("unknown", put(STRANGER, torch.zeros(8)), f"tensor `{STRANGER}` is not part of the model"),
    ("layer too many", configure(num_hidden_layers=2), r"tensor `model.layers.2.\S+` is not part"),
    ("layer too few", configure(num_hidden_layers=4), r"weight `model.layers.3.\S+` is missing"),
    ("shape", put(NORM, torch.ones(65)), rf"`{NORM}` in `model-\S+` has shape \[65\], config.json implies \[64\]"),
    ("vocabulary", configure(vocab_size=1024), r"has shape \[512, 64\], config.json implies \[1024, 64\]"),
    ("FP8 bytes", put(HEAD, FP8_BYTES), rf"`{HEAD}` in \S+ is U8, usable here"),
    ("no quantization_config", configure(quantization_config=None), "is packed INT4, but config.json has no quant"),
]


@pytest.mark.parametrize(("change", "message"), [row[1:] for row in CHANGES], ids=[row[0] for row in CHANGES])
def test_checkpoints_that_contradict_their_configuration(
    folder: Path, change: Callable[[dict[str, Tensor], dict[str, Any]], object], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        Checkpoint.open(rewrite(folder, change))
    assert "perilune inspect" in caught.value.hint


def test_quantization_config_over_plain_experts_loads_what_is_there(tmp_path: Path, written: Written) -> None:
    plain = written("bf16")
    config = json.loads((plain / "config.json").read_text()) | {"quantization_config": int4_config()}
    write_checkpoint(tmp_path / "m", config, reference_tensors(plain).items(), shard_bytes=1 << 30)
    checkpoint = Checkpoint.open(tmp_path / "m")
    assert "no tensor is packed" in checkpoint.notes[0]
    assert isinstance(checkpoint.source(torch.float32).matrix(EXPERT), Dense)


def test_nothing_of_the_folder_is_run_or_unpickled(folder: Path) -> None:
    """auto_map, module files and pickles lie there; none of them is touched."""
    marker = folder / "ran"
    code = f"open({str(marker)!r}, 'w').close()\n"
    for name in (
        "modeling_deepseek.py",
        "configuration_deepseek.py",
        "tokenization_kimi.py",
        "__init__.py",
        "conftest.py",
    ):
        (folder / name).write_text(code)
    os.mkfifo(folder / "pytorch_model.bin")  # opening it would wait for ever
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "configuration_deepseek.C", "AutoModelForCausalLM": "modeling_deepseek.M"}
    (folder / "config.json").write_text(json.dumps(config))
    modules = set(sys.modules)
    checkpoint = Checkpoint.open(folder)
    take_all(checkpoint, checkpoint.source(torch.float32))
    assert not marker.exists()
    assert not {name for name in set(sys.modules) - modules if "deepseek" in name or "kimi" in name}
    assert "first `pytorch_model.bin`" in checkpoint.notes[0]


def test_config_may_not_be_a_link_out_of_the_folder(folder: Path) -> None:
    (folder / "config.json").rename(folder.parent / "elsewhere.json")
    (folder / "config.json").symlink_to("../elsewhere.json")
    with pytest.raises(CheckpointError, match=r"`config.json` links to .* outside"):
        Checkpoint.open(folder)


def test_folder_without_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"`config.json` is missing"):
        Checkpoint.open(folder)


def first_shard(folder: Path) -> Path:
    return min(folder.glob("model-*.safetensors"))


@pytest.mark.parametrize("damage", ["cut by a byte", "cut in half", "emptied", "touched", "replaced", "removed"])
def test_files_that_change_after_the_check(folder: Path, damage: str) -> None:
    checkpoint = Checkpoint.open(folder)
    path, size = first_shard(folder), first_shard(folder).stat().st_size
    later = time.time_ns() + 10**9
    with checkpoint.source(torch.float32) as source:
        if damage == "touched":
            source.matrix("model.embed_tokens.weight")  # the file is open
            os.utime(path, ns=(later, later))
        elif damage == "replaced":
            path.write_bytes(path.read_bytes()[:-1] + b"?")
            os.utime(path, ns=(later, later))
        elif damage == "removed":
            path.unlink()
        else:
            os.truncate(path, {"cut by a byte": size - 1, "cut in half": size // 2, "emptied": 0}[damage])
        what = "cannot be read" if damage == "removed" else "changed after its header was checked"
        with pytest.raises(CheckpointError, match=f"{path.name}` {what}"):
            source.vector("model.layers.0.input_layernorm.weight")


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_damaged_folders_load_or_are_refused(small: tuple[Path, dict[str, bytes]], data: st.DataObject) -> None:
    """Bytes flipped, cut or doubled in any file: weights of the right shapes, or an error of ours; never another."""
    folder, good = small
    for file, original in good.items():
        (folder / file).write_bytes(original)
    name = data.draw(st.sampled_from(sorted(good)))
    content = bytearray(good[name])
    at = data.draw(st.integers(0, min(len(content), 6000) - 1))
    match data.draw(st.sampled_from(["flip", "cut", "double", "digit"])):
        case "flip":
            content[at] ^= data.draw(st.integers(1, 255))
        case "cut":
            del content[at : at + data.draw(st.integers(1, 50))]
        case "double":
            content[at:at] = content[at : at + 40]
        case _:
            content[at] = data.draw(st.sampled_from(b'0123456789-{}[]",'))
    (folder / name).write_bytes(content)
    try:
        checkpoint = Checkpoint.open(folder)
        with checkpoint.source(torch.float32) as source:
            taken = take_all(checkpoint, source)
    except ModelError:
        return
    assert {n: tuple(t.shape) for n, t in taken.items()} == {i.name: i.shape for i in expected_tensors(checkpoint.spec)}


def test_sparse_file_of_five_terabytes(folder: Path) -> None:
    os.truncate(first_shard(folder), 5 << 40)
    start = time.perf_counter()
    with pytest.raises(CheckpointError, match=rf"{first_shard(folder).name}` has 5497558138880 bytes"):
        Checkpoint.open(folder)
    assert time.perf_counter() - start < 5


def test_index_and_shard_names_are_free(folder: Path) -> None:
    """Kimi numbers its shards with five and then six digits; any name will do."""
    index = json.loads((folder / INDEX_NAME).read_text())
    for name in set(index["weight_map"].values()):
        (folder / name).rename(folder / name.replace("-of-0000", "-of-00000"))
    index["weight_map"] = {key: name.replace("-of-0000", "-of-00000") for key, name in index["weight_map"].items()}
    (folder / INDEX_NAME).write_text(json.dumps(index))
    checkpoint = Checkpoint.open(folder)
    source = checkpoint.source(torch.float32)
    take_all(checkpoint, source)
    source.finish()


@pytest.mark.parametrize(
    "overrides",
    [
        {"q_lora_rank": None},
        {"n_shared_experts": 0},
        {"n_shared_experts": 2, "first_k_dense_replace": 0},
        {"first_k_dense_replace": 3},
        {"n_group": 4, "topk_group": 2, "n_routed_experts": 16},
        {"num_hidden_layers": 1, "hidden_size": 32, "vocab_size": 600},
    ],
    ids=str,
)
def test_architectures(tmp_path: Path, overrides: dict[str, Any]) -> None:
    spec = write_tiny(tmp_path, tiny_config(**overrides), fmt="int4")
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.spec == spec == ModelSpec.from_config(json.loads((tmp_path / "config.json").read_text()))
    source = checkpoint.source(torch.float32)
    take_all(checkpoint, source)
    source.finish()


def test_config_that_is_unusable_names_the_field(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text()) | {"hidden_size": -1}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="`hidden_size` is -1"):
        Checkpoint.open(folder)


@pytest.mark.gpu
def test_placement_on_a_gpu(written: Written) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    checkpoint = Checkpoint.open(written("int4"))
    host = take_all(checkpoint, checkpoint.source(torch.float32))
    device = take_all(checkpoint, checkpoint.source(torch.float32, "cuda"))
    assert all(tensor.is_cuda and torch.equal(tensor.cpu(), host[name]) for name, tensor in device.items())
