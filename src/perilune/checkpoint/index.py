"""Which tensors a model folder holds, and in which files: from headers alone.

Owns the rules by which files are found. Shards are named by ``model.safetensors.index.json``; without it there is one
file, ``model.safetensors``. Nothing else is ever opened: not ``pytorch_model.bin`` (a pickle), not the folder's Python
files, not shards that the index does not name. Torch-free; knows nothing of what a model needs.

Where a file may lie. A name in the index is a plain file name ending in ``.safetensors``: no separators, no ``..``.
Links are followed to their end, and the file found there must lie inside the model folder, or, for a snapshot of the
Hugging Face hub's cache (``…/snapshots/REVISION/NAME``), directly in the ``blobs`` folder beside ``snapshots``. The
model folder itself may be reached by any path, links included: that is the user's own choice.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from perilune.checkpoint.header import Header, Stamp, TensorMeta, open_regular, parse_json, read_header, shown
from perilune.errors import CheckpointError

INDEX_NAME: Final = "model.safetensors.index.json"
SINGLE_NAME: Final = "model.safetensors"
MAX_INDEX_BYTES: Final = 200_000_000
MAX_SHARDS: Final = 100_000

_WEIGHT_SUFFIXES: Final = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".npz", ".h5", ".msgpack")


@dataclass(frozen=True, slots=True)
class Index:
    """What a model folder holds.

    Attributes:
        root: the folder, links resolved.
        tensors: every stored tensor by name.
        shards: the files they lie in, as named by the index.
        stamps: those files, links resolved, and what they looked like.
        unread: names of weight files in the folder that are not part of the checkpoint and were not opened.
        total_size: the sum that the index states, or None.
    """

    root: Path
    tensors: Mapping[str, TensorMeta]
    shards: tuple[str, ...]
    stamps: Mapping[Path, Stamp]
    unread: tuple[str, ...]
    total_size: int | None

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(meta.nbytes for meta in self.tensors.values())

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences about weight files outside the checkpoint, and about a stated sum that is not true."""
        notes = []
        if self.unread:
            count, first = len(self.unread), shown(self.unread[0])
            notes.append(f"{count} weight files are not part of the checkpoint and are not opened, first {first}")
        if self.total_size not in (None, self.nbytes):
            notes.append(f"the index states a total_size of {self.total_size}, its tensors have {self.nbytes} bytes")
        return tuple(notes)


def model_root(path: Path) -> Path:
    """The model folder with links resolved.

    Raises:
        CheckpointError: ``path`` is no folder.
    """
    try:
        root = path.resolve(strict=True)
    except (OSError, RuntimeError, ValueError) as error:
        raise CheckpointError(f"{shown(str(path))} does not exist", hint="point at a model folder") from error
    if not root.is_dir():
        raise CheckpointError(
            f"{shown(str(path))} is not a folder", hint="point at a folder with config.json and safetensors files"
        )
    return root


def locate(root: Path, name: str) -> Path:
    """The file that ``name`` means in the model folder ``root``, links resolved; see the rule in the module docstring.

    Raises:
        CheckpointError: the name or what it links to leaves the folder, or nothing is there.
    """
    if not name or name in (".", "..") or "/" in name or "\\" in name or not name.isprintable():
        raise CheckpointError(f"{shown(name)} is not a plain file name; files of a checkpoint lie in its own folder")
    if len(os.fsencode(name)) > 255:
        raise CheckpointError(f"{shown(name)} is longer than the 255 bytes that a file name can have")
    try:
        target = (root / name).resolve(strict=True)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{shown(name)} is missing in {shown(str(root))}", hint="finish the download, or fetch this file again"
        ) from error
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links
        raise CheckpointError(f"{shown(name)} in {shown(str(root))} cannot be followed to a file") from error
    hub_blobs = root.parent.parent / "blobs" if root.parent.name == "snapshots" else None
    if not target.is_relative_to(root) and target.parent != hub_blobs:
        raise CheckpointError(
            f"{shown(name)} links to {shown(str(target))}, which is outside {shown(str(root))}",
            hint="copy or hard-link the file into the folder, or name the folder that holds all files",
        )
    return target


