"""The program as a user runs it, and a tiny model for it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from perilune.checkpoint.tiny import tiny_config, write_tiny

PROGRAM = (sys.executable, "-m", "perilune.cli.main")
Run = Callable[..., "subprocess.CompletedProcess[str]"]


def _environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
    return {**kept, "OMP_NUM_THREADS": "1"}


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
            env=_environment(),
        )
        return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())

    return run_program


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint."""
    path = tmp_path_factory.mktemp("models") / "tiny"
    write_tiny(path, tiny_config(max_position_embeddings=4096, num_hidden_layers=2))
    return path


class Process:
    """A running ``perilune serve``; reads its stderr all the time."""

    def __init__(self, popen: subprocess.Popen[str]) -> None:
        self.popen = popen
        self.lines: list[str] = []
        self.url = ""
        self._news = threading.Condition()
        self._ended = False
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    @property
    def stderr(self) -> str:
        return "\n".join(self.lines)

    def signal(self, number: signal.Signals) -> None:
        self.popen.send_signal(number)

    def wait(self, seconds: float = 15) -> int:
        code = self.popen.wait(seconds)
        self._reader.join(10)
        return code

    def wait_for(self, text: str) -> None:
        with self._news:
            assert self._news.wait_for(lambda: text in self.stderr or self._ended, 60)
        assert text in self.stderr, self.stderr

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.popen.kill()
        self.wait()

    def _read(self) -> None:
        assert self.popen.stderr is not None
        for line in self.popen.stderr:
            with self._news:
                self.lines.append(line.rstrip("\n"))
                self._news.notify_all()
        with self._news:
            self._ended = True
            self._news.notify_all()


ServeProcess = Callable[..., AbstractContextManager[Process]]
Serve = ServeProcess


@contextmanager
def _start(*arguments: str) -> Iterator[Process]:
    command = [*PROGRAM, "serve", "--port", "0", "--threads", "1", *arguments]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=_environment()) as popen:
        process = Process(popen)
        try:
            yield process
        finally:
            process.close()


@contextmanager
def _start_ready(*arguments: str) -> Iterator[Process]:
    with _start(*arguments) as process:
        process.wait_for("  try ")
        found = re.search(r"URL +(http://\S+)/v1", process.stderr)
        assert found, process.stderr
        process.url = found[1]
        yield process


@pytest.fixture(scope="session")
def serve_process() -> ServeProcess:
    """Starts ``perilune serve`` on a free port for a ``with`` block that begins at once."""
    return _start


@pytest.fixture(scope="session")
def serve() -> Serve:
    """The same, for a block that begins when the server is ready."""
    return _start_ready
