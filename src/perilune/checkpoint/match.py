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
from perilune.checkpoint.ignored import IgnoreList
from perilune.config import ModelSpec, QuantSpec
from perilune.layout.names import Kind, TensorInfo, expected_tensors, is_ignored

PLAIN_DTYPES: Final = ("BF16", "F16", "F32", "F64")
MAX_MISSING: Final = 100_000
"""Matching stops here: a configuration can ask for a thousand million tensors, a person needs the first few."""

LINEAR: Final[tuple[Kind, ...]] = ("attention", "dense", "shared", "expert", "head")
"""Kinds that are Linear modules in the reference code, which a quantiser may pack. The router is not one of them."""

_PACKED, _SCALE, _SHAPE = "_packed", "_scale", "_shape"


@dataclass(frozen=True, slots=True)
class Plain:
    """A weight stored as one tensor."""

    info: TensorInfo
    tensor: TensorMeta

    @property
    def parts(self) -> tuple[TensorMeta, ...]:
        return (self.tensor,)


@dataclass(frozen=True, slots=True)
class Packed:
    """A weight stored as INT4 codes and scales, perhaps with the hint of its shape."""

    info: TensorInfo
    packed: TensorMeta
    scale: TensorMeta
    shape: TensorMeta | None

    @property
    def parts(self) -> tuple[TensorMeta, ...]:
        return (self.packed, self.scale) if self.shape is None else (self.packed, self.scale, self.shape)


Stored = Plain | Packed


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
        faults = len(wrong)
        found = _take(info, rest, spec.quant, wrong)
        if found is not None:
            stored[info.name] = found
        elif len(wrong) == faults:
            missing.append(info.name)
            if len(missing) >= MAX_MISSING:
                break
    ignored = tuple(name for name in rest if is_ignored(spec, name))
    unknown = tuple(name for name in rest if not is_ignored(spec, name))
    wrong += _mixed_experts(stored)
    return Match(stored, tuple(missing), tuple(wrong), unknown, ignored, tuple(_notes(stored, spec)))


def _take(info: TensorInfo, rest: dict[str, TensorMeta], quant: QuantSpec | None, wrong: list[str]) -> Stored | None:
    """Moves a weight's tensors out of ``rest``; faults go to ``wrong``. None and no fault: it is missing."""
    plain = rest.pop(info.name, None)
    packed = rest.pop(info.name + _PACKED, None) if info.kind in LINEAR else None
    if packed is None:
        if plain is None:
            return None
        faults = list(_fault(plain, info.shape, PLAIN_DTYPES))
        wrong += faults
        return None if faults else Plain(info, plain)
    scale, shape = rest.pop(info.name + _SCALE, None), rest.pop(info.name + _SHAPE, None)
    faults = list(_packed_faults(info, plain, packed, scale, quant))
    if scale is None:
        faults.append(f"{shown(packed.name)} has no {shown(info.name + _SCALE)} beside it")
    wrong += faults
    return None if faults or scale is None else Packed(info, packed, scale, shape)


def _packed_faults(
    info: TensorInfo, plain: TensorMeta | None, packed: TensorMeta, scale: TensorMeta | None, quant: QuantSpec | None
) -> Iterator[str]:
    if plain is not None:
        yield f"{shown(info.name)} is stored twice: plain and as {shown(packed.name)}"
    if quant is None:
        yield f"{shown(packed.name)} is packed INT4, but config.json has no quantization_config that says how"
        return
    out, width = info.shape
    if width % quant.group_size:
        yield f"{shown(packed.name)}: {width} inputs cannot be cut into INT4 groups of {quant.group_size}"
        return
    yield from _fault(packed, (out, width // 8), ("I32",))
    if scale is not None:
        yield from _fault(scale, (out, width // quant.group_size), ("BF16",))


def _fault(meta: TensorMeta, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> Iterator[str]:
    if meta.shape == shape and meta.dtype in dtypes:
        return
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
            first.setdefault(isinstance(found, Packed), name)
    if len(first) < 2:
        return []
    return [f"routed experts are partly INT4 ({shown(first[True])}) and partly plain ({shown(first[False])})"]


def _notes(stored: Mapping[str, Stored], spec: ModelSpec) -> Iterator[str]:
    packed = [found for found in stored.values() if isinstance(found, Packed)]
    hintless = [found.info.name for found in packed if found.shape is None]
    if hintless:
        first = shown(hintless[0])
        yield f"{len(hintless)} packed weights lack weight_shape, first {first}: config.json gives the width"
    if spec.quant is None:
        return
    if not packed:
        yield "config.json has a quantization_config, but no tensor is packed: weights are read as they are stored"
        return
    yield from _disagreements(stored, IgnoreList(spec.quant.ignore))


def _disagreements(stored: Mapping[str, Stored], ignore: IgnoreList) -> Iterator[str]:
    """What is stored decides; other engines go by the list, so a contradiction is worth a word."""
    if ignore.unclear:
        yield f"quantization_config.ignore entry {shown(ignore.unclear[0])} is of a form that is not understood here"
        return
    linear = [found for found in stored.values() if found.info.kind in LINEAR]
    packed, plain = [], []
    for found in linear:
        listed = ignore.matches(found.info.name.removesuffix(".weight"))
        if listed and isinstance(found, Packed):
            packed.append(found.info.name)
        elif not listed and isinstance(found, Plain):
            plain.append(found.info.name)
    if packed:
        yield f"quantization_config.ignore covers {len(packed)} weights that are packed, first {shown(packed[0])}"
    if plain:
        yield f"quantization_config.ignore lacks {len(plain)} weights that are not packed, first {shown(plain[0])}"
