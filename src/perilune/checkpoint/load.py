"""From a model folder to tensors: checked from headers first, then read through memory maps, each weight once.

``Checkpoint.open`` decides, before any data is read, whether the folder can be served. ``TensorSource`` hands out
weights by logical name, cast and placed. A shard is open from its first tensor to its last; each tensor is mapped
alone, copied, and unmapped, so no map outlives a call and the size of a file does not matter. Knows nothing of what
the weights are for.

A file that is changed or cut after its header was checked is an error where that can be seen: its size and time of
change are compared before every tensor. Weights with NaN or infinity are errors; a root mean square outside 1e-4…10 is
logged, since it often means bytes read as the wrong type.
"""

from __future__ import annotations

import logging
import math
import mmap
import os
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

import torch
from torch import Tensor

from perilune.checkpoint.header import Stamp, TensorMeta, open_regular, shown
from perilune.checkpoint.index import locate, model_root, read_index
from perilune.checkpoint.match import Match, Packed, Plain, Stored, match_tensors
from perilune.config import ModelSpec, read_json
from perilune.errors import CheckpointError
from perilune.quant.tensors import Dense, Int4

Progress = Callable[[int, int], None]
"""Called with bytes read so far and bytes in all."""

TORCH_DTYPES: Final = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64,
    "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64,
}  # fmt: skip

_RMS_LOW, _RMS_HIGH = 1e-4, 10.0
_CODE_RMS = 4.3
"""Root mean square of INT4 codes -7…7 taken alike often: turns a scale into the size of its weights."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A folder whose headers agree with its config.json: every weight is there, every tensor is accounted for.

    Attributes:
        path: the folder, links resolved.
        tensors: what is stored, by name.
        weights: how each logical weight is stored.
        stamps: the files, and what they looked like when they were checked.
        notes: oddities that do not prevent loading, as sentences.
    """

    path: Path
    spec: ModelSpec
    tensors: Mapping[str, TensorMeta]
    weights: Mapping[str, Stored]
    stamps: Mapping[Path, Stamp]
    notes: tuple[str, ...]

    @classmethod
    def open(cls, path: Path) -> Checkpoint:
        """Checks a model folder; reads config.json, the index and headers, no data.

        Raises:
            ConfigError: config.json is unusable.
            CheckpointError: a file is broken, or a tensor is missing, unknown, or of the wrong shape or type.
        """
        root = model_root(path)
        spec = ModelSpec.from_config(read_json(locate(root, "config.json")), where=str(root / "config.json"))
        index = read_index(root)
        match = match_tensors(spec, index.tensors)
        _raise_first(match, root)
        notes = match.notes + index.notes
        for note in notes:
            _log.warning("%s: %s", root, note)
        return cls(root, spec, index.tensors, match.stored, index.stamps, notes)

    def source(self, dtype: torch.dtype, device: str = "cpu", progress: Progress | None = None) -> TensorSource:
        """Opens the data. Dense weights are cast to ``dtype``; everything is placed on ``device``."""
        return TensorSource(self, dtype, device, progress)


def _raise_first(match: Match, root: Path) -> None:
    if match.wrong:
        raise CheckpointError(f"{match.wrong[0]} ({len(match.wrong)} such faults in all)", hint=_inspect_hint(root))
    if match.missing:
        raise CheckpointError(
            f"weight {shown(match.missing[0])} is missing ({len(match.missing)} missing in all)",
            hint=_inspect_hint(root),
        )
    if match.unknown:
        raise CheckpointError(
            f"tensor {shown(match.unknown[0])} is not part of the model that config.json describes "
            f"({len(match.unknown)} unknown in all)",
            hint=_inspect_hint(root),
        )


def _inspect_hint(root: Path) -> str:
    return f"`perilune inspect {root}` lists all of them"


class _Shard:
    """An open file, and what it looked like when its header was checked."""

    __slots__ = ("fd", "path", "stamp")

    def __init__(self, path: Path, stamp: Stamp) -> None:
        self.path, self.stamp = path, stamp
        self.fd = open_regular(path)

    def copy(self, meta: TensorMeta, dtype: torch.dtype, device: str) -> Tensor:
        """The tensor, in memory of its own."""
        if Stamp.of(self.fd) != self.stamp:
            raise CheckpointError(
                f"{shown(str(self.path))} changed after its header was checked",
                hint="start again when nothing writes to the folder",
            )
        stored = TORCH_DTYPES[meta.dtype]
        if not meta.nbytes:
            return torch.empty(meta.shape, dtype=dtype, device=device)
        first = meta.begin - meta.begin % mmap.ALLOCATIONGRANULARITY
        # Private and writable, so that torch does not warn of a read-only buffer; nothing writes to it.
        window = mmap.mmap(
            self.fd, meta.end - first, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE, offset=first
        )
        with window:
            # A torch tensor does not hold the map open: `view` must not leave this block.
            view = torch.frombuffer(window, dtype=torch.uint8, offset=meta.begin - first, count=meta.nbytes)
            if meta.begin % stored.itemsize:
                view = view.clone()  # files of other writers need not be aligned
            return view.view(stored).reshape(meta.shape).to(device=device, dtype=dtype, copy=True)

    def close(self) -> None:
        os.close(self.fd)


