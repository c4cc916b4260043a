"""Training is a function of its recipe: a stopped run goes on to the same weights, and the same bytes come out."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
import torch
from training.configs import NANO, Recipe
from training.evaluate import wilson
from training.export import export
from training.model import initial
from training.optim import State, balance, rate, update
from training.train import train

from perilune.errors import UsageError


@pytest.fixture
def folders(tmp_path: Path, vocabulary: Path) -> Iterator[Path]:
    """Fresh folders for runs, with the vocabulary in place."""
    return (Path(shutil.copytree(vocabulary, tmp_path / f"run-{number}")) for number in count())


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_stopped_run_goes_on_to_the_same_bytes(small: Recipe, folders: Iterator[Path], tmp_path: Path) -> None:
    one, two, three = (next(folders) for _ in range(3))
    whole = train(small, one, one)
    train(small, two, two, stop=3)
    resumed = train(small, two, two)
    export(whole.average, small, one, tmp_path / "model-a")
    export(resumed.average, small, two, tmp_path / "model-b")
    first = files(tmp_path / "model-a")
    assert first == files(tmp_path / "model-b")
    assert {"config.json", "generation_config.json", "tiktoken.model", "tokenizer_config.json"} <= set(first)
    assert not (two / "state.safetensors").exists(), "the next run begins anew"
    other = train(replace(small, course=replace(small.course, seed=2)), three, three, stop=1)
    assert not torch.equal(other.params["lm_head.weight"], whole.params["lm_head.weight"])


def test_nano_goes_on_to_the_same_bytes_after_leaving(folders: Iterator[Path]) -> None:
    course = replace(NANO.course, tokens=300, knots=((-1, 0.0), (2, 1.0), (4, 0.0)), quantise_from=2)
    nano = replace(
        NANO, num_ranks=300, course=replace(course, widths=((0, 256), (3, 600)), drill_steps=2, watch_every=9)
    )
    one, two = next(folders), next(folders)
    whole = train(nano, one, one)
    asked: list[int] = []
    while (two / "state.safetensors").exists() or not asked:
        asked.append(1)
        resumed = train(nano, two, two, leave=lambda: True)
    assert len(asked) == 4, "it leaves after every step"
    for part in ("params", "momentum", "square", "average"):
        first, second = getattr(whole, part), getattr(resumed, part)
        assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_line_cut_off_by_a_kill_is_dropped(small: Recipe, folders: Iterator[Path]) -> None:
    run = next(folders)
    kept = '{"step": 0, "tokens": 1, "loss": 5.0}\n'
    (run / "log.jsonl").write_text(kept + '{"step": 7, "tokens": 9, "loss": 4.0}\n{"st')
    train(small, run, run, stop=1)
    assert (run / "log.jsonl").read_text() == kept


def test_a_state_does_not_go_on_under_another_recipe(small: Recipe, folders: Iterator[Path]) -> None:
    run = next(folders)
    train(small, run, run, stop=1)
    other = replace(small, course=replace(small.course, muon_lr=0.5))
    with pytest.raises(UsageError, match="another recipe"):
        train(other, run, run)


def test_training_learns(small: Recipe, folders: Iterator[Path]) -> None:
    run = next(folders)
    course = replace(small.course, knots=((-1, 0.0), (4, 1.0), (20, 0.0)), quantise_from=15)
    train(replace(small, course=course), run, run)
    (line,) = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    assert line["step"] == 20
    assert line["tokens"] >= 20 * course.tokens
    assert line["loss"] < 0.75 * math.log(small.spec.vocab_size)


def test_the_rate_is_linear_between_knots(small: Recipe) -> None:
    course = replace(small.course, knots=((-1, 0.0), (1, 1.0), (3, 1.0), (7, 0.0), (8, 0.5), (10, 0.0)))
    assert course.steps == 10
    rates = [0.5, 1, 1, 1, 0.75, 0.5, 0.25, 0, 0.5, 0.25]
    assert [rate(course, step) for step in range(10)] == pytest.approx(rates)


def test_muon_moves_a_matrix_by_an_orthogonal_step(small: Recipe) -> None:
    params = initial(small.spec, 0)
    name = "model.layers.1.mlp.experts.up_proj.weight"
    before = params[name].clone()
    state = State.fresh(params)
    grad = torch.eye(before.shape[-1]) + 0.01 * torch.randn(before.shape, generator=torch.Generator().manual_seed(0))
    update(state, {name: grad}, small.course, step=2)
    singular = torch.linalg.svdvals((before - state.params[name]) / small.course.muon_lr)
    assert 0.5 < float(singular.min()) <= float(singular.max()) < 1.5


def test_balancing_helps_the_expert_that_gets_less(small: Recipe) -> None:
    state = State.fresh(initial(small.spec, 0))
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    balance(state, {name: torch.tensor([10, 2, 4, 0])}, 0.5)
    assert state.params[name].tolist() == [-0.5, 0.5, 0.0, 0.5]


def test_wilsons_interval() -> None:
    low, high = wilson(95, 100)
    assert (low, high) == pytest.approx((0.8882, 0.9785), abs=1e-4)
