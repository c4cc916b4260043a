"""The program as a user runs it, and a tiny model for it."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.processes import PROGRAM, ServeProcess, environment, start, start_ready

from perilune.checkpoint.tiny import tiny_config, write_tiny

Serve = ServeProcess
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def run() -> Run:
    """Runs ``perilune`` with arguments, to its end."""

    def run_program(*arguments: str, stdin: str | bytes = "") -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [*PROGRAM, *arguments],
            input=stdin.encode() if isinstance(stdin, str) else stdin,
            capture_output=True,
            timeout=60,
            check=False,
            env=environment(),
        )
        return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())

    return run_program


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint."""
    path = tmp_path_factory.mktemp("models") / "tiny"
    write_tiny(path, tiny_config(max_position_embeddings=4096, num_hidden_layers=2))
    return path


@pytest.fixture(scope="session")
def serve_process() -> ServeProcess:
    """Starts ``perilune serve`` on a free port for a ``with`` block that begins at once."""
    return start


@pytest.fixture(scope="session")
def serve() -> Serve:
    """The same, for a block that begins when the server is ready."""
    return start_ready
