"""Equality with transformers' DeepseekV3, through the benchmark that prints it; and that the comparison can fail."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch

from perilune.checkpoint.tiny import write_tiny
from perilune.ops.ref import RefOps

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "equal_transformers.py"


@pytest.fixture(scope="module")
def oracle() -> Iterator[ModuleType]:
    torch.set_num_threads(1)
    spec = importlib.util.spec_from_file_location("equal_transformers", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_the_cases_cover_every_switch(oracle: ModuleType) -> None:
    cases = oracle.random_cases(28, 0)
    mixes = {
        (c.config["n_group"], c.config["q_lora_rank"] is None, (c.config["rope_scaling"] or {}).get("beta_fast"))
        for c in cases
    }
    assert {(g, q, b) for g in (1, 4) for q in (True, False) for b in (1.0, 32.0)} <= mixes
    assert {c.length for c in cases} >= {1, 2, 65, 300}
    assert any(c.config["rope_scaling"] is None for c in cases)
    assert {c.config["norm_topk_prob"] for c in cases} == {True, False}
    assert {(c.config["rope_scaling"] or {}).get("mscale") for c in cases} >= {1.0, 0.707}
    assert {(c.config["rope_scaling"] or {}).get("mscale_all_dim") for c in cases} >= {1.0, 0.0}


@pytest.mark.parametrize("index", [0, 1, 3, 4, 6, 10, 16])
def test_logits_equal(oracle: ModuleType, tmp_path: Path, index: int) -> None:
    case = oracle.random_cases(index + 1, 0)[index]
    write_tiny(tmp_path, case.config, "float32", case.seed)
    exact = oracle.compare(case, tmp_path, torch.float64, "cpu")
    assert exact.rows > 0
    assert exact.worst <= 1e-9, exact.worst_run
    assert oracle.compare(case, tmp_path, torch.float32, "cpu").worst <= 1e-4


@pytest.mark.slow
def test_all_cases_of_the_benchmark(oracle: ModuleType) -> None:
    summary = oracle.run(28, 0, "cpu", lambda line: None)
    assert oracle.passed(summary)


def test_nothing_compared_is_not_passed(oracle: ModuleType) -> None:
    assert not oracle.passed(oracle.run(0, 0, "cpu", lambda line: None))
    row = {"float64_rows": 5, "float32_rows": 0}
    assert not oracle.passed({"float64_worst_rel": 0, "float32_worst_rel": 0, "cases": 20, "results": [row] * 20})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_logits_equal_on_cuda(oracle: ModuleType) -> None:
    summary = oracle.run(8, 0, "cuda", lambda line: None)
    assert summary["float64_worst_rel"] <= 1e-9
    assert summary["float32_worst_rel"] <= 1e-4


def _swapped_rope(self: RefOps, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
    return RIGHT["rope"](self, x, cos, -sin)


def _biased_weights(
    self: RefOps, x: torch.Tensor, router: torch.Tensor, bias: torch.Tensor, spec: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    ids, weights = RIGHT["route"](self, x, router, bias, spec)
    return ids, weights * (1 + 1e-7)


def _other_eps(self: RefOps, x: torch.Tensor, weight: torch.Tensor, eps: float) -> Any:
    return RIGHT["rms_norm"](self, x, weight, eps + 1e-6)


RIGHT: dict[str, Any] = {name: getattr(RefOps, name) for name in ("rope", "route", "rms_norm")}


@pytest.mark.parametrize(
    ("op", "wrong"), [("rope", _swapped_rope), ("route", _biased_weights), ("rms_norm", _other_eps)]
)
def test_a_small_mistake_is_noticed(oracle: ModuleType, tmp_path: Path, op: str, wrong: Any) -> None:
    """Turning the wrong way, weights off by 1e-7, an epsilon of 1.1e-5 for 1e-5: each fails the float64 bar."""
    case = oracle.random_cases(4, 0)[3]
    write_tiny(tmp_path, case.config, "float32", case.seed)
    with mock.patch.object(RefOps, op, wrong):
        assert oracle.compare(case, tmp_path, torch.float64, "cpu").worst > 1e-9
