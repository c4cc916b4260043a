"""The level law: a module imports only from lower levels or its own folder; host-side logic imports without torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

LEVELS = {
    "errors": 0,
    "types": 0,
    "config": 0,
    "logs": 0,
    "memory": 0,
    "layout": 1,
    "quant": 1,
    "kv": 1,
    "text": 1,
    "native": 1,
    "ops": 2,
    "parallel": 2,
    "model": 3,
    "checkpoint": 3,
    "grammar": 4,
    "sched": 4,
    "sample": 4,
    "engine": 5,
    "chat": 6,
    "server": 6,
    "router": 6,
    "recipes": 6,
    "plan": 6,
    "convert": 6,
    "bench": 6,
    "evals": 6,
    "verify": 6,
    "cli": 7,
    "llm": 7,
}
SAME_LEVEL = {("types", "errors"), ("config", "errors"), ("quant", "native"), ("server", "chat"), ("plan", "recipes")}
"""What a level's members may take from each other, by name."""

TORCH_FREE = (
    "errors",
    "types",
    "config",
    "logs",
    "memory",
    "layout",
    "kv",
    "text",
    "native",
    "sched",
    "chat",
    "server",
    "cli",
)
TORCH_FREE_FILES = (
    "memory.py",
    "checkpoint/index.py",
    "engine/addresses.py",
    "engine/admission.py",
    "engine/child.py",
    "engine/messages.py",
    "engine/options.py",
    "engine/publish.py",
    "engine/remote.py",
    "engine/replay.py",
    "engine/streams.py",
)


def part_of(name: str) -> str:
    """src/perilune/text/tokenizer.py → text; src/perilune/errors.py → errors; the package's own file → nothing."""
    path = Path(name).relative_to("src/perilune")
    first = path.parts[0].removesuffix(".py")
    return "" if first == "__init__" else first


def imported_parts(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "perilune":
            names = [f"perilune.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        else:
            continue
        for name in names:
            pieces = name.split(".")
            if pieces[0] == "perilune" and len(pieces) > 1 and not pieces[1].startswith("__"):
                yield node.lineno, pieces[1]


def breaches(name: str, tree: ast.Module) -> list[str]:
    own = part_of(name)
    if not own:
        return [
            f"{name}:{line} imports {other}, the package itself imports nothing" for line, other in imported_parts(tree)
        ]
    found = []
    for line, other in imported_parts(tree):
        allowed = other == own or LEVELS[other] < LEVELS[own] or (own, other) in SAME_LEVEL
        if not allowed:
            found.append(f"{name}:{line} ({own}, level {LEVELS[own]}) imports {other} (level {LEVELS[other]})")
    return found


def test_every_part_has_a_level(trees: dict[str, ast.Module]) -> None:
    parts = {part_of(name) for name, tree in trees.items() if name.startswith("src/")} - {""}
    assert parts <= LEVELS.keys()


def test_imports_go_down(trees: dict[str, ast.Module]) -> None:
    found = [line for name, tree in trees.items() if name.startswith("src/") for line in breaches(name, tree)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("src/perilune/model/mla.py", "from perilune.checkpoint.load import Checkpoint"),
        ("src/perilune/checkpoint/load.py", "import perilune.model.stack"),
        ("src/perilune/text/stop.py", "from perilune import engine"),
        ("src/perilune/chat/render.py", "def f():\n    from perilune.server import app"),
        ("src/perilune/__init__.py", "from perilune.engine.llm import LLM"),
    ],
)
def test_a_breach_is_seen(name: str, code: str) -> None:
    assert len(breaches(name, ast.parse(code))) == 1


def test_host_side_logic_imports_without_torch(trees: dict[str, ast.Module], root: Path) -> None:
    names = [
        name
        for name, tree in trees.items()
        if name.startswith("src/")
        and (part_of(name) in TORCH_FREE or name.removeprefix("src/perilune/") in TORCH_FREE_FILES)
    ]
    modules = [
        name.removeprefix("src/").removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in names
    ]
    code = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "    if 'torch' in sys.modules:\n"
        "        sys.exit(f'{name} imports torch')\n"
    )
    done = subprocess.run([sys.executable, "-c", code, *modules], capture_output=True, text=True, cwd=root, check=False)
    assert done.returncode == 0, done.stderr
