"""``perilune serve`` as a process: its banner, its curl line, its end."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

if TYPE_CHECKING:
    from tests.cli.conftest import Run, Serve
    from tests.processes import ServeProcess

LONG: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "stream": True, "ignore_eos": True}


def test_banner_and_its_curl_line(serve: Serve, tiny_model: Path) -> None:
    if shutil.which("curl") is None:
        pytest.skip("no curl")
    with serve(str(tiny_model), "--max-model-len", "200", "--served-model-name", "it's") as process:
        ready = next(i for i, line in enumerate(process.lines) if "is ready after" in line)
        shown = process.lines[ready:]
        assert len(shown) <= 6
        assert all(len(line.split("-d ")[0]) < 120 for line in shown)
        assert "kimi_k2, bf16 experts" in process.stderr
        assert "200 tokens" in process.stderr
        curl = shown[-1].partition("try ")[2].strip()
        streamed = subprocess.run(["bash", "-c", curl], capture_output=True, text=True, timeout=60, check=True).stdout
        assert streamed.startswith('data: {"id":"chatcmpl-')
        assert streamed.endswith("data: [DONE]\n\n")
        assert httpx.get(f"{process.url}/v1/models").json()["data"][0]["id"] == "it's"
        process.signal(signal.SIGTERM)
        assert process.wait() == 0
    assert process.lines[-1] == "stopped"
    assert "Traceback" not in process.stderr


def test_first_interrupt_lets_streams_end_second_does_not(serve: Serve, tiny_model: Path) -> None:
    with (
        serve(str(tiny_model), "--grace", "30") as process,
        httpx.stream("POST", f"{process.url}/v1/chat/completions", json=LONG, timeout=30) as response,
    ):
        lines = response.iter_lines()
        next(lines)
        process.signal(signal.SIGINT)
        time.sleep(0.5)
        assert next(lines) == ""
        assert next(lines).startswith("data: {"), "the stream goes on"
        probe = httpx.get(f"{process.url}/ready")
        assert (probe.status_code, probe.json()["phase"]) == (503, "draining")
        refused = httpx.post(f"{process.url}/v1/chat/completions", json=LONG)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert refused.json()["error"]["code"] == "server_draining"
        assert process.popen.poll() is None
        process.signal(signal.SIGINT)
        assert process.wait(10) == 0
    assert "Traceback" not in process.stderr


def test_ended_while_loading(serve_process: ServeProcess, tiny_model: Path) -> None:
    """Before the model is there, too, one signal is enough."""
    with serve_process(str(tiny_model)) as process:
        process.wait_for("listening on")
        time.sleep(0.3)
        process.signal(signal.SIGTERM)
        assert process.wait() == 0
    assert "is ready" not in process.stderr
    assert "Traceback" not in process.stderr


def test_port_in_use(run: Run, tiny_model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = run("serve", str(tiny_model), "--port", port)
    assert done.returncode == 5
    assert f"error: cannot listen on 127.0.0.1:{port}: address already in use\nhint: " in done.stderr


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--kv-events", "tcp://*:5557"), "error: --kv-events tcp://*:5557 can be reached from other machines"),
        (("--kv-events", "tcp://127.0.0.1:99999"), "error: --kv-events is 'tcp://127.0.0.1:99999': the port must"),
        (("--kv-events-topic", "kv"), "error: --kv-events-topic is 'kv', but no events are published"),
    ],
)
def test_addresses_for_events_that_are_refused(
    run: Run, tiny_model: Path, arguments: tuple[str, ...], told: str
) -> None:
    done = run("serve", str(tiny_model), "--port", "0", *arguments)
    assert done.returncode == 2
    assert told in done.stderr
    assert "\nhint: " in done.stderr
    assert "listening" not in done.stderr


def test_an_address_for_events_in_use(run: Run, tiny_model: Path) -> None:
    """One that others can reach, and that is meant."""
    with socket.create_server(("0.0.0.0", 0)) as taken:  # noqa: S104 - others have nothing to say to it
        address = f"tcp://0.0.0.0:{taken.getsockname()[1]}"
        done = run("serve", str(tiny_model), "--port", "0", "--insecure-no-auth", "--kv-events", address)
    assert done.returncode == 5
    assert f"error: cache events cannot be published on {address}: address already in use\nhint: stop " in done.stderr


def test_a_broken_model_is_named(run: Run, tiny_model: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(tiny_model, broken)
    shard = next(broken.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:1000])
    done = run("serve", str(broken), "--port", "0")
    assert done.returncode == 3
    assert shard.name in done.stderr
    assert "Traceback" not in done.stderr


def test_room_for_less_than_the_largest_body_is_refused(run: Run, tiny_model: Path) -> None:
    done = run("serve", str(tiny_model), "--port", "0", "--max-body-mib", "32", "--max-bodies-mib", "31")
    assert done.returncode == 2
    assert "--max-bodies-mib is 31" in done.stderr
