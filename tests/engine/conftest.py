"""A tiny random model, built once, and ways to run requests on it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from perilune.checkpoint.tiny import write_tiny


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An INT4 checkpoint with a byte-level vocabulary."""
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("tiny") / "model"
    write_tiny(path, None, "int4", seed=3, tokenizer=None)
    return path
