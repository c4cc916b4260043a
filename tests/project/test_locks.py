"""What is installed is locked: complete, hashed, silent about where it came from, and new enough to be safe."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

SAFE = {"h11": (0, 16), "starlette": (0, 49, 1), "jinja2": (3, 1, 6), "requests": (2, 32, 4), "urllib3": (2, 5)}
"""Oldest versions without a known fault that reaches us, reviewed by hand: no scanner is asked."""

SAFE_TORCH = (2, 6)  # older ones run code in torch.load even with weights_only
LOCKS = ("run.lock", "dev.lock")
NOT_IMPORTED = {"numpy"}
"""Needed without an import of ours; docs/dependencies.md says why."""


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(path: Path) -> dict[str, str]:
    return {normal(n): v for n, v in re.findall(r"^([A-Za-z0-9._-]+)==(\S+) \\$", path.read_text(), re.MULTILINE)}


def version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text.split("+")[0]))


def wanted(root: Path, *extras: str) -> set[str]:
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *(line for extra in extras for line in project["optional-dependencies"][extra])]
    build = (root / "requirements" / "build.in").read_text().splitlines()
    lines += [line for line in build if line and not line.startswith("#")]
    return {normal(re.split(r"[<>=!~\[; ]", line)[0]) for line in lines} - {"torch"}


@pytest.mark.parametrize("lock", LOCKS)
def test_locks_name_no_host(root: Path, lock: str) -> None:
    text = (root / "requirements" / lock).read_text()
    assert not re.search(r"://|index-url|find-links|trusted-host|\.(com|org|io|net)\b", text)


@pytest.mark.parametrize("lock", LOCKS)
def test_every_pin_has_hashes(root: Path, lock: str) -> None:
    blocks = re.split(r"\n(?=[A-Za-z0-9])", (root / "requirements" / lock).read_text())[1:]
    assert len(blocks) == len(pins(root / "requirements" / lock)) > 20
    assert all("--hash=sha256:" in block for block in blocks)


def test_locks_hold_what_pyproject_asks_for_and_no_torch(root: Path) -> None:
    run, dev = (pins(root / "requirements" / lock) for lock in LOCKS)
    assert wanted(root) <= run.keys()
    assert wanted(root, "test", "dev") <= dev.keys()
    assert "torch" not in run.keys() | dev.keys()
    assert run.items() <= dev.items()


def test_torch_is_pinned_apart(root: Path) -> None:
    assert (root / "requirements" / "torch.txt").read_text() == "torch==2.13.0\n"


def test_locked_versions_are_safe(root: Path) -> None:
    found = pins(root / "requirements" / "dev.lock")
    assert SAFE.keys() <= found.keys()
    assert [f"{name} {found[name]}" for name, oldest in SAFE.items() if version(found[name]) < oldest] == []
    assert version((root / "requirements" / "torch.txt").read_text().split("==")[1]) >= SAFE_TORCH


def test_the_package_imports_what_it_declares(root: Path, trees: dict[str, ast.Module]) -> None:
    imported = set()
    for name, tree in trees.items():
        if name.startswith("src/"):
            for node in ast.walk(tree):
                if isinstance(node, ast.Import):
                    imported |= {alias.name.split(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and node.module:
                    imported.add(node.module.split(".")[0])
    packages = packages_distributions()  # a module and the package that holds it may differ: zmq, pyzmq
    foreign = {normal(packages[module][0]) for module in imported - set(sys.stdlib_module_names) - {"perilune"}}
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    required = {normal(re.split(r"[<>=!~\[; ]", line)[0]) for line in project["dependencies"]}
    assert foreign == required - NOT_IMPORTED
