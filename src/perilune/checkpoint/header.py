"""The header of one safetensors file: read, and believed only where it agrees with itself and with the file.

Format: 8 bytes little-endian length n, n bytes of JSON ``{name: {dtype, shape, data_offsets}, "__metadata__": {…}}``,
then the data; offsets count from the end of the header. Source: the format's published description.

Refuses, naming file, tensor and value: a header longer than its file or than 100 MB, other JSON than the format's,
a key that stands twice, unknown dtypes, absurd shapes, byte counts that contradict shape and dtype, data that
overlaps, leaves holes or does not end where the file ends. Opens regular files only, never reads data. Torch-free.
Little-endian machines only, as everything here that touches bytes.
"""

from __future__ import annotations

import json
import math
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, NoReturn, TypeGuard

import msgspec

from perilune.errors import CheckpointError

MAX_HEADER_BYTES: Final = 100_000_000
MAX_NAME: Final = 512
MAX_RANK: Final = 8
MAX_DIM: Final = 1 << 40

DTYPE_BYTES: Final = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "F8_E8M0": 1,
    "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4,
    "I64": 8, "U64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
"""Bytes of one element, by the format's name of the type."""

_ENTRY_KEYS: Final = {"dtype", "shape", "data_offsets"}
_INT: Final[frozenset[type]] = frozenset({int})


class TensorMeta(msgspec.Struct, frozen=True, gc=False):
    """Where a stored tensor lies: bytes ``begin``…``end - 1`` of ``file``, counted from the file's start.

    A msgspec struct out of the collector's sight, because a large checkpoint has 200,000 of them.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class Stamp(NamedTuple):
    """By which a file is recognised as unchanged."""

    size: int
    mtime_ns: int

    @classmethod
    def of(cls, fd: int) -> Stamp:
        status = os.fstat(fd)
        return cls(status.st_size, status.st_mtime_ns)


@dataclass(frozen=True, slots=True)
class Header:
    """Tensors of one file in the order of their data, and the file's stamp when they were read."""

    tensors: tuple[TensorMeta, ...]
    stamp: Stamp


def shown(value: object, limit: int = 120) -> str:
    """A foreign value for a message: one line, escaped, not longer than ``limit``."""
    text = str(value) if isinstance(value, str) and value.isprintable() else repr(value)
    return f"`{text}`" if len(text) <= limit else f"`{text[:limit]}…` ({len(text)} characters)"


def open_regular(path: Path) -> int:
    """Opens a file for reading; returns the descriptor. Pipes, devices and folders are refused without waiting.

    Raises:
        CheckpointError: missing, unreadable, or not a regular file.
    """
    try:
        # A pipe without a writer would block a plain open; a device might act on it.
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise CheckpointError(f"{shown(str(path))} is not a regular file")
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise CheckpointError(f"{shown(str(path))} cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise CheckpointError(f"{shown(str(path))} is not a regular file")
    return fd


def read_header(path: Path) -> Header:
    """Reads and checks the header of a safetensors file.

    Raises:
        CheckpointError: the file cannot be read, or its header breaks a rule of the module.
    """
    fd = open_regular(path)
    try:
        return _read_header(fd, path)
    except OSError as error:
        raise CheckpointError(f"{shown(str(path))} cannot be read: {error.strerror}") from error
    finally:
        os.close(fd)


def parse_json(data: bytes) -> Any:
    """Strict JSON: UTF-8, no key twice in an object, no NaN or infinity.

    Raises:
        ValueError: anything else, nesting beyond the decoder's limit included.
    """
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
    except RecursionError:
        raise ValueError("nested too deep") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"key {shown(key)} stands twice")
            seen.add(key)
    return value


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def _read_header(fd: int, path: Path) -> Header:
    file = shown(str(path))
    stamp = Stamp.of(fd)
    size = stamp.size
    if size < 8:
        raise CheckpointError(f"{file} has {size} bytes, a safetensors file has at least 8", hint="download it again")
    length = int.from_bytes(os.pread(fd, 8, 0), "little")
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(f"{file} announces a header of {length} bytes, at most {MAX_HEADER_BYTES} are allowed")
    if length > size - 8:
        raise CheckpointError(
            f"{file} announces a header of {length} bytes and has {size} bytes in all", hint="download it again"
        )
    raw = _read_exactly(fd, length, 8, file)
    if not raw.startswith(b"{"):
        raise CheckpointError(f"{file}: the header begins with {raw[:8]!r}, a JSON object is needed")
    try:
        header = parse_json(raw)
    except ValueError as error:
        raise CheckpointError(f"{file}: the header is not valid JSON: {shown(str(error), 200)}") from error
    _check_metadata(header.pop("__metadata__", {}), file)
    start = 8 + length
    metas = [_tensor(name, entry, path, start) for name, entry in header.items()]
    metas.sort(key=lambda meta: (meta.begin, meta.end))
    _check_layout(metas, start, size, file)
    return Header(tuple(metas), stamp)


