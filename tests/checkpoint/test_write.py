"""Writing: complete or absent, one shard at a time, nothing overwritten."""

from __future__ import annotations

import fcntl
import json
import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from perilune.checkpoint.header import read_header
from perilune.checkpoint.index import INDEX_NAME, read_index
from perilune.checkpoint.write import DTYPE_NAMES, write_checkpoint
from perilune.errors import CheckpointError, UsageError


def tensors(count: int, size: int = 100) -> Iterator[tuple[str, Tensor]]:
    for number in range(count):
        yield f"t{number}", torch.full((size,), number, dtype=torch.uint8)


def hidden(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


def test_layout_of_a_folder(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "new" / "out", {"k": "v"}, tensors(5), shard_bytes=250)
    out = tmp_path / "new" / "out"
    names = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    assert sorted(path.name for path in out.iterdir()) == ["config.json", *names, INDEX_NAME]
    index = json.loads((out / INDEX_NAME).read_text())
    assert index["metadata"] == {"total_size": 500}
    assert index["weight_map"] == {"t0": names[0], "t1": names[0], "t2": names[1], "t3": names[1], "t4": names[2]}
    assert json.loads((out / "config.json").read_text()) == {"k": "v"}
    assert read_index(out).notes == ()


@pytest.mark.parametrize("dtype", list(DTYPE_NAMES))
def test_the_reference_library_reads_every_type(tmp_path: Path, dtype: torch.dtype) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    generator = torch.Generator().manual_seed(0)
    given_tensors = {
        "matrix": torch.randint(0, 2, (3, 5), generator=generator).to(dtype),
        "strided": torch.randint(0, 2, (6, 8), generator=generator).to(dtype)[::2, 1::3],
        "scalar": torch.ones((), dtype=dtype),
        "empty": torch.ones(0, 4, dtype=dtype),
        "byte": torch.tensor([1], dtype=torch.uint8),
        "wide": torch.tensor([2.0], dtype=torch.float64),
    }
    write_checkpoint(tmp_path, {}, given_tensors.items(), shard_bytes=1 << 20)
    path = tmp_path / "model-00001-of-00001.safetensors"
    read = safetensors.load_file(path)
    assert read.keys() == given_tensors.keys()
    for name, tensor in given_tensors.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor)
    sizes = {meta.name: given_tensors[meta.name].element_size() for meta in read_header(path).tensors}
    assert all(meta.begin % sizes[meta.name] == 0 for meta in read_header(path).tensors)


@settings(max_examples=50, deadline=None)
@given(sizes=st.lists(st.integers(0, 40), max_size=12), shard_bytes=st.integers(1, 100))
def test_shards_are_as_full_as_allowed(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], shard_bytes: int
) -> None:
    out = tmp_path_factory.mktemp("out")
    write_checkpoint(out, {}, ((f"t{i}", torch.zeros(n, dtype=torch.int8)) for i, n in enumerate(sizes)), shard_bytes)
    if not sizes:
        assert json.loads((out / INDEX_NAME).read_text())["weight_map"] == {}
        return
    index = read_index(out)
    assert {name: meta.nbytes for name, meta in index.tensors.items()} == {f"t{i}": n for i, n in enumerate(sizes)}
    loads = [[meta.nbytes for meta in read_header(out / shard).tensors] for shard in index.shards]
    assert all(sum(load) <= shard_bytes or len(load) == 1 or sum(load) - max(load) == 0 for load in loads)
    assert len(loads) <= len(sizes)


def test_at_most_one_shard_is_held(tmp_path: Path) -> None:
    alive: list[weakref.ref[Tensor]] = []
    most = 0

    def stream() -> Iterator[tuple[str, Tensor]]:
        nonlocal most
        for number in range(12):
            most = max(most, sum(ref() is not None for ref in alive))
            tensor = torch.zeros(100, dtype=torch.uint8)
            alive.append(weakref.ref(tensor))
            yield f"t{number}", tensor
            del tensor

    write_checkpoint(tmp_path, {}, stream(), shard_bytes=300)
    assert most == 3  # the shard being filled; never it and the one before


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    def failing() -> Iterator[tuple[str, Tensor]]:
        yield from tensors(5)
        raise RuntimeError("the source broke")

    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(RuntimeError, match="the source broke"):
        write_checkpoint(tmp_path, {}, failing(), shard_bytes=150)
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer.json"]
    write_checkpoint(tmp_path, {}, tensors(5), shard_bytes=150)
    assert len(read_index(tmp_path).tensors) == 5


