"""A small vocabulary learned on generated chats, and a recipe small enough to train in a test."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from training.configs import PICO, Recipe
from training.train import tokenizer_of

from perilune.text.tokenizer import Tokenizer


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """One thread, deterministic kernels: what reproducible training runs with."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def small() -> Recipe:
    """Pico with three small layers and a course of a few steps."""
    dims = PICO.dims | {"hidden_size": 64, "num_hidden_layers": 3, "n_routed_experts": 4, "intermediate_size": 64}
    course = replace(
        PICO.course,
        knots=((-1, 0.0), (1, 1.0), (5, 0.0)),
        quantise_from=2,
        drill_steps=3,
        tokens=400,
        widths=((0, 400),),
    )
    return replace(PICO, num_ranks=300, dims=dims, course=course)


@pytest.fixture(scope="session")
def vocabulary(tmp_path_factory: pytest.TempPathFactory, small: Recipe) -> Path:
    folder = tmp_path_factory.mktemp("vocabulary")
    tokenizer_of(small, folder)
    return folder


@pytest.fixture(scope="session")
def tokenizer(vocabulary: Path, small: Recipe) -> Tokenizer:
    return Tokenizer.from_dir(vocabulary, small.spec.vocab_size)
