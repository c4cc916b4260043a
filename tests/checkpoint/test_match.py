"""Stored tensors against a configuration: found by presence, every fault by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from perilune.checkpoint.header import DTYPE_BYTES, TensorMeta
from perilune.checkpoint.match import MAX_MISSING, Match, Packed, Plain, match_tensors
from perilune.checkpoint.tiny import int4_config, tiny_config
from perilune.config import ModelSpec
from perilune.layout.names import expected_tensors

Tensors = dict[str, TensorMeta]
EXPERT = "model.layers.1.mlp.experts.3.down_proj.weight"


def meta(name: str, shape: tuple[int, ...], dtype: str = "BF16") -> TensorMeta:
    one = TensorMeta(name, dtype, shape, Path("/m/shard.safetensors"), 0, 0)
    return msgspec.structs.replace(one, end=one.numel * DTYPE_BYTES[dtype])


def stored(*metas: TensorMeta) -> Tensors:
    return {one.name: one for one in metas}


def packed(name: str, shape: tuple[int, int]) -> Tensors:
    out, width = shape
    return stored(
        meta(f"{name}_packed", (out, width // 8), "I32"),
        meta(f"{name}_scale", (out, width // 32)),
        meta(f"{name}_shape", (2,), "I64"),
    )


def spec_of(quant: bool = False, **overrides: Any) -> ModelSpec:
    config = tiny_config(**overrides)
    return ModelSpec.from_config(config | {"quantization_config": int4_config()} if quant else config)


def plain_model(spec: ModelSpec) -> Tensors:
    return stored(*(meta(info.name, info.shape) for info in expected_tensors(spec)))


def int4_model(spec: ModelSpec) -> Tensors:
    tensors: Tensors = {}
    for info in expected_tensors(spec):
        if info.kind == "expert":
            tensors |= packed(info.name, (info.shape[0], info.shape[1]))
        else:
            tensors |= stored(meta(info.name, info.shape))
    return tensors


def faultless(match: Match) -> bool:
    return not (match.missing or match.wrong or match.unknown)


def test_both_forms_are_found_by_what_is_there() -> None:
    match = match_tensors(spec_of(), plain_model(spec_of()))
    assert faultless(match)
    assert all(isinstance(found, Plain) for found in match.stored.values())
    spec = spec_of(quant=True)
    match = match_tensors(spec, int4_model(spec))
    assert faultless(match)
    assert match.notes == ()
    assert all(isinstance(found, Packed) == (found.info.kind == "expert") for found in match.stored.values())
    assert list(match.stored) == [info.name for info in expected_tensors(spec)]


def test_any_linear_may_be_packed_but_nothing_else() -> None:
    spec = spec_of(quant=True)
    tensors = int4_model(spec)
    name = "model.layers.0.self_attn.o_proj.weight"
    del tensors[name]
    match = match_tensors(spec, tensors | packed(name, (64, 64)))
    assert faultless(match)
    assert match.notes == (f"quantization_config.ignore covers 1 weights that are packed, first `{name}`",)
    router = "model.layers.1.mlp.gate.weight"
    tensors = int4_model(spec)
    del tensors[router]
    match = match_tensors(spec, tensors | packed(router, (8, 64)))
    assert match.missing == (router,)
    assert set(match.unknown) == {f"{router}_packed", f"{router}_scale", f"{router}_shape"}


def test_packed_without_a_quantization_config() -> None:
    match = match_tensors(spec_of(), int4_model(spec_of()))
    assert f"`{EXPERT}_packed` is packed INT4, but config.json has no quantization_config" in " ".join(match.wrong)
    assert match.missing == ()
    assert match.unknown == ()


def test_quantization_config_over_plain_weights() -> None:
    spec = spec_of(quant=True)
    match = match_tensors(spec, plain_model(spec))
    assert faultless(match)
    assert match.notes == (
        "config.json has a quantization_config, but no tensor is packed: weights are read as they are stored",
    )


def test_half_converted_experts() -> None:
    spec = spec_of(quant=True)
    tensors = int4_model(spec) | stored(meta(EXPERT, (64, 32)))
    for part in ("packed", "scale", "shape"):
        del tensors[f"{EXPERT}_{part}"]
    match = match_tensors(spec, tensors)
    first = "model.layers.1.mlp.experts.0.gate_proj.weight"
    assert match.wrong == (f"routed experts are partly INT4 (`{first}`) and partly plain (`{EXPERT}`)",)


def edit(change: Callable[[Tensors], object]) -> Match:
    spec = spec_of(quant=True)
    tensors = int4_model(spec)
    change(tensors)
    return match_tensors(spec, tensors)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (meta("model.norm.weight", (63,)), "`model.norm.weight` in `shard.safetensors` has shape [63], config.json"),
        (meta("lm_head.weight", (64, 512)), "`lm_head.weight` in `shard.safetensors` has shape [64, 512]"),
        (meta("model.norm.weight", (64,), "F8_E4M3"), "is F8_E4M3, usable here: BF16, F16, F32, F64"),
        (meta(f"{EXPERT}_packed", (64, 5), "I32"), "has shape [64, 5], config.json implies [64, 4]"),
        (meta(f"{EXPERT}_packed", (64, 4), "U8"), "is U8, usable here: I32"),
        (meta(f"{EXPERT}_scale", (64, 2)), "has shape [64, 2], config.json implies [64, 1]"),
        (meta(f"{EXPERT}_scale", (64, 1), "F32"), "is F32, usable here: BF16"),
        (meta(EXPERT, (64, 32)), f"`{EXPERT}` is stored twice: plain and as `{EXPERT}_packed`"),
    ],
)  # fmt: skip
def test_wrong_tensors_are_said_in_full(tensor: TensorMeta, message: str) -> None:
    match = edit(lambda tensors: tensors.update(stored(tensor)))
    assert len(match.wrong) == 1
    assert message in match.wrong[0]
    assert match.missing == ()
    assert match.unknown == ()


def test_packed_without_scale() -> None:
    match = edit(lambda tensors: tensors.pop(f"{EXPERT}_scale"))
    assert match.wrong == (f"`{EXPERT}_packed` has no `{EXPERT}_scale` beside it",)


def test_scale_without_packed() -> None:
    match = edit(lambda tensors: tensors.pop(f"{EXPERT}_packed"))
    assert match.missing == (EXPERT,)
    assert set(match.unknown) == {f"{EXPERT}_scale", f"{EXPERT}_shape"}


def test_zero_points_are_unknown() -> None:
    match = edit(lambda tensors: tensors.update(stored(meta(f"{EXPERT}_zero_point", (8, 1), "I32"))))
    assert match.unknown == (f"{EXPERT}_zero_point",)


def test_weight_shape_is_a_hint() -> None:
    garbage = meta(f"{EXPERT}_shape", (3, 1), "F32")
    assert edit(lambda tensors: tensors.update(stored(garbage))).wrong == ()
    match = edit(lambda tensors: tensors.pop(f"{EXPERT}_shape"))
    assert faultless(match)
    assert match.notes == (f"1 packed weights lack weight_shape, first `{EXPERT}`: config.json gives the width",)


def test_disagreement_with_the_ignore_list_is_noted() -> None:
    config = int4_config() | {"ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"]}
    spec = ModelSpec.from_config(tiny_config(quantization_config=config))
    first = "model.layers.0.mlp.gate_proj.weight"
    assert match_tensors(spec, int4_model(spec)).notes == (
        f"quantization_config.ignore lacks 3 weights that are not packed, first `{first}`",
    )
    config = int4_config() | {"ignore": ["re:(a+)+$"]}
    spec = ModelSpec.from_config(tiny_config(quantization_config=config))
    assert "entry `re:(a+)+$` is of a form that is not understood" in match_tensors(spec, int4_model(spec)).notes[0]


def test_missing_unknown_and_ignored_names() -> None:
    spec = spec_of(num_nextn_predict_layers=1)
    tensors = plain_model(spec)
    del tensors["model.norm.weight"]
    tensors |= stored(
        meta("model.layers.3.eh_proj.weight", (64, 128)),
        meta("model.layers.0.self_attn.rotary_emb.inv_freq", (8,), "F32"),
        meta("model.layers.4.eh_proj.weight", (64, 128)),
        meta("vision_tower.weight", (1,)),
    )
    match = match_tensors(spec, tensors)
    assert match.missing == ("model.norm.weight",)
    assert match.ignored == ("model.layers.3.eh_proj.weight", "model.layers.0.self_attn.rotary_emb.inv_freq")
    assert match.unknown == ("model.layers.4.eh_proj.weight", "vision_tower.weight")


def test_a_configuration_that_asks_for_a_thousand_million_tensors_stops_early() -> None:
    spec = spec_of(num_hidden_layers=4096, n_routed_experts=65536)
    assert len(match_tensors(spec, {}).missing) == MAX_MISSING
