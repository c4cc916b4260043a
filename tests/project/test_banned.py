"""Bytes from outside never become code: no pickle or its kin, no eval, no object collectives, in any file of ours."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

MODULES = {"pickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
CALLS = {
    "builtins.eval",
    "builtins.exec",
    "eval",
    "exec",
    "torch.load",
    "torch.save",
    "yaml.full_load",
    "yaml.load",
    "yaml.unsafe_load",
}
METHODS = re.compile(r"(recv_pyobj|send_pyobj|(all_gather|broadcast|gather|recv|scatter|send)_object(_list)?)")
ARRAY_READERS = {"numpy.load", "numpy.lib.npyio.load"}


def offences(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and name of everything that is not allowed."""
    aliases = _aliases(tree)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            for name in _imported(node):
                if name.split(".")[0] in MODULES or name in CALLS or METHODS.fullmatch(name.rpartition(".")[2]):
                    yield node.lineno, name
        elif isinstance(node, ast.Attribute):
            name = _resolve(node, aliases)
            if name in CALLS or METHODS.fullmatch(node.attr):
                yield node.lineno, name
        elif isinstance(node, ast.Call):
            yield from _call(node, aliases)


def _imported(node: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [f"{node.module}.{alias.name}" for alias in node.names]


def _aliases(tree: ast.Module) -> dict[str, str]:
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias, full in zip(node.names, _imported(node), strict=True):
                if alias.asname or isinstance(node, ast.ImportFrom):
                    found[alias.asname or alias.name] = full
    return found


def _resolve(node: ast.expr, aliases: dict[str, str]) -> str:
    if isinstance(node, ast.Name):
        return aliases.get(node.id, node.id)
    if isinstance(node, ast.Attribute):
        return f"{_resolve(node.value, aliases)}.{node.attr}"
    return "?"


def _call(node: ast.Call, aliases: dict[str, str]) -> Iterator[tuple[int, str]]:
    name = _resolve(node.func, aliases)
    if isinstance(node.func, ast.Name) and name in CALLS:
        yield node.lineno, name
    if name in ARRAY_READERS and not any(
        key.arg == "allow_pickle" and isinstance(key.value, ast.Constant) and key.value.value is False
        for key in node.keywords
    ):
        yield node.lineno, f"{name} without allow_pickle=False"
    if name in ("__import__", "importlib.import_module") and node.args:
        target = node.args[0]
        if isinstance(target, ast.Constant) and str(target.value).split(".")[0] in MODULES:
            yield node.lineno, f"{name}({target.value!r})"


def test_no_file_reads_code_from_data(trees: dict[str, ast.Module]) -> None:
    found = [f"{name}:{line} {name}" for name, tree in trees.items() for line, name in offences(tree)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "import pickle as p",
        "from pickle import loads",
        "import dill.source",
        "def f():\n    import marshal",
        "__import__('pickle')",
        "import importlib\nimportlib.import_module('cloudpickle')",
        "import torch\ntorch.load(path)",
        "import torch as t\nt.load(path, weights_only=True)",
        "from torch import load",
        "from torch import load as read",
        "import torch\nreader = torch.load",
        "import numpy as np\nnp.load(path)",
        "import numpy as np\nnp.load(path, allow_pickle=True)",
        "from numpy import load\nload(path)",
        "eval(text)",
        "exec(text)",
        "import builtins\nbuiltins.eval(text)",
        "import yaml\nyaml.load(text, yaml.Loader)",
        "import torch.distributed as dist\ndist.broadcast_object_list(items)",
        "from torch.distributed import all_gather_object",
        "group.all_gather_object(items, item)",
        "socket.recv_pyobj()",
    ],
)
def test_an_offence_is_seen(code: str) -> None:
    assert list(offences(ast.parse(code)))


@pytest.mark.parametrize(
    "code",
    [
        "import numpy as np\nnp.load(path, allow_pickle=False)",
        "import yaml\nyaml.safe_load(text)",
        "import json\njson.load(file)",
        "model.eval()",
        "import torch.distributed as dist\ndist.all_gather(tensors, tensor)",
        "checkpoint.load(path)",
    ],
)
def test_what_is_harmless_passes(code: str) -> None:
    assert not list(offences(ast.parse(code)))