class TensorSource:
    """Weights of one checkpoint by logical name, each to be taken once; a context manager that closes the files."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: str, progress: Progress | None) -> None:
        self._weights, self._stamps = checkpoint.weights, checkpoint.stamps
        self._dtype, self._device, self._progress = dtype, device, progress
        self._left = Counter(part.file for stored in checkpoint.weights.values() for part in stored.parts)
        self._open: dict[Path, _Shard] = {}
        self._taken: set[str] = set()
        self._odd_hints: list[str] = []
        self._total = sum(part.nbytes for stored in checkpoint.weights.values() for part in stored.parts)
        self._done = 0

    def vector(self, name: str) -> Tensor:
        """A norm weight in ``dtype``; the router and its bias in float32, or float64 when ``dtype`` is.

        Raises:
            CheckpointError: no such weight, taken before, not finite, or its file cannot be read.
        """
        stored = self._take(name)
        if isinstance(stored, Packed):
            raise CheckpointError(f"{shown(name)} is packed INT4, a plain tensor is needed here")
        return self._plain(stored)

    def matrix(self, name: str) -> Dense | Int4:
        """A matrix [out, in] by its logical name ``….weight``: INT4 stays packed, anything else is cast to ``dtype``.

        Raises:
            CheckpointError: no such weight, taken before, not finite, or its file cannot be read.
        """
        stored = self._take(name)
        if isinstance(stored, Plain):
            return Dense(self._plain(stored))
        scale = self._read(stored.scale, torch.bfloat16)
        _check_values(stored.scale.name, scale, _CODE_RMS)
        weight = Int4(self._read(stored.packed, torch.int32), scale)
        if stored.shape is not None:
            self._check_hint(stored.shape, weight.shape)
        self._advance(stored)
        return weight

    def finish(self) -> None:
        """Closes the files.

        Raises:
            CheckpointError: a weight was never taken.
        """
        self.close()
        if self._odd_hints:
            count, first = len(self._odd_hints), self._odd_hints[0]
            _log.warning("%d weight_shape hints disagree with config.json and were not used, first %s", count, first)
        left = [name for name in self._weights if name not in self._taken]
        if left:
            raise CheckpointError(f"weight {shown(left[0])} was not loaded ({len(left)} in all)")

    def close(self) -> None:
        """Closes the files, whatever was taken."""
        while self._open:
            self._open.popitem()[1].close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _take(self, name: str) -> Stored:
        stored = self._weights.get(name)
        if stored is None:
            raise CheckpointError(f"the checkpoint has no weight {shown(name)}")
        if name in self._taken:
            raise CheckpointError(f"weight {shown(name)} was taken before; a source gives each weight once")
        self._taken.add(name)
        return stored

    def _plain(self, stored: Plain) -> Tensor:
        kind, dtype = stored.info.kind, self._dtype
        if kind in ("router", "router_bias"):
            dtype = torch.float64 if dtype == torch.float64 else torch.float32
        tensor = self._read(stored.tensor, dtype)
        # A correction bias is a sum of small steps: it has no usual size.
        _check_values(stored.info.name, tensor, 1.0, sized=kind != "router_bias")
        self._advance(stored)
        return tensor

    def _read(self, meta: TensorMeta, dtype: torch.dtype) -> Tensor:
        shard = self._shard(meta)
        try:
            tensor = shard.copy(meta, dtype, self._device)
        except OSError as error:
            raise CheckpointError(f"{shown(str(meta.file))} cannot be read: {error.strerror}") from error
        self._release(meta)
        return tensor

    def _shard(self, meta: TensorMeta) -> _Shard:
        if meta.file not in self._open:
            self._open[meta.file] = _Shard(meta.file, self._stamps[meta.file])
        return self._open[meta.file]

    def _release(self, meta: TensorMeta) -> None:
        """One tensor less to take from a file; the last one closes it."""
        self._left[meta.file] -= 1
        if not self._left[meta.file] and meta.file in self._open:
            self._open.pop(meta.file).close()

    def _check_hint(self, meta: TensorMeta, shape: tuple[int, int]) -> None:
        """weight_shape only repeats what is known; files with garbage in it exist, so a mismatch is no error."""
        if meta.shape != (2,) or meta.dtype not in ("I32", "I64"):
            self._release(meta)
            self._odd_hints.append(f"{shown(meta.name)} is {meta.dtype} {list(meta.shape)}")
            return
        hint = self._read(meta, torch.int64).tolist()
        if hint != list(shape):
            self._odd_hints.append(f"{shown(meta.name)} is {hint}, not {list(shape)}")

    def _advance(self, stored: Stored) -> None:
        self._done += sum(part.nbytes for part in stored.parts)
        if self._progress is not None:
            self._progress(self._done, self._total)


def _check_values(name: str, tensor: Tensor, unit: float, *, sized: bool = True) -> None:
    """``unit`` times the values' root mean square should be that of a trained weight."""
    if not tensor.numel():
        return
    norm = float(torch.linalg.vector_norm(tensor))  # in the tensor's own type: three digits are enough
    if not math.isfinite(norm) and not bool(torch.isfinite(tensor).all()):
        raise CheckpointError(f"{shown(name)} holds NaN or infinity", hint="the file is damaged: fetch it again")
    rms = unit * norm / math.sqrt(tensor.numel())
    if sized and not _RMS_LOW <= rms <= _RMS_HIGH:
        _log.warning("%s has a root mean square of %.3g, weights are usually within 1e-4 and 10", name, rms)
