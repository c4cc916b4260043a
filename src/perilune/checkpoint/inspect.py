"""What a model folder is, said from config.json and headers alone: ``inspect_model``.

Counts weights and bytes, the bytes that one generated token reads, the cache that one token keeps, and every
disagreement between config.json and the files. A tensor that is missing, unknown or of the wrong shape is reported, not
raised; a file that cannot be read as what it is (a broken header, an unusable config.json) is raised. Torch-free, and
takes seconds for a trillion weights.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from perilune.checkpoint.header import DTYPE_BYTES
from perilune.checkpoint.index import locate, model_root, read_index
from perilune.checkpoint.match import Packed, Plain, Stored, match_tensors
from perilune.config import ModelSpec, read_json

_DTYPE_WORDS: Final = {"BF16": "bf16", "F16": "float16", "F32": "float32", "F64": "float64"}


@dataclass(frozen=True, slots=True)
class Report:
    """Facts about a model folder. Bytes are of stored tensors, headers not counted.

    Attributes:
        format: how most routed experts are stored: ``int4``, ``bf16``, ``float16``, …; ``unknown`` without any.
        parameters: weights of the model.
        active_parameters: weights that one token meets: ``top_k`` experts of each layer, no embedding.
        tensors, shards: stored tensors and the files that hold them.
        tensor_bytes: of everything stored, ignored and unknown tensors included.
        bytes_by_kind: of the weights in use, by part of the model.
        token_read_bytes: weights read for one generated token at batch 1: chosen experts only, one embedding row.
        kv_token_bytes: cache of one token in bf16, all layers.
        missing, wrong, unknown: faults that prevent loading; names, and sentences for ``wrong``.
        ignored: stored tensors that are deliberately not used.
        notes: oddities that do not prevent loading.
    """

    path: str
    model_type: str
    format: str
    num_layers: int
    max_position: int
    parameters: int
    active_parameters: int
    tensors: int
    shards: int
    tensor_bytes: int
    bytes_by_kind: Mapping[str, int]
    token_read_bytes: int
    kv_token_bytes: int
    missing: tuple[str, ...]
    wrong: tuple[str, ...]
    unknown: tuple[str, ...]
    ignored: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def loadable(self) -> bool:
        """Whether ``Checkpoint.open`` would accept the folder."""
        return not (self.missing or self.wrong or self.unknown)

    def to_json(self) -> dict[str, Any]:
        """The report as an object that ``json.dumps`` takes, ``loadable`` included."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        lists = {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}
        return {**lists, "loadable": self.loadable}


def inspect_model(path: Path) -> Report:
    """Reports on a model folder.

    Raises:
        ConfigError: config.json is unusable.
        CheckpointError: a file is missing or broken, or the index and the files disagree.
    """
    root = model_root(path)
    spec = ModelSpec.from_config(read_json(locate(root, "config.json")), where=str(root / "config.json"))
    index = read_index(root)
    match = match_tensors(spec, index.tensors)
    weights = tuple(match.stored.values())
    by_kind = Counter[str]()
    for stored in weights:
        by_kind[stored.info.kind] += sum(part.nbytes for part in stored.parts)
    return Report(
        path=str(root),
        model_type=spec.model_type,
        format=_format(weights),
        num_layers=spec.num_layers,
        max_position=spec.max_position,
        parameters=sum(map(_parameters, weights)),
        active_parameters=_per_token(spec, weights, _parameters),
        tensors=len(index.tensors),
        shards=len(index.shards),
        tensor_bytes=index.nbytes,
        bytes_by_kind=dict(by_kind),
        token_read_bytes=_per_token(spec, weights, _weight_bytes) + _embedding_row(weights),
        kv_token_bytes=DTYPE_BYTES["BF16"] * spec.kv_dim * spec.num_layers,
        missing=match.missing,
        wrong=match.wrong,
        unknown=match.unknown,
        ignored=match.ignored,
        notes=match.notes + index.notes,
    )


def _parameters(stored: Stored) -> int:
    return math.prod(stored.info.shape)


def _weight_bytes(stored: Stored) -> int:
    """Bytes that a multiplication reads: codes and scales, not the shape hint."""
    return stored.tensor.nbytes if isinstance(stored, Plain) else stored.packed.nbytes + stored.scale.nbytes


def _per_token(spec: ModelSpec, weights: Iterable[Stored], size: Callable[[Stored], int]) -> int:
    """Sum of ``size`` over what one token meets: ``top_k`` of the experts, all else but the embedding."""
    experts = sum(size(stored) for stored in weights if stored.info.kind == "expert")
    others = sum(size(stored) for stored in weights if stored.info.kind not in ("expert", "embedding"))
    return others + experts * spec.top_k // spec.num_experts


def _embedding_row(weights: Iterable[Stored]) -> int:
    return sum(_weight_bytes(s) // s.info.shape[0] for s in weights if s.info.kind == "embedding")


def _format(weights: Iterable[Stored]) -> str:
    """By the experts, which are nearly all of a model; their most frequent form if they differ."""
    experts = Counter(
        "int4" if isinstance(stored, Packed) else _DTYPE_WORDS[stored.tensor.dtype]
        for stored in weights
        if stored.info.kind == "expert"
    )
    return experts.most_common(1)[0][0] if experts else "unknown"
