"""Documents say what is there: files, dependencies, commands, links."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROW = re.compile(r"^\| `([^`]+)` \| *(\S.*?) *\|$", re.MULTILINE)
SNIPPET = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


def documents(root: Path) -> list[Path]:
    return [*sorted(root.glob("*.md")), *sorted((root / "docs").rglob("*.md"))]


def is_only_docstring(path: Path) -> bool:
    body = ast.parse(path.read_text()).body
    return len(body) == 1 and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)


def test_every_file_of_the_package_has_its_line(root: Path) -> None:
    package = root / "src" / "perilune"
    built = {".pyc", ".so", ".dylib"}
    present = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*")
        if path.is_file()
        and path.suffix not in built
        and not (path.name == "__init__.py" and is_only_docstring(path))
        and not path.name.startswith(".")
    }
    page = (root / "docs" / "structure.md").read_text()
    inside, beside = page.split("## Beside the package")
    listed = [name for name, _ in ROW.findall(inside)]
    assert sorted(present - set(listed)) == [], "without a line in docs/structure.md"
    assert sorted(set(listed) - present) == [], "in docs/structure.md, but not there"
    assert len(listed) == len(set(listed))
    assert [name for name, _ in ROW.findall(beside) if not (root / name).exists()] == []


def declared(root: Path) -> dict[str, set[str]]:
    """Names of the packages that pyproject.toml asks for, by the heading of docs/dependencies.md they belong under."""
    project: dict[str, Any] = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    build = [
        line
        for line in (root / "requirements" / "build.in").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    groups = {
        "To run": project["dependencies"],
        "To build": build,
        "To test": project["optional-dependencies"]["test"],
        "To develop": project["optional-dependencies"]["dev"],
    }
    return {title: {re.split(r"[<>=!~\[; ]", line)[0] for line in lines} for title, lines in groups.items()}


def test_every_dependency_has_its_reason(root: Path) -> None:
    page = (root / "docs" / "dependencies.md").read_text()
    sections = dict(part.split("\n", 1) for part in page.split("\n## ")[1:])
    for title, names in declared(root).items():
        assert {name for name, _ in ROW.findall(sections[title])} == names, title


def perilune_verbs() -> set[str]:
    from perilune.cli.main import app

    return {command.name for command in app.registered_commands if command.name}


def commands(root: Path) -> Iterator[tuple[str, str]]:
    """Every command in a document's shell block, and every one that stands alone in backticks."""
    for path in documents(root):
        text = path.read_text()
        lines = [line.split("#")[0].strip() for block in SNIPPET.findall(text) for line in block.splitlines()]
        for command in [*lines, *INLINE.findall(text)]:
            yield path.name, command


def test_make_targets_in_documents_exist(root: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (root / "Makefile").read_text(), re.MULTILINE))
    used = {(name, word) for name, line in commands(root) for word in re.findall(r"^make ([a-z][a-z-]*)", line)}
    assert len(used) > 5
    assert [f"{name}: make {word}" for name, word in sorted(used) if word not in targets] == []


def test_verbs_in_documents_exist(root: Path) -> None:
    pattern = re.compile(r"^(?:\.venv/bin/)?perilune ([a-z]+)")
    used = {(name, verb) for name, line in commands(root) for verb in pattern.findall(line)}
    assert {verb for _, verb in used} >= {"serve", "chat", "inspect"}
    assert [f"{name}: perilune {verb}" for name, verb in sorted(used) if verb not in perilune_verbs()] == []


def test_scripts_in_documents_exist(root: Path) -> None:
    used = {(name, script) for name, line in commands(root) for script in re.findall(r"^python3? (\S+\.py)", line)}
    assert used
    assert [f"{name}: {script}" for name, script in sorted(used) if not (root / script).is_file()] == []


def test_links_lead_somewhere(root: Path) -> None:
    broken = [
        f"{path.relative_to(root)}: {target}"
        for path in documents(root)
        for target in LINK.findall(path.read_text())
        if not target.startswith(("http:", "https:", "mailto:")) and not (path.parent / target).exists()
    ]
    assert broken == []


@pytest.mark.parametrize("verb", ["", "serve", "chat", "inspect"])
def test_help_answers(verb: str) -> None:
    words = [verb, "--help"] if verb else ["--help"]
    done = subprocess.run(
        [sys.executable, "-m", "perilune.cli.main", *words], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Usage" in done.stdout
