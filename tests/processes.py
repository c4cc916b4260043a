"""``perilune serve`` as a process, for tests that send it signals, and what became of streams that it answered."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

PROGRAM = (sys.executable, "-m", "perilune.cli.main")


def environment() -> dict[str, str]:
    """Ours, without what changes colours, and with one thread for arithmetic."""
    kept = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
    return {**kept, "OMP_NUM_THREADS": "1"}


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

    def find_url(self) -> None:
        """Takes the URL from the banner."""
        found = re.search(r"URL +(http://\S+)/v1", self.stderr)
        assert found, self.stderr
        self.url = found[1]

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


@contextmanager
def start(
    *arguments: str, wrapper: Sequence[str] = (), variables: Mapping[str, str] | None = None
) -> Iterator[Process]:
    """``perilune serve`` on a free port; ``wrapper`` is a program that runs it."""
    command = [*wrapper, *PROGRAM, "serve", "--port", "0", "--threads", "1", *arguments]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env={**environment(), **(variables or {})}
    ) as popen:
        process = Process(popen)
        try:
            yield process
        finally:
            process.close()


@contextmanager
def start_ready(*arguments: str, variables: Mapping[str, str] | None = None) -> Iterator[Process]:
    """The same, for a block that begins when the server is ready."""
    with start(*arguments, variables=variables) as process:
        process.wait_for("  try ")
        process.find_url()
        yield process
