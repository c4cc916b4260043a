"""``perilune inspect MODEL``: what a model folder is and whether it can be served, from headers alone."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from perilune.errors import CheckpointError

if TYPE_CHECKING:
    from rich.table import Table

    from perilune.checkpoint.inspect import Report

SHOWN_FAULTS = 10
"""Faults of one sort that the table names; ``--json`` has all of them."""


def inspect(model: Path, as_json: bool) -> None:
    """Prints a report to stdout, as a table or as JSON.

    Raises:
        ConfigError: config.json is unusable.
        CheckpointError: a file is broken; or, after the report, faults prevent loading.
    """
    from perilune.checkpoint.inspect import inspect_model

    report = inspect_model(model)
    if as_json:
        sys.stdout.write(json.dumps(report.to_json(), indent=2) + "\n")
    else:
        from rich.console import Console

        console = Console(highlight=False, markup=False)
        console.print(_table(report))
        for line in _lines(report):
            console.print(line, soft_wrap=True)  # a line stays one line when it is piped
    if not report.loadable:
        count = len(report.missing) + len(report.wrong) + len(report.unknown)
        raise CheckpointError(f"{count} tensors prevent loading", hint="" if as_json else "`--json` lists all of them")


def _table(report: Report) -> Table:
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for label, value in _rows(report):
        table.add_row(label, value)
    return table


def _rows(report: Report) -> list[tuple[str, str]]:
    rows = [
        ("model", report.path),
        ("type", f"{report.model_type}, {report.num_layers} layers, up to {report.max_position:,} positions"),
        ("format", f"{report.format} experts, {report.tensors:,} tensors in {_files(report.shards)}"),
        ("weights", f"{report.parameters:,}, of which a token meets {report.active_parameters:,}"),
        ("bytes", _size(report.tensor_bytes)),
    ]
    rows += [(f"  {kind}", _size(count)) for kind, count in report.bytes_by_kind.items()]
    rows += [
        ("read per generated token", f"{_size(report.token_read_bytes)} at batch 1"),
        ("cache per token", f"{_size(report.kv_token_bytes)} in bf16"),
    ]
    return rows


def _lines(report: Report) -> list[str]:
    lines = [f"note: {note}" for note in report.notes]
    if report.ignored:
        lines.append(f"ignored: {len(report.ignored):,} tensors, first {report.ignored[0]}")
    for word, names in (("missing", report.missing), ("wrong", report.wrong), ("unknown", report.unknown)):
        lines += [f"{word}: {name}" for name in names[:SHOWN_FAULTS]]
        if len(names) > SHOWN_FAULTS:
            lines.append(f"{word}: … and {len(names) - SHOWN_FAULTS:,} more")
    return lines


def _files(count: int) -> str:
    return "1 file" if count == 1 else f"{count:,} files"


def _size(count: int) -> str:
    for unit, scale in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= scale:
            return f"{count:,} ({count / scale:.3f} {unit})"
    return f"{count:,}"