def _read_exactly(fd: int, length: int, offset: int, file: str) -> bytes:
    parts, got = [], 0
    while got < length:
        part = os.pread(fd, length - got, offset + got)
        if not part:
            raise CheckpointError(f"{file} ended after {offset + got} bytes while it was read")
        parts.append(part)
        got += len(part)
    return b"".join(parts)


def _check_metadata(metadata: object, file: str) -> None:
    if not isinstance(metadata, dict):
        raise CheckpointError(f"{file}: `__metadata__` is {shown(metadata)}, an object of strings is needed")
    for key, value in metadata.items():
        if not isinstance(value, str):
            raise CheckpointError(f"{file}: `__metadata__` key {shown(key)} is {shown(value)}, a string is needed")


def _are_sizes(value: object, limit: int) -> TypeGuard[list[int]]:
    """Whether ``value`` is a list of integers (not of true or false) from 0 to ``limit``."""
    if not isinstance(value, list) or not set(map(type, value)) <= _INT:
        return False
    return not value or 0 <= min(value) <= max(value) <= limit


def _tensor(name: str, entry: object, path: Path, start: int) -> TensorMeta:
    def fail(what: str) -> CheckpointError:
        return CheckpointError(f"{shown(str(path))}: tensor {shown(name)}: {what}")

    if not name or len(name) > MAX_NAME or not name.isprintable():
        raise fail(f"a name needs 1 to {MAX_NAME} printable characters")
    if not isinstance(entry, dict) or entry.keys() != _ENTRY_KEYS:
        raise fail(f"the entry is {shown(entry)}, an object of dtype, shape and data_offsets is needed")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    itemsize = DTYPE_BYTES.get(dtype) if isinstance(dtype, str) else None
    if itemsize is None:
        raise fail(f"dtype is {shown(dtype)}, known: {', '.join(DTYPE_BYTES)}")
    if not _are_sizes(shape, MAX_DIM) or len(shape) > MAX_RANK:
        raise fail(f"shape is {shown(shape)}, at most {MAX_RANK} integers from 0 to {MAX_DIM} are allowed")
    if not _are_sizes(offsets, 1 << 62) or len(offsets) != 2:
        raise fail(f"data_offsets is {shown(offsets)}, two integers [begin, end] are needed")
    begin, end = offsets
    nbytes = math.prod(shape) * itemsize
    if end - begin != nbytes:
        raise fail(f"data_offsets {begin} to {end} span {end - begin} bytes, {dtype} {shape} needs {nbytes}")
    return TensorMeta(name, dtype, tuple(shape), path, start + begin, start + end)


def _check_layout(metas: list[TensorMeta], start: int, size: int, file: str) -> None:
    """Sorted tensors must tile the data: each begins where the one before it ends, the last ends with the file."""
    at, before = start, "the header"
    for meta in metas:
        if meta.begin != at:
            fault = "overlaps" if meta.begin < at else "leaves a hole behind"
            raise CheckpointError(
                f"{file}: tensor {shown(meta.name)} begins at data offset {meta.begin - start} and {fault} "
                f"{before}, which ends at {at - start}"
            )
        at, before = meta.end, shown(meta.name)
    if at != size:
        fault = f"{at - size} bytes are missing" if at > size else f"{size - at} bytes follow the last tensor"
        raise CheckpointError(f"{file} has {size} bytes, its header describes {at}: {fault}", hint="download it again")
