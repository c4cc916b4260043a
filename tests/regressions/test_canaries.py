"""Keys and prompts stay out of logs, error bodies, metrics, environment of children and command lines (LiteLLM
CVE-2024-9606, Ray CVE-2025-1979), and nothing that a client chose can forge a line of a log (Triton CVE-2024-0095)."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from tests.processes import Process, start

from perilune.checkpoint.tiny import tiny_config, write_tiny

KEY, PROMPT, SALT = "sk-CANARY-0123456789", "CANARY2 in a prompt", "CANARY3"
FORGED = 'm\r\n{"level":"error","message":"forged"}\x1b[31m'
CANARIES = ("sk-CANARY", "CANARY2", "CANARY3")
HEADERS = {"authorization": f"Bearer {KEY}"}


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    write_tiny(path, tiny_config(max_position_embeddings=4096, num_hidden_layers=2))
    return path


def url_of(process: Process, form: str) -> str:
    if form == "text":
        process.wait_for("  try ")
        process.find_url()
        return process.url
    process.wait_for(" is ready after")
    (ready,) = (event for event in map(json.loads, process.lines) if " is ready after" in event["message"])
    return str(ready["URL"]).removesuffix("/v1")


def asked(url: str) -> list[str]:
    """What comes back from requests that carry canaries, good and bad ones."""
    good = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 3, "cache_salt": SALT}
    bodies: list[Any] = [
        good,
        {**good, "stream": True},
        {**good, "model": FORGED},
        {**good, "temperature": "hot"},
        {**good, "messages": [{"role": "user", "content": PROMPT * 3000}]},
        {**good, "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": PROMPT}]}]},
        {**good, FORGED: 1},
    ]
    with httpx.Client(base_url=url, timeout=30, headers=HEADERS) as client:
        answers = [client.post("/v1/chat/completions", json=body) for body in bodies for _ in range(3)]
        answers += [client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 2})]
        answers += [client.post("/v1/chat/completions", content=b'{"messages": "' + PROMPT.encode())]
        answers += [
            client.get(path) for path in ("/metrics", "/v1/models", "/%0d%0a%7Bforged", f"/v1/models?key={KEY}")
        ]
        wrong = {"authorization": f"Bearer {KEY}x", "x-request-id": "CANARY2"}
        answers += [client.get("/v1/models", headers=wrong)]
    assert [answers[0].status_code, answers[-1].status_code] == [200, 401]
    return [answer.text for answer in answers]


@pytest.mark.parametrize("form", ["text", "json"])
def test_canaries(tiny_model: Path, tmp_path: Path, form: str) -> None:
    usage = tmp_path / "usage.jsonl"
    options = ("--log-level", "debug", "--log-format", form, "--usage-log", str(usage))
    with start(str(tiny_model), *options, variables={"PERILUNE_API_KEY": KEY}) as process:
        url = url_of(process, form)
        told = asked(url)
        family = [psutil.Process(process.popen.pid), *psutil.Process(process.popen.pid).children(recursive=True)]
        lines = [Path(f"/proc/{each.pid}/cmdline").read_text() for each in family]
        inherited = [Path(f"/proc/{each.pid}/environ").read_text() for each in family[1:]]
        process.signal(signal.SIGTERM)
        assert process.wait() == 0
    for text in (*told, *lines, *inherited, process.stderr, usage.read_text()):
        # A status page may quote the id that a client sent: it is the client's.
        assert not [canary for canary in CANARIES if canary in text]
    assert len(usage.read_text().splitlines()) >= 20
    assert "/v1/chat/completions" in process.stderr, "there is a line per request"
    assert all(line.isprintable() for line in process.stderr.split("\n"))
    assert not [line for line in process.lines if line.lstrip().startswith('{"level":"error","message":"forged"')]
    if form == "json":
        events = [json.loads(line) for line in process.lines]
        assert all({"time", "level", "logger", "message"} <= event.keys() for event in events)
        requests = [event for event in events if event["logger"] == "perilune.access"]
        assert {event["status"] for event in requests} >= {200, 400, 401, 404}
        assert {event.get("key") for event in requests} == {"default", None}


def test_keys_are_read_again_on_hangup(tiny_model: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(f'alice = "{KEY}"\n')
    keys.chmod(0o600)
    with start(str(tiny_model), "--api-key-file", str(keys), "--host", "0.0.0.0") as process:  # noqa: S104
        process.wait_for("  try ")
        process.find_url()
        assert httpx.get(f"{process.url}/v1/models", headers=HEADERS).status_code == 200
        assert httpx.get(f"{process.url}/v1/models").status_code == 401
        os.truncate(keys, 0)
        process.signal(signal.SIGHUP)
        process.wait_for("the keys stay as they were")
        assert httpx.get(f"{process.url}/v1/models", headers=HEADERS).status_code == 200
        keys.write_text('bob = "sk-another-0123456789"\n')
        process.signal(signal.SIGHUP)
        process.wait_for("keys were read again")
        assert httpx.get(f"{process.url}/v1/models", headers=HEADERS).status_code == 401
        other = {"authorization": "Bearer sk-another-0123456789"}
        assert httpx.get(f"{process.url}/v1/models", headers=other).status_code == 200
