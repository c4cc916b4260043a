"""What people see: errors, notes, progress of loading. Data goes to stdout, all of this to stderr.

Everything reads well without colour and without a terminal: NO_COLOR is respected (by rich), and where stderr is no
terminal, progress is a few plain lines. A stderr that can't be written any more (a full disk, a reader that has gone)
stops nothing.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Iterator, Mapping
from typing import IO, TYPE_CHECKING, Protocol

from perilune.logs import fields, printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

    from perilune.errors import PeriluneError


def console(*, stderr: bool = False) -> Console:
    """A console that prints text as it is: no markup, no guesses at what deserves colour."""
    from rich.console import Console

    made = Console(stderr=stderr, markup=False, highlight=False, soft_wrap=True, emoji=False)
    if stderr:
        made.on_broken_pipe = lambda: _silence(made)  # type: ignore[method-assign]  # rich would end the program
    return made


def abandon(stream: IO[str]) -> None:
    """What is still to be written to ``stream`` goes nowhere: Python's own attempts at its end could only fail."""
    with contextlib.suppress(OSError, ValueError):  # it has no descriptor
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def print_error(error: PeriluneError) -> None:
    """``error:`` what is wrong, ``hint:`` what to do."""
    show_error(error.message, error.hint)


def show_error(message: str, hint: str = "") -> None:
    """The only printer of errors. Each is a line, whatever a file, a server or a command line put into it."""
    err = console(stderr=True)
    with _unheard(err):
        err.print("error:", style="bold red", end=" ")
        err.print(printable(message))
        if hint:
            err.print("hint:", style="bold cyan", end=" ")
            err.print(printable(hint))


@contextlib.contextmanager
def _unheard(err: Console) -> Iterator[None]:
    """A failure to write is no failure of what is being told."""
    try:
        yield
    except OSError:
        _silence(err)


def _silence(err: Console) -> None:
    err.quiet = True
    abandon(sys.stderr)


class StartView(Protocol):
    """Who is told how a start goes. ``progress`` may be called from any thread."""

    @property
    def seconds(self) -> float: ...

    def phase(self, name: str) -> None: ...

    def progress(self, done: int, total: int) -> None: ...

    def ready(self, headline: str, facts: Mapping[str, str]) -> None: ...

    def note(self, text: str) -> None: ...

    def close(self) -> None: ...


class LogView:
    """The same for programs: each event is a line of the log."""

    def __init__(self) -> None:
        self._log = logging.getLogger("perilune.start")
        self._started = time.monotonic()

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self._started

    def phase(self, name: str) -> None:
        """A new phase begins."""
        self._log.info(name, extra=fields(seconds=round(self.seconds, 3)))

    def progress(self, done: int, total: int) -> None:
        """``/ready`` tells it; the log does not."""

    def ready(self, headline: str, facts: Mapping[str, str]) -> None:
        """What was started, in one event."""
        self._log.info(headline, extra=fields(**facts))

    def note(self, text: str) -> None:
        """An event."""
        self._log.info(text)

    def close(self) -> None:
        """There is nothing to take away."""


class LoadView:
    """The phases of a start: a bar on a terminal, else a line for each phase and each quarter of the weights.

    ``progress`` may be called from any thread. ``terminal_only``: says nothing where stderr is no terminal.
    """

    _STEPS = 4

    def __init__(self, *, terminal_only: bool = False) -> None:
        self._console = console(stderr=True)
        self._console.quiet = terminal_only and not self._console.is_terminal
        self._started = time.monotonic()
        self._told = 0
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self._started

    def phase(self, name: str) -> None:
        """A new phase begins."""
        self.note(f"{self.seconds:6.1f} s  {name}", style="dim")

    def progress(self, done: int, total: int) -> None:
        """``done`` of ``total`` bytes of weights are loaded."""
        if self._console.is_terminal:
            self._advance_bar(done, total)
            return
        step = self._STEPS * done // max(total, 1)
        if step > self._told:
            self._told = step
            self.phase(f"weights {done / 1e6:.1f} of {total / 1e6:.1f} MB")

    def close(self) -> None:
        """Takes the bar away."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = self._task = None

    def ready(self, headline: str, facts: Mapping[str, str]) -> None:
        """What was started: a line, and one for each fact."""
        self.note(headline, style="bold green")
        for name, fact in facts.items():
            self.note(f"  {name:<7} {fact}")

    def note(self, text: str, style: str | None = None) -> None:
        """A line of its own."""
        self.close()
        with _unheard(self._console):
            self._console.print(text, style=style)

    def _advance_bar(self, done: int, total: int) -> None:
        if self._bar is None or self._task is None:
            from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

            columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
            self._bar = Progress(*columns, console=self._console, transient=True)
            self._task = self._bar.add_task("weights", total=total)
            self._bar.start()
        self._bar.update(self._task, completed=done, total=total)
