"""Errors and progress, with and without a terminal."""

from __future__ import annotations

import errno
import io

import pytest
from rich.console import Console

from perilune.cli import terminal
from perilune.cli.terminal import LoadView, print_error
from perilune.errors import ConfigError


def use_console(patch: pytest.MonkeyPatch, *, is_terminal: bool) -> io.StringIO:
    """Makes the module write to a string."""
    text = io.StringIO()

    def console(*, stderr: bool = False) -> Console:
        return Console(
            file=text,
            force_terminal=is_terminal,
            width=100,
            markup=False,
            highlight=False,
            soft_wrap=True,
            stderr=stderr,
        )

    patch.setattr(terminal, "console", console)
    return text


def test_an_error_is_two_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    text = use_console(monkeypatch, is_terminal=False)
    print_error(ConfigError("`[x]` is `3`, 4 is needed", hint="edit it"))
    assert text.getvalue() == "error: `[x]` is `3`, 4 is needed\nhint: edit it\n"


def test_colour_only_where_it_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    text = use_console(monkeypatch, is_terminal=True)
    print_error(ConfigError("bad"))
    assert "\x1b[1;31merror:" in text.getvalue()
    monkeypatch.setenv("NO_COLOR", "1")
    text = use_console(monkeypatch, is_terminal=True)
    print_error(ConfigError("bad"))
    assert "31m" not in text.getvalue()


def test_progress_in_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    text = use_console(monkeypatch, is_terminal=False)
    view = LoadView()
    view.phase("reading")
    for done in range(0, 4_000_001, 40_000):
        view.progress(done, 4_000_000)
    view.note("ready")
    lines = [line.split(" s  ")[-1] for line in text.getvalue().splitlines()]
    assert lines == [
        "reading",
        "weights 1.0 of 4.0 MB",
        "weights 2.0 of 4.0 MB",
        "weights 3.0 of 4.0 MB",
        "weights 4.0 of 4.0 MB",
        "ready",
    ]


def test_progress_as_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    text = use_console(monkeypatch, is_terminal=True)
    view = LoadView()
    view.progress(1_000_000, 4_000_000)
    view.progress(4_000_000, 4_000_000)
    view.close()
    view.close()
    assert "4.0/4.0 MB" in text.getvalue()
    assert "\x1b[?25h" in text.getvalue(), "the cursor is back"


def test_quiet_where_nobody_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    text = use_console(monkeypatch, is_terminal=False)
    view = LoadView(terminal_only=True)
    view.phase("reading")
    view.progress(1, 1)
    assert text.getvalue() == ""


def test_an_error_is_a_line_whatever_is_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    text = use_console(monkeypatch, is_terminal=False)
    print_error(ConfigError("`a\nb` says \x1b[2J", hint="\r\x85"))
    assert text.getvalue() == "error: `a\\nb` says \\u001b[2J\nhint: \\r\\u0085\n"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EPIPE], ids=["full", "nobody reads"])
def test_a_start_goes_on_where_nothing_can_be_told(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    class Broken(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(number, "no")

    monkeypatch.setattr("sys.stderr", Broken())
    view = LoadView()
    view.phase("reading")
    view.progress(1, 1)
    view.ready("it runs", {"model": "m"})
    view.note("stopped")
    print_error(ConfigError("bad", hint="mend it"))