@pytest.mark.parametrize("call", range(9))
def test_a_failed_rename_or_sync_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int) -> None:
    """Whatever step the disk refuses, no folder remains that looks like a checkpoint."""
    calls = 0

    def refusing(real: Any) -> Any:
        def wrapped(*args: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == call + 1:
                raise OSError(28, "No space left on device", str(args[0]))
            return real(*args)

        return wrapped

    monkeypatch.setattr(os, "replace", refusing(os.replace))
    monkeypatch.setattr(os, "fsync", refusing(os.fsync))
    with pytest.raises(CheckpointError, match="cannot be written: No space left on device"):
        write_checkpoint(tmp_path, {}, tensors(2), shard_bytes=150)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_killed_writer_leaves_no_checkpoint_and_can_be_repeated(tmp_path: Path) -> None:
    for step in range(1, 12):
        out = tmp_path / str(step)
        pid = os.fork()
        if not pid:  # the child dies at its n-th rename or sync, as if the power failed
            calls = 0

            def dying(*_: Any, step: int = step) -> None:
                nonlocal calls
                calls += 1
                if calls == step:
                    os._exit(9)

            setattr(os, "fsync", dying)  # noqa: B010 - the child owns its copy of the module
            try:
                write_checkpoint(out, {}, tensors(2), shard_bytes=150)
            finally:
                os._exit(0)
        died = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
        complete = (out / INDEX_NAME).exists()
        assert died or complete
        if complete:
            assert len(read_index(out).tensors) == 2
            continue
        with pytest.raises(CheckpointError, match="neither"):
            read_index(out)
        for leftover in out.glob("*[!l]"):  # what the refusal tells the user to remove; hidden ones may stay
            leftover.unlink()
        write_checkpoint(out, {}, tensors(2), shard_bytes=150)
        assert len(read_index(out).tensors) == 2
        assert hidden(out) == []


@pytest.mark.parametrize("name", [INDEX_NAME, "model.safetensors", "config.json", "model-00007-of-000009.safetensors"])
def test_nothing_is_overwritten(tmp_path: Path, name: str) -> None:
    (tmp_path / name).symlink_to("nowhere")
    with pytest.raises(UsageError, match=f"already holds `{name}`, and nothing is overwritten"):
        write_checkpoint(tmp_path, {}, tensors(1), shard_bytes=100)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_links_are_replaced_and_never_written_through(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    out = tmp_path / "out"
    out.mkdir()
    for name in (".model-00001.safetensors.partial", ".config.json.partial", f".{INDEX_NAME}.partial"):
        (out / name).symlink_to(victim)
    write_checkpoint(out, {}, tensors(1), shard_bytes=100)
    assert victim.read_text() == "precious"
    assert hidden(out) == []


def test_one_writer_per_folder(tmp_path: Path) -> None:
    fd = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    with pytest.raises(UsageError, match="is being written by another process"):
        write_checkpoint(tmp_path, {}, tensors(1), shard_bytes=100)
    os.close(fd)
    write_checkpoint(tmp_path, {}, tensors(1), shard_bytes=100)


@pytest.mark.parametrize(
    ("stream", "message"),
    [
        ([("a", torch.zeros(1)), ("a", torch.zeros(1))], "`a` was given twice"),
        ([("", torch.zeros(1))], "cannot name a tensor"),
        ([("__metadata__", torch.zeros(1))], "cannot name a tensor"),
        ([("a\n", torch.zeros(1))], "cannot name a tensor"),
        ([("c", torch.zeros(1, dtype=torch.complex128))], "`c` is torch.complex128, which cannot be written"),
    ],
)
def test_refused_tensors(tmp_path: Path, stream: list[tuple[str, Tensor]], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        write_checkpoint(tmp_path, {}, stream, shard_bytes=100)
    assert list(tmp_path.iterdir()) == []


def test_refused_arguments(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="shard_bytes is 0"):
        write_checkpoint(tmp_path, {}, [], shard_bytes=0)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file` cannot be written: File exists"):
        write_checkpoint(tmp_path / "file", {}, [], shard_bytes=1)