def read_index(path: Path) -> Index:
    """Reads the index and every shard's header.

    Raises:
        CheckpointError: a file is missing, leaves the folder, or is broken; the index and the shards disagree.
    """
    root = model_root(path)
    weight_map: dict[str, str] | None = None
    total_size: int | None = None
    if os.path.lexists(root / INDEX_NAME):
        weight_map, total_size = _read_weight_map(root)
        shards = tuple(sorted(set(weight_map.values())))
    elif os.path.lexists(root / SINGLE_NAME):
        shards = (SINGLE_NAME,)
    else:
        raise _nothing_found(root)
    tensors: dict[str, TensorMeta] = {}
    stamps: dict[Path, Stamp] = {}
    for shard in shards:
        path = locate(root, shard)
        header = read_header(path)
        stamps[path] = header.stamp
        _add_shard(tensors, shard, header, weight_map)
    if weight_map is not None and len(tensors) != len(weight_map):
        absent = next(name for name in weight_map if name not in tensors)
        raise CheckpointError(
            f"{shown(INDEX_NAME)} places tensor {shown(absent)} in {shown(weight_map[absent])}, which does not hold it"
        )
    return Index(root, tensors, shards, stamps, _unread(root, shards), total_size)


def _add_shard(
    tensors: dict[str, TensorMeta], shard: str, header: Header, weight_map: Mapping[str, str] | None
) -> None:
    for meta in header.tensors:
        if meta.name in tensors:
            other = tensors[meta.name].file.name
            raise CheckpointError(f"tensor {shown(meta.name)} is stored twice: in {shown(other)} and in {shown(shard)}")
        if weight_map is not None and weight_map.get(meta.name) != shard:
            place = weight_map.get(meta.name)
            said = "does not name it" if place is None else f"places it in {shown(place)}"
            raise CheckpointError(f"{shown(shard)} holds tensor {shown(meta.name)}, but {shown(INDEX_NAME)} {said}")
        tensors[meta.name] = meta


def _read_weight_map(root: Path) -> tuple[dict[str, str], int | None]:
    file = shown(INDEX_NAME)
    data = _parse_index(locate(root, INDEX_NAME))
    weight_map = data.get("weight_map") if isinstance(data, dict) else None
    if not isinstance(data, dict) or not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{file} needs an object `weight_map` from tensor names to file names")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not shard.endswith(".safetensors"):
            raise CheckpointError(
                f"{file} places tensor {shown(name)} in {shown(shard)}, the name of a .safetensors file is needed"
            )
    if len(set(weight_map.values())) > MAX_SHARDS:
        raise CheckpointError(f"{file} names more than {MAX_SHARDS} files")
    metadata = data.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    # Some writers store a float; the figure is informative, the headers decide.
    return weight_map, int(total) if isinstance(total, (int, float)) and 0 <= total < 1 << 62 else None


def _parse_index(path: Path) -> object:
    fd = open_regular(path)
    with os.fdopen(fd, "rb") as stream:
        size = os.fstat(fd).st_size
        if size > MAX_INDEX_BYTES:
            raise CheckpointError(f"{shown(INDEX_NAME)} has {size} bytes, at most {MAX_INDEX_BYTES} are read")
        try:
            return parse_json(stream.read(MAX_INDEX_BYTES + 1))
        except ValueError as error:
            raise CheckpointError(f"{shown(INDEX_NAME)} is not valid JSON: {shown(str(error), 200)}") from error
        except OSError as error:
            raise CheckpointError(f"{shown(INDEX_NAME)} cannot be read: {error.strerror}") from error


def _unread(root: Path, shards: tuple[str, ...]) -> tuple[str, ...]:
    try:
        names = {name for name in os.listdir(root) if name.endswith(_WEIGHT_SUFFIXES)}
    except OSError as error:
        raise CheckpointError(f"{shown(str(root))} cannot be listed: {error.strerror}") from error
    return tuple(sorted(names - set(shards)))


def _nothing_found(root: Path) -> CheckpointError:
    others = _unread(root, ())
    hint = "point at a folder in Hugging Face layout"
    if others:
        hint = f"{shown(others[0])} was not opened: fetch the .safetensors form of this model, other forms are not read"
    return CheckpointError(f"neither {shown(INDEX_NAME)} nor {shown(SINGLE_NAME)} is in {shown(str(root))}", hint=hint)
