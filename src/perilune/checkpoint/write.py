"""Writing checkpoints: streamed shards, then config.json, then the index, each complete or absent.

A folder becomes a checkpoint by its index, which is written last. Until then shards bear hidden names
(``.model-00001.safetensors.partial``): the number of shards, which is part of their final names, is known only when the
tensors end. Then they are renamed, config.json follows, the index makes it loadable. A process that dies on the way
leaves a folder that no loader accepts; the next write into it replaces the partial files.

At most one shard's tensors are held. Files are synced before they are renamed, and never written through links. One
writer per folder at a time: the folder is locked. Nothing existing is overwritten.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import torch
from torch import Tensor

from perilune.checkpoint.header import MAX_HEADER_BYTES, MAX_NAME, shown
from perilune.checkpoint.index import INDEX_NAME, SINGLE_NAME
from perilune.errors import CheckpointError, UsageError

DTYPE_NAMES: Final = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16", torch.int32: "I32",
    torch.int64: "I64", torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32", torch.float64: "F64",
}  # fmt: skip

_ALIGNMENT: Final = 8


@dataclass(frozen=True, slots=True)
class _Shard:
    """A finished, still hidden file and the names of its tensors."""

    path: Path
    names: tuple[str, ...]
    nbytes: int


def write_checkpoint(
    out: Path, config: dict[str, Any], tensors: Iterable[tuple[str, Tensor]], shard_bytes: int
) -> None:
    """Writes ``config`` and ``tensors`` as a checkpoint in Hugging Face layout.

    Args:
        out: a folder; made if it is not there. Other files in it (a tokenizer) are left alone.
        tensors: names and tensors; consumed once, a shard at a time.
        shard_bytes: a shard is full when another tensor would exceed this; a larger tensor gets its own.

    Raises:
        UsageError: ``shard_bytes`` is not positive, or ``out`` already holds a checkpoint or is being written.
        CheckpointError: a name stands twice or is unusable, a dtype has no name in the format, or the disk refuses.
    """
    if shard_bytes <= 0:
        raise UsageError(f"shard_bytes is {shard_bytes}, a positive number of bytes is needed")
    try:
        out.mkdir(parents=True, exist_ok=True)
        with _locked(out):
            _refuse_existing(out)
            _write(out, config, tensors, shard_bytes)
    except OSError as error:
        raise CheckpointError(f"{shown(str(error.filename or out))} cannot be written: {error.strerror}") from error


def _write(out: Path, config: dict[str, Any], tensors: Iterable[tuple[str, Tensor]], shard_bytes: int) -> None:
    made: list[Path] = []
    try:
        shards = _write_shards(out, tensors, shard_bytes, made)
        weight_map: dict[str, str] = {}
        for number, shard in enumerate(shards, start=1):
            path = out / f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            made.append(path)
            os.replace(shard.path, path)
            weight_map |= dict.fromkeys(shard.names, path.name)
        _sync_folder(out)
        total = sum(shard.nbytes for shard in shards)
        _write_json(out / "config.json", config, made)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        _write_json(out / INDEX_NAME, index, made)
    except BaseException:
        for path in made:
            path.unlink(missing_ok=True)
        raise


def _write_shards(out: Path, tensors: Iterable[tuple[str, Tensor]], shard_bytes: int, made: list[Path]) -> list[_Shard]:
    """Writes hidden files. Each path enters ``made`` before the file exists, so that a failure can be cleaned up."""
    shards = []
    for number, group in enumerate(_groups(tensors, shard_bytes), start=1):
        path = out / f".model-{number:05d}.safetensors.partial"
        shard = _Shard(path, tuple(group), sum(tensor.nbytes for tensor in group.values()))
        made.append(path)
        with _create(path) as stream:
            _write_shard(stream, group)
        shards.append(shard)
    return shards


def _groups(tensors: Iterable[tuple[str, Tensor]], shard_bytes: int) -> Iterator[dict[str, Tensor]]:
    """Cuts a stream of tensors into shards."""
    seen: set[str] = set()
    group: dict[str, Tensor] = {}
    held = 0
    for name, tensor in tensors:
        if name in seen:
            raise CheckpointError(f"tensor {shown(name)} was given twice")
        if not name or name == "__metadata__" or len(name) > MAX_NAME or not name.isprintable():
            raise CheckpointError(
                f"{shown(name)} cannot name a tensor: 1 to {MAX_NAME} printable characters are needed"
            )
        if tensor.dtype not in DTYPE_NAMES:
            raise CheckpointError(f"tensor {shown(name)} is {tensor.dtype}, which cannot be written")
        seen.add(name)
        if group and held + tensor.nbytes > shard_bytes:
            yield group
            group.clear()  # before the next tensor is made: the consumer may still refer to the dict
            held = 0
        group[name] = tensor
        held += tensor.nbytes
    if group:
        yield group


def _write_shard(stream: BinaryIO, group: dict[str, Tensor]) -> None:
    """Wider types first, so that every tensor is aligned to its element size."""
    ordered = sorted(group.items(), key=lambda item: -item[1].element_size())
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, tensor in ordered:
        end = at + tensor.nbytes
        header[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, end],
        }
        at = end
    raw = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    raw += b" " * (-len(raw) % _ALIGNMENT)
    if len(raw) > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"a shard of {len(group)} tensors needs a header of {len(raw)} bytes, choose smaller shards"
        )
    stream.write(len(raw).to_bytes(8, "little") + raw)
    for _, tensor in ordered:
        stream.write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


@contextlib.contextmanager
def _create(path: Path) -> Iterator[BinaryIO]:
    """A new file at ``path``, replacing a leftover; on a clean exit its bytes are on the disk."""
    path.unlink(missing_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    with os.fdopen(fd, "wb") as stream:
        yield stream
        stream.flush()
        os.fsync(fd)


def _write_json(path: Path, value: dict[str, Any], made: list[Path]) -> None:
    partial = path.with_name(f".{path.name}.partial")
    made += [partial, path]
    with _create(partial) as stream:
        stream.write(json.dumps(value, indent=2, allow_nan=False).encode() + b"\n")
    os.replace(partial, path)
    _sync_folder(path.parent)


def _sync_folder(out: Path) -> None:
    fd = os.open(out, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def _locked(out: Path) -> Iterator[None]:
    """Holds the folder's lock, which the system releases whatever becomes of the process."""
    fd = os.open(out, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise UsageError(f"{shown(str(out))} is being written by another process") from error
    finally:
        os.close(fd)


def _refuse_existing(out: Path) -> None:
    taken = [name for name in (INDEX_NAME, SINGLE_NAME, "config.json") if os.path.lexists(out / name)]
    taken += sorted(path.name for path in out.glob("model-*-of-*.safetensors"))
    if taken:
        raise UsageError(
            f"{shown(str(out))} already holds {shown(taken[0])}, and nothing is overwritten",
            hint="name a new folder, or remove what an interrupted write left",
        )
