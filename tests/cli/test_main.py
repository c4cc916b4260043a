"""Help, version, errors, exit codes."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from perilune import __version__, errors

if TYPE_CHECKING:
    from tests.cli.conftest import Run

DOCS = Path(__file__).resolve().parents[2] / "docs" / "reference" / "cli.md"


def test_version(run: Run) -> None:
    done = run("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"perilune {__version__}\n", "")


@pytest.mark.parametrize("verb", [(), ("serve",), ("chat",), ("inspect",)], ids=str)
def test_help(run: Run, verb: tuple[str, ...]) -> None:
    done = run(*verb, "--help")
    assert done.returncode == 0
    assert done.stdout.startswith("Usage: perilune")
    if verb != ("inspect",):
        assert "Examples:" in done.stdout
    assert done.stderr == ""


def test_help_imports_nothing_heavy() -> None:
    """What makes it quick; the time itself is the machine's."""
    code = (
        "import sys, perilune.cli.main as m; m.run(['serve', '--help']); print(*sorted(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    loaded = set(done.stderr.split())
    assert "Usage: perilune serve" in done.stdout
    assert not loaded & {"torch", "numpy", "httpx", "starlette", "uvicorn", "msgspec", "tiktoken", "rich.console"}


def test_help_is_quick(run: Run) -> None:
    best = 10.0
    for _ in range(5):
        start = time.perf_counter()
        run("--help")
        best = min(best, time.perf_counter() - start)
    assert best < 0.6, "about 0.15 s on a quiet machine"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("fly",), 2, "No such command 'fly'"),
        (("serve", "--prot", "1"), 2, "No such option"),
        (("serve", "--port", "99999999"), 2, "Invalid value for '--port'"),
        (("serve", "--device", "tpu"), 2, "'tpu' is not one of 'cpu', 'cuda'"),
        (("inspect",), 2, "Missing argument 'MODEL'"),
        (("serve", "/no/such/model", "--port", "0"), 3, "/no/such/model"),
        (("serve", "--port", "0", "--host", "0.0.0.0"), 2, "no authentication"),  # noqa: S104
        (("chat", "/no/such/model", "--url", "http://127.0.0.1:9"), 2, "both a model and --url"),
        (("chat", "--url", "http://127.0.0.1:9"), 6, "http://127.0.0.1:9 can't be talked to"),
        (("chat", "--url", "127.0.0.1:9"), 6, "127.0.0.1:9"),
        (("chat", "--url", "http://[::1"), 6, "no URL"),
        (("chat", "/no/such/model"), 3, "/no/such/model"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_errors(run: Run, arguments: tuple[str, ...], code: int, message: str) -> None:
    done = run(*arguments, stdin="hi")
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    last = [line for line in done.stderr.splitlines() if line.startswith(("error:", "hint:"))]
    assert last[0].startswith("error: ")
    assert message in last[0]
    assert "Traceback" not in done.stderr
    assert "\x1b" not in done.stderr, "no colour where there is no terminal"


def test_debug_shows_the_traceback(run: Run) -> None:
    done = run("--debug", "serve", "/no/such/model", "--port", "0")
    assert done.returncode == 3
    assert "Traceback" in done.stderr
    assert "error: " in done.stderr


def test_exit_codes_are_documented() -> None:
    text = DOCS.read_text()
    documented = {int(code) for code in re.findall(r"^\| (\d+) \|", text, re.MULTILINE)}
    classes = [value for value in vars(errors).values() if isinstance(value, type)]
    codes = {value.exit_code for value in classes if issubclass(value, errors.PeriluneError)}
    assert codes <= documented
