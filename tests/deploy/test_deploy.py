"""What ``deploy/`` offers fits the server: metric names, options, exit codes; and its files are well formed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from perilune import errors
from perilune.cli.main import app
from perilune.cli.start import bundled_model
from perilune.config import read_json
from perilune.engine.options import EngineStats, EngineStatus
from perilune.server.metrics import Metrics
from perilune.server.state import SamplingDefaults, ServerState
from perilune.text.tokenizer import Tokenizer

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
BOARD = DEPLOY / "grafana" / "perilune.json"
ALERTS = DEPLOY / "prometheus" / "alerts.yaml"
UNIT = DEPLOY / "systemd" / "perilune.service"
CONTAINER = DEPLOY / "Containerfile"
NAME = re.compile(r"\bperilune_[a-z_]+")
LABELLED = re.compile(r"\b(perilune_[a-z_]+)\{([^}]*)\}")
OURS = {"instance", "job"}  # labels that Prometheus adds


class Idle:
    """An engine that does nothing, for what the metrics' page says of one."""

    def __init__(self) -> None:
        model = bundled_model()
        self.tokenizer = Tokenizer.from_dir(model, read_json(model / "config.json")["vocab_size"])

    def status(self) -> EngineStatus:
        return EngineStatus("ready", "", EngineStats(total_blocks=4, free_blocks=4))


@pytest.fixture(scope="module")
def page() -> str:
    """The metrics' page of a server whose engine is ready."""
    state = ServerState(("m",))
    engine: Any = Idle()
    state.ready(engine, SamplingDefaults())
    metrics = Metrics(state)
    metrics.responses.labels("200").inc()
    metrics.requests.labels("complete").inc()
    metrics.finished.labels("stop").inc()
    return metrics.text().decode()


@pytest.fixture(scope="module")
def samples(page: str) -> set[str]:
    """Names of its samples, as a query must write them."""
    return {re.split(r"[{ ]", line)[0] for line in page.splitlines() if line and not line.startswith("#")}


def board_queries() -> list[str]:
    return [target["expr"] for panel in panels() for target in panel.get("targets", ())]


def panels() -> list[dict[str, Any]]:
    return list(json.loads(BOARD.read_text())["panels"])


def alert_rules() -> list[dict[str, Any]]:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def names(queries: list[str]) -> set[str]:
    return {name for query in queries for name in NAME.findall(query)}


def test_the_board_asks_for_metrics_that_there_are(samples: set[str]) -> None:
    used = names(board_queries())
    assert len(used) > 15
    assert used - samples == set()


def test_the_board_shows_what_an_operator_needs() -> None:
    used = names(board_queries())
    for topic in ("time_to_first_token", "inter_token", "waiting_requests", "kv_usage", "prefix_hits", "preemptions"):
        assert any(topic in name for name in used), topic
    assert any('outcome="error"' in query for query in board_queries())
    assert any("429|503" in query for query in board_queries())


def test_the_board_is_laid_out_without_overlaps() -> None:
    cells: dict[tuple[int, int], int] = {}
    for panel in panels():
        place = panel["gridPos"]
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert x < 24
                assert cells.setdefault((x, y), panel["id"]) == panel["id"], panel["title"]
    assert len({panel["id"] for panel in panels()}) == len(panels())


def test_rules_ask_for_metrics_that_there_are(samples: set[str]) -> None:
    used = names([rule["expr"] for rule in alert_rules()])
    assert len(used) > 8
    assert used - samples == set()


def test_queries_use_labels_that_there_are(page: str) -> None:
    for query in [*board_queries(), *(rule["expr"] for rule in alert_rules())]:
        for name, labels in LABELLED.findall(query):
            for label in re.findall(r"(\w+)(?:=~|!=|=)", labels):
                assert label in OURS or re.search(rf"^{name}\{{[^}}]*\b{label}=", page, re.MULTILINE), query


def test_rules_wait_and_say_what_to_do() -> None:
    rules = alert_rules()
    assert len({rule["alert"] for rule in rules}) == len(rules) > 8
    for rule in rules:
        assert re.fullmatch(r"\d+m", rule["for"]), rule["alert"]
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert "$labels.instance" in rule["annotations"]["summary"], rule["alert"]
        assert rule["annotations"]["description"].endswith(".")


def test_rules_parse_as_prometheus_reads_them() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed")
    done = subprocess.run([promtool, "check", "rules", str(ALERTS)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


# ── the unit and the container ──────────────────────────────────────────────────────────────────────────────────────


def unit() -> dict[str, str]:
    lines = (line.partition("=") for line in UNIT.read_text().splitlines() if "=" in line and line[0] not in "#;[")
    return {name: value for name, _, value in lines}


def serve_options() -> Iterator[str]:
    group: Any = typer.main.get_command(app)
    for option in group.commands["serve"].params:
        yield from option.opts


def test_options_exist() -> None:
    known = set(serve_options())
    texts = [unit()["ExecStart"], CONTAINER.read_text().split("\n\n")[0], ALERTS.read_text()]
    used = {
        word for text in texts for word in re.findall(r"(?:serve|perilune /model|Raise|raise|with|or|Past)[^\n]*", text)
    }
    flags = {flag for line in used for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]+", line)}
    assert flags >= {"--config", "--grace", "--kv-tokens"}
    assert flags - known == set()


def test_the_unit_waits_longer_than_the_server() -> None:
    found = re.search(r"--grace (\d+)", unit()["ExecStart"])
    assert found is not None
    assert int(unit()["TimeoutStopSec"]) > int(found[1]) + 10  # the engine's last step


def test_the_unit_does_not_repeat_what_cannot_succeed() -> None:
    final = (errors.UsageError, errors.ModelError, errors.CapacityError, errors.PortError)
    codes = {int(code) for code in unit()["RestartPreventExitStatus"].split()}
    assert codes == {error.exit_code for error in final}
    assert errors.EngineError.exit_code not in codes
    assert unit()["Restart"] == "on-failure"


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed")
    program = tmp_path / "perilune"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text().replace("/opt/perilune/bin/perilune", str(program)))
    done = subprocess.run([analyze, "verify", "--man=no", str(copy)], capture_output=True, text=True, check=False)
    ours = [line for line in done.stderr.splitlines() if UNIT.name in line or "Unknown" in line]
    assert ours == []
    assert done.returncode == 0, done.stderr


def test_the_container_runs_as_nobody_in_particular() -> None:
    build, final = CONTAINER.read_text().split("\nFROM ")[1:]
    assert "python:3.11-slim AS build" in build
    assert "python:3.11-slim\n" in final
    assert "pip" not in final.replace("/opt/perilune", "")
    assert re.search(r"^USER 10001", final, re.MULTILINE)
    assert "/ready" in final
    assert "PERILUNE_HOST=0.0.0.0" in final  # the program refuses it without a key
