"""Help, version, errors, exit codes."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.processes import PROGRAM, environment

from perilune import __version__, errors
from perilune.cli.start import bundled_model

if TYPE_CHECKING:
    from tests.cli.conftest import Run

PICO = str(bundled_model())
DOCS = Path(__file__).resolve().parents[2] / "docs" / "reference" / "cli.md"


def test_version(run: Run) -> None:
    done = run("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"perilune {__version__}\n", "")


@pytest.mark.parametrize("verb", [(), ("serve",), ("chat",), ("inspect",)], ids=str)
def test_help(run: Run, verb: tuple[str, ...]) -> None:
    done = run(*verb, "-h" if verb else "--help")
    assert done.returncode == 0
    assert done.stdout.startswith("Usage: perilune")
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
        (("serve", "--port", "99999999"), 2, "`--port` is 99999999, a whole number from 0 to 65535 is needed"),
        (("serve", "--device", "tpu"), 2, "`--device` is \"tpu\", one of 'cpu', 'cuda' is needed"),
        (("inspect",), 2, "Missing argument 'MODEL'"),
        (("serve", "/no/such/model", "--port", "0"), 3, "/no/such/model"),
        (("serve", "--port", "0", "--host", "0.0.0.0"), 2, "no authentication"),  # noqa: S104
        (("chat", "/no/such/model", "--url", "http://127.0.0.1:9"), 2, "both a model and --url"),
        (("chat", "--url", "http://127.0.0.1:9"), 6, "http://127.0.0.1:9 can't be talked to"),
        (("chat", "--url", "127.0.0.1:9"), 6, "'127.0.0.1:9' is no URL: it does not begin with http"),
        (("chat", "--url", "http://[::1"), 6, "no URL"),
        (("chat", "/no/such/model"), 3, "/no/such/model"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_errors(run: Run, arguments: tuple[str, ...], code: int, message: str) -> None:
    done = run(*arguments, stdin="hi")
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    last = [line for line in done.stderr.splitlines() if not re.match(r" *\d+\.\d s ", line)]
    assert len(last) <= 2
    assert all(line.startswith(word) for line, word in zip(last, ("error: ", "hint: "), strict=False))
    assert message in last[0]
    assert "Traceback" not in done.stderr
    assert "\x1b" not in done.stderr, "no colour where there is no terminal"


def test_hints_name_the_verb(run: Run) -> None:
    assert "hint: perilune serve --help lists" in run("serve", "--prot", "1").stderr
    assert "hint: perilune --help lists" in run("fly").stderr


def test_without_a_verb_there_is_help(run: Run) -> None:
    done = run()
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("Usage: perilune")
    assert "error" not in done.stderr.splitlines()[0]


PRINTING = [
    ("inspect", PICO),
    ("inspect", PICO, "--json"),
    ("serve", "--show-config"),
    ("serve", "--help"),
    ("--version",),
]


def shell(command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a line of bash, in which ``perilune`` is the program with ``arguments``."""
    program = shlex.join([*PROGRAM, *arguments])
    return subprocess.run(
        ["bash", "-c", command.replace("perilune", program)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=environment(),
    )


@pytest.mark.parametrize("arguments", PRINTING, ids=lambda value: value[-1].removeprefix(PICO) or "table")
def test_output_that_cannot_be_written(arguments: tuple[str, ...]) -> None:
    full = shell("perilune > /dev/full", *arguments)
    assert (full.returncode, full.stderr) == (1, "error: the output cannot be written: no space left on device\n")
    closed = shell("perilune >&-", *arguments)
    assert (closed.returncode, closed.stderr) == (1, "error: the output cannot be written: bad file descriptor\n")
    left = shell("perilune | true; exit ${PIPESTATUS[0]}", *arguments)
    assert (left.returncode, left.stderr) == (141, ""), "as shells tell of SIGPIPE, in silence"


def test_errors_that_cannot_be_told() -> None:
    for sink in ("2> /dev/full", "2>&-", "2> >(true)"):
        assert shell(f"perilune {sink}", "fly").returncode == 2


def test_a_closed_stdin_is_an_empty_one() -> None:
    done = shell("perilune <&-", "chat", "--url", "http://127.0.0.1:9")
    assert (done.returncode, done.stderr.splitlines()[0]) == (
        6,
        "error: http://127.0.0.1:9 can't be talked to: connection refused",
    )


@pytest.mark.parametrize(
    "url", ["http://u:hunter2hunter2@127.0.0.1:9", "u:hunter2hunter2@h:x", "http://hunter2hunter2@["]
)
def test_passwords_of_a_url_are_not_shown(run: Run, url: str) -> None:
    done = run("--debug", "chat", "--url", url, stdin="hi")
    assert done.returncode == 6
    assert "hunter2" not in done.stderr


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
