"""Set-up: at once when nothing changed, anew when something did, one at a time."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PIP = """#!{python}
import sys
open({log!r}, "a").write(" ".join(sys.argv[1:]) + "\\n")
sys.exit({code})
"""


@pytest.fixture
def checkout(root: Path, tmp_path: Path) -> Path:
    """What set-up reads, in a folder of its own, with an interpreter that notes how it is called and does nothing."""
    for name in ("scripts/setup.py", "requirements/run.lock", "requirements/torch.txt", "pyproject.toml"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(root / name, tmp_path / name)
    shutil.copytree(root / "src/perilune/native", tmp_path / "src/perilune/native", ignore=shutil.ignore_patterns("_*"))
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/pip").touch()
    write_interpreter(tmp_path, code=0)
    return tmp_path


def write_interpreter(checkout: Path, code: int) -> None:
    fake = checkout / ".venv/bin/python"
    fake.write_text(PIP.format(python=sys.executable, log=str(checkout / "calls"), code=code))
    fake.chmod(0o755)


def set_up(checkout: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "scripts/setup.py", *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "CI"}
    return subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, check=False)


def calls(checkout: Path) -> list[str]:
    log = checkout / "calls"
    lines = log.read_text().splitlines() if log.exists() else []
    log.unlink(missing_ok=True)
    return lines


def test_the_first_call_installs_and_the_second_returns_at_once(checkout: Path) -> None:
    assert set_up(checkout, "run").returncode == 0
    first = calls(checkout)
    assert [word for line in first for word in line.split() if word in ("install", "check")] == 3 * ["install"] + [
        "check"
    ]
    assert "--require-hashes" in first[0]
    assert first[0].endswith("requirements/run.lock")
    assert "--require-hashes" not in first[1]
    assert first[1].endswith("requirements/torch.txt")
    done = set_up(checkout, "run")
    assert (done.returncode, done.stderr) == (0, "")
    assert calls(checkout) == []


@pytest.mark.parametrize(
    "name", ["requirements/run.lock", "requirements/torch.txt", "pyproject.toml", "src/perilune/native/isa/isa.h"]
)
def test_a_change_installs_anew(checkout: Path, name: str) -> None:
    set_up(checkout, "run")
    calls(checkout)
    with (checkout / name).open("a") as file:
        file.write("\n")
    set_up(checkout, "run")
    assert len(calls(checkout)) == 5


def test_a_failure_is_told_and_tried_again(checkout: Path) -> None:
    write_interpreter(checkout, code=3)
    done = set_up(checkout, "run")
    assert done.returncode == 1
    assert "error: set-up stopped, exit code 3" in done.stderr
    write_interpreter(checkout, code=0)
    calls(checkout)
    assert set_up(checkout, "run").returncode == 0
    assert len(calls(checkout)) == 5


def test_two_calls_wait_for_each_other(checkout: Path) -> None:
    with (checkout / "scripts/setup.py").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with subprocess.Popen(
            [sys.executable, "scripts/setup.py", "run"], cwd=checkout, stderr=subprocess.PIPE
        ) as second:
            with pytest.raises(subprocess.TimeoutExpired):
                second.wait(timeout=0.5)
            assert calls(checkout) == []
            fcntl.flock(lock, fcntl.LOCK_UN)
            second.communicate(timeout=30)
            assert second.returncode == 0
    assert len(calls(checkout)) == 5


def test_unknown_words_are_refused(checkout: Path) -> None:
    assert set_up(checkout).returncode == 2
    assert set_up(checkout, "all").returncode == 2
    assert calls(checkout) == []
