"""Wheel and sdist: what is inside, that the library is found there, and that no compiler is needed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

NOWHERE = "/nowhere/c++"


def build_wheel(root: Path, folder: Path, **environment: str) -> tuple[Path, str]:
    """A wheel of this checkout, and what the build printed."""
    options = ["-v", "--no-deps", "--no-build-isolation", f"--config-settings=build-dir={folder / 'build'}"]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", folder, root],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    (wheel,) = folder.glob("perilune-*.whl")
    return wheel, done.stdout


def describe(wheel: Path, folder: Path) -> str:
    """What the unpacked wheel says of its native code; -S keeps the installed package out of the way."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)  # noqa: S202 - we have just made it
    code = "import sys; sys.path.insert(0, sys.argv[1]); from perilune import native; print(native.describe())"
    done = subprocess.run(
        [sys.executable, "-S", "-c", code, str(folder)], capture_output=True, text=True, check=False, cwd=folder
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module", autouse=True)
def _can_build() -> None:
    pytest.importorskip("scikit_build_core", reason="scikit-build-core builds the wheel")


def test_the_wheel_holds_what_runs_and_nothing_else(root: Path, tmp_path: Path) -> None:
    wheel, _ = build_wheel(root, tmp_path)
    assert wheel.name.split("-")[2:4] == ["py3", "none"]
    names = set(zipfile.ZipFile(wheel).namelist())
    inside = {name for name in names if name.startswith("perilune/")}
    package = root / "src"
    wanted = {
        path.relative_to(package).as_posix()
        for path in (package / "perilune").rglob("*")
        if path.is_file()
        and "__pycache__" not in path.parts
        and path.suffix not in {".cc", ".h", ".so", ".dylib"}
        and path.name != "CMakeLists.txt"
    }
    libraries = {name for name in inside if name.endswith((".so", ".dylib"))}
    assert inside - libraries == wanted
    assert any(name.startswith("perilune/assets/pico/") and name.endswith(".safetensors") for name in inside)
    assert all(name.startswith(("perilune/", "perilune-")) for name in names)
    assert any(name.endswith("/licenses/LICENSE") for name in names)
    assert bool(libraries) == (shutil.which("c++") is not None)
    assert describe(wheel, tmp_path / "unpacked").startswith("native codecs: none") == (not libraries)


def test_without_a_compiler_the_install_is_pure_python_and_says_so(root: Path, tmp_path: Path) -> None:
    wheel, output = build_wheel(root, tmp_path, CC=NOWHERE, CXX=NOWHERE)
    assert [line for line in output.splitlines() if "no C++ compiler was found, installing as pure Python" in line]
    assert not [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith((".so", ".dylib"))]
    assert describe(wheel, tmp_path / "unpacked") == "native codecs: none built (no C++ compiler), torch serves"


def test_the_sdist_holds_the_sources_and_not_the_workshop(root: Path, tmp_path: Path) -> None:
    code = "import sys; from scikit_build_core.build import build_sdist; print(build_sdist(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], cwd=root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as sources:
        names = {name.split("/", 1)[1] for name in sources.getnames() if "/" in name}
    assert {"pyproject.toml", "LICENSE", "README.md", "src/perilune/native/api.h"} <= names
    assert {name.split("/")[0] for name in names}.isdisjoint(
        {"training", "benchmarks", ".ci", ".venv", "build", ".git"}
    )
