"""Stored tensors against what a configuration needs: the one place that decides what a checkpoint is.

Every expected weight is found in one of two forms, decided by what is there and never by a list of names: plain
(``P.weight``), or compressed-tensors' pack-quantized INT4 (``P.weight_packed`` int32 [out, in/8], ``P.weight_scale``
bf16 [out, in/32], ``P.weight_shape`` [2], a hint only: files with garbage in it exist). Every stored tensor is
consumed, on the ignore list, or unknown. Collects faults instead of raising, so a report can show all of them and a
loader can raise the first. Torch-free, headers only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from perilune.checkpoint.header import TensorMeta, shown
from perilune.config import ModelSpec
from perilune.layout.names import TensorInfo, expected_tensors, is_ignored

PLAIN_DTYPES: Final = ("BF16", "F16", "F32", "F64")
MAX_MISSING: Final = 100_000
"""Matching stops here: a configuration can ask for a thousand million tensors, a person needs the first few."""

_PACKABLE: Final = ("attention", "dense", "shared", "expert", "head")
_PACKED, _SCALE, _SHAPE = "_packed", "_scale", "_shape"


@dataclass(frozen=True, slots=True)
class Stored:
    """How one logical weight is stored: ``plain``, or ``packed`` with ``scale`` and perhaps the ``shape`` hint."""

    info: TensorInfo
    plain: TensorMeta | None = None
    packed: TensorMeta | None = None
    scale: TensorMeta | None = None
    shape: TensorMeta | None = None

    @property
    def parts(self) -> tuple[TensorMeta, ...]:
        return tuple(part for part in (self.plain, self.packed, self.scale, self.shape) if part is not None)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


@dataclass(frozen=True, slots=True)
class Match:
    """Outcome of ``match_tensors``.

    Attributes:
        stored: usable weights by logical name.
        missing: logical names without any tensor; ``MAX_MISSING`` of them may mean more.
        wrong: full sentences about tensors of a shape, dtype or form that cannot be used.
        unknown: stored names that nothing consumes.
        ignored: stored names on the ignore list.
        notes: full sentences about oddities that do not prevent loading.
    """

    stored: Mapping[str, Stored]
    missing: tuple[str, ...]
    wrong: tuple[str, ...]
    unknown: tuple[str, ...]
    ignored: tuple[str, ...]
    notes: tuple[str, ...]


def match_tensors(spec: ModelSpec, tensors: Mapping[str, TensorMeta]) -> Match:
    """Finds each weight that ``spec`` implies among ``tensors``."""
    stored: dict[str, Stored] = {}
    missing: list[str] = []
    wrong: list[str] = []
    rest = dict(tensors)
    for info in expected_tensors(spec):
        found = _take(info, rest)
        if not found.parts:
            missing.append(info.name)
            if len(missing) >= MAX_MISSING:
                break
            continue
        faults = list(_faults(found, spec))
        wrong += faults
        if not faults:
            stored[info.name] = found
    ignored = tuple(name for name in rest if is_ignored(spec, name))
    unknown = tuple(name for name in rest if not is_ignored(spec, name))
    wrong += _mixed_experts(stored)
    return Match(stored, tuple(missing), tuple(wrong), unknown, ignored, tuple(_notes(stored, spec)))


def _take(info: TensorInfo, rest: dict[str, TensorMeta]) -> Stored:
    """Removes a weight's tensors from ``rest``."""
    plain = rest.pop(info.name, None)
    if info.kind not in _PACKABLE or info.name + _PACKED not in rest:
        return Stored(info, plain)
    return Stored(
        info,
        plain,
        packed=rest.pop(info.name + _PACKED),
        scale=rest.pop(info.name + _SCALE, None),
        shape=rest.pop(info.name + _SHAPE, None),
    )


def _faults(found: Stored, spec: ModelSpec) -> Iterator[str]:
    """What prevents the use of a weight."""
    info = found.info
    if found.packed is None:
        assert found.plain is not None
        yield from _fault(found.plain, info.shape, PLAIN_DTYPES)
        return
    if found.plain is not None:
        yield f"{shown(info.name)} is stored twice: plain and as {shown(found.packed.name)}"
        return
    if spec.quant is None:
        yield f"{shown(found.packed.name)} is packed INT4, but config.json has no quantization_config that says how"
        return
    out, width = info.shape
    group = spec.quant.group_size
    if width % group:
        yield f"{shown(found.packed.name)}: {width} inputs cannot be cut into INT4 groups of {group}"
        return
    yield from _fault(found.packed, (out, width // 8), ("I32",))
    if found.scale is None:
        yield f"{shown(found.packed.name)} has no {shown(info.name + _SCALE)} beside it"
    else:
        yield from _fault(found.scale, (out, width // group), ("BF16",))


def _fault(meta: TensorMeta, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> Iterator[str]:
    where = f"{shown(meta.name)} in {shown(meta.file.name)}"
    if meta.shape != shape:
        yield f"{where} has shape {list(meta.shape)}, config.json implies {list(shape)}"
    if meta.dtype not in dtypes:
        yield f"{where} is {meta.dtype}, usable here: {', '.join(dtypes)}"


def _mixed_experts(stored: Mapping[str, Stored]) -> list[str]:
    """Experts are all packed or all plain: a mixture is a conversion that stopped half-way."""
    first: dict[bool, str] = {}
    for name, found in stored.items():
        if found.info.kind == "expert":
            first.setdefault(found.packed is not None, name)
    if len(first) < 2:
        return []
    return [f"routed experts are partly INT4 ({shown(first[True])}) and partly plain ({shown(first[False])})"]


def _notes(stored: Mapping[str, Stored], spec: ModelSpec) -> Iterator[str]:
    packed = [found for found in stored.values() if found.packed is not None]
    if spec.quant is not None and not packed:
        yield "config.json has a quantization_config, but no tensor is packed: weights are read as they are stored"
    hintless = [found.info.name for found in packed if found.shape is None]
    if hintless:
        yield f"{len(hintless)} packed weights have no weight_shape, first {shown(hintless[0])}: widths follow config.json"
