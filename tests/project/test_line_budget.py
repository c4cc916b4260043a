"""Small files, small functions, no module state that functions rewrite, no notes of unfinished work."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

FILE_LINES = 450
FUNCTION_LINES = 80
PARAMETERS = 6
UNFINISHED = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X)\b")
TEXTS = ("*.py", "*.cc", "*.h", "*.md", "*.toml", "*.sh", "CMakeLists.txt", "Makefile")


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    names = [a.arg for a in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def test_files_are_short(root: Path) -> None:
    paths = (path for kind in ("*.py", "*.cc", "*.h") for path in (root / "src").rglob(kind))
    long = [f"{path.relative_to(root)}: {n}" for path in paths if (n := path.read_text().count("\n")) > FILE_LINES]
    assert not long, "\n".join(long)


def test_functions_are_short(trees: dict[str, ast.Module]) -> None:
    long = [
        f"{name}:{f.lineno} {f.name}: {n} lines"
        for name, tree in trees.items()
        if not name.startswith("tests/")
        for f in functions(tree)
        if (n := (f.end_lineno or f.lineno) - f.lineno + 1) > FUNCTION_LINES
    ]
    assert not long, "\n".join(long)


def test_functions_take_few_parameters(trees: dict[str, ast.Module]) -> None:
    """The cli is exempt: there a parameter is an option."""
    many = [
        f"{name}:{f.lineno} {f.name}: {parameters(f)} parameters"
        for name, tree in trees.items()
        if name.startswith("src/") and not name.startswith("src/perilune/cli/")
        for f in functions(tree)
        if parameters(f) > PARAMETERS
    ]
    assert not many, "\n".join(many)


def test_no_function_rewrites_module_state(trees: dict[str, ast.Module]) -> None:
    found = [f"{name}:{n.lineno}" for name, tree in trees.items() for n in ast.walk(tree) if isinstance(n, ast.Global)]
    assert not found, "\n".join(found)


def test_nothing_says_that_it_is_unfinished(root: Path) -> None:
    folders = ("src", "tests", "scripts", "benchmarks", "training", "docs", ".ci")
    paths = {path for folder in folders for kind in TEXTS for path in (root / folder).rglob(kind)}
    paths |= {path for kind in TEXTS for path in root.glob(kind)}
    found = [
        f"{path.relative_to(root)}:{number} {line.strip()}"
        for path in sorted(paths)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if UNFINISHED.search(line)
    ]
    assert not found, "\n".join(found)
