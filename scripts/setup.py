"""Makes `.venv` able to run or develop this checkout: locked packages, torch, the package itself with its native code.

Usage: python3 scripts/setup.py run|dev

Standard library only, since it runs before anything is installed. What was installed is recorded as a digest of the
files it came from, so a second call returns at once and a changed lock or C++ source installs anew. Two calls at once
wait for each other.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
NATIVE = ROOT / "src" / "perilune" / "native"
OLDEST = (3, 11)


def main(arguments: list[str]) -> int:
    if len(arguments) != 1 or arguments[0] not in ("run", "dev"):
        print("usage: python3 scripts/setup.py run|dev", file=sys.stderr)
        return 2
    if sys.version_info < OLDEST:
        print(
            f"error: Python {sys.version.split()[0]} is too old, {OLDEST[0]}.{OLDEST[1]} or newer is needed\n",
            file=sys.stderr,
        )
        print("hint: name another one: `make PYTHON=/path/to/python3.12`", file=sys.stderr)
        return 1
    with Path(__file__).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            return _set_up(arguments[0])
        except subprocess.CalledProcessError as error:
            print(
                f"error: set-up stopped, exit code {error.returncode}: {' '.join(map(str, error.cmd))}", file=sys.stderr
            )
            return 1


def _set_up(what: str) -> int:
    lock = ROOT / "requirements" / f"{what}.lock"
    torch = ROOT / "requirements" / "torch.txt"
    wanted = _digest(
        [lock, torch, ROOT / "pyproject.toml", *sorted(NATIVE.rglob("*.[ch]*")), NATIVE / "CMakeLists.txt"]
    )
    stamp = VENV / f"perilune-{what}.stamp"
    if stamp.is_file() and stamp.read_text() == wanted:
        return 0
    start = time.monotonic()
    _say(
        f"set-up: installing {lock.relative_to(ROOT)}, torch and this package into .venv (a few minutes the first time)"
    )
    if not (VENV / "bin" / "pip").exists():  # pip comes last: without it an earlier attempt was interrupted
        venv.create(VENV, with_pip=True)
    # The lock first: it holds torch's own pure dependencies, so that torch comes alone where its build needs no more.
    # --no-deps, since the lock is complete but for torch, which has no one hash: every platform has its own build.
    _pip("install", "--require-hashes", "--no-deps", "-r", lock)
    _pip("install", "-r", torch)
    _pip("install", "--no-deps", "--no-build-isolation", *_build_settings(), "--editable", ROOT)
    _pip("check")
    _run(PYTHON, "-c", "from perilune import native; print('set-up:', native.describe())")
    stamp.with_suffix(".new").write_text(wanted)
    stamp.with_suffix(".new").replace(stamp)
    _say(f"set-up: done in {time.monotonic() - start:.0f} s")
    return 0


def _build_settings() -> list[str]:
    # A user's newer compiler may know warnings that ours does not: only CI turns them into errors.
    return ["--config-settings=cmake.define.PERILUNE_WERROR=ON"] if os.environ.get("CI") else []


def _digest(paths: list[Path]) -> str:
    digest = hashlib.sha256(sys.version.encode())
    for path in paths:
        digest.update(f"\0{path.relative_to(ROOT)}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _pip(*arguments: str | Path) -> None:
    _run(PYTHON, "-m", "pip", "--quiet", "--quiet", "--disable-pip-version-check", *arguments)


def _run(*command: str | Path) -> None:
    subprocess.run(command, cwd=ROOT, check=True)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
