"""A running server, and the environments of clients that are used as they come."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).resolve().parents[2]
Program = Callable[[str, str], Path]
RunClient = Callable[..., str]


@pytest.fixture(scope="session")
def server_url() -> Iterator[str]:
    """``perilune serve`` with the bundled model, as a program of its own."""
    command = [sys.executable, "-m", "perilune.cli.main", "serve", "--port", "0", "--threads", "1"]
    with subprocess.Popen([*command, "--max-model-len", "4096"], stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            found, ready = "", False
            while not ready and (line := process.stderr.readline()):
                if match := re.search(r"URL +(http://\S+)/v1$", line):
                    found = match[1]
                ready = "  try " in line
            assert found
            yield found
        finally:
            process.terminate()
            process.communicate(timeout=60)


@pytest.fixture(scope="session")
def program() -> Program:
    """A client's program in its own environment; the test is skipped, by name, where that was not made."""

    def find(client: str, name: str) -> Path:
        path = ROOT / "build" / "clients" / client
        if not (path / "complete").is_file():
            pytest.skip(f"{client} is not installed: tests/clients/setup_client.sh {client}")
        return path / "bin" / name

    return find


@pytest.fixture(scope="session")
def run_client(tmp_path_factory: pytest.TempPathFactory) -> RunClient:
    """Runs a client's program to its end, without any way to the network but the loopback that is needed."""
    home = tmp_path_factory.mktemp("home")

    def run(*command: str | Path, **environment: str) -> str:
        offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(home), "OPENAI_API_KEY": "unused"}
        kept = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
        done = subprocess.run(
            list(map(str, command)),
            env={**kept, "HOME": str(home), "NO_COLOR": "1", "COLUMNS": "160", **offline, **environment},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
            cwd=home,
        )
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        return done.stdout + done.stderr

    return run


def metric(url: str, name: str) -> float:
    """The sum of one metric's samples, from the server's page."""
    page = httpx.get(f"{url}/metrics", timeout=30).text
    found = re.findall(rf"^{name}(?:\{{[^}}]*\}})? (\S+)$", page, re.MULTILINE)
    return sum(map(float, found))


@pytest.fixture
def completed(server_url: str) -> Callable[[], float]:
    """How many generating requests the server has completed since the test began."""
    name = 'perilune_requests_total{outcome="complete"}'
    before = metric(server_url, re.escape(name))
    return lambda: metric(server_url, re.escape(name)) - before
