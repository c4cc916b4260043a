"""The corpus of bad requests against the real engine: each is refused as promised, and an unrelated stream goes on."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import httpx
import psutil
import pytest
from tests.server.corpus import CASES, CHAT, KNOWN, OK_CHAT, OK_TEXT, TEXT, VOCAB, Bad

from perilune.checkpoint.tiny import tiny_config, write_tiny
from perilune.engine.client import AsyncEngine
from perilune.engine.options import EngineOptions
from perilune.server.state import SamplingDefaults

if TYPE_CHECKING:
    from tests.server.conftest import Served, ServerFactory

LEAK = re.compile(r"0x[0-9a-f]{6,}|/site-packages/|/home/|/root/|/tmp/|Traceback|File \"|perilune\.")
STALL_S = 2.0  # far beyond any step of this model, on a machine that others use


class Stream:
    """A client that always has an answer running, and notes when the last piece of one came."""

    def __init__(self, url: str) -> None:
        self.pieces = 0
        self.failures: list[str] = []
        self._url, self._last, self._longest_s, self._stop = url, 0.0, 0.0, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        body = {"prompt": "tide", "max_tokens": 4000, "ignore_eos": True, "stream": True, "temperature": 2}
        while not self._stop.is_set():
            with httpx.stream("POST", self._url + TEXT, json=body, timeout=20) as response:
                if response.status_code != 200:
                    self.failures.append(str(response.status_code))
                for line in response.iter_lines():
                    if "error" in line:
                        self.failures.append(line)
                    if line:
                        self.pieces += 1
                    if self._stop.is_set():
                        return

    def goes_on(self) -> bool:
        """Whether another piece comes, soon."""
        before, deadline = self.pieces, time.monotonic() + STALL_S
        while self.pieces == before and time.monotonic() < deadline:
            time.sleep(0.0005)
        return self.pieces > before

    def close(self) -> None:
        self._stop.set()
        self._thread.join()


@pytest.fixture(scope="module")
def gapped(serve: ServerFactory, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The real engine on a model whose vocabulary is smaller than its embedding."""
    path = tmp_path_factory.mktemp("models") / "gapped"
    write_tiny(path, tiny_config(max_position_embeddings=4096, num_hidden_layers=1, vocab_size=VOCAB))

    async def load() -> tuple[AsyncEngine, SamplingDefaults]:
        return await asyncio.to_thread(AsyncEngine.start, path, EngineOptions(threads=1)), SamplingDefaults()

    with serve(load) as served:
        assert served.engine.tokenizer.num_ranks + 256 == KNOWN
        yield served


@pytest.fixture(scope="module")
def stream(gapped: Served) -> Iterator[Stream]:
    """The unrelated stream."""
    client = Stream(gapped.url)
    yield client
    client.close()


@pytest.fixture(scope="module")
def client(gapped: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=gapped.url, timeout=30) as found:
        yield found


def send(client: httpx.Client, case: Bad) -> httpx.Response:
    return client.post(case.path, content=case.body, headers={"content-type": case.media_type})


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_refused(client: httpx.Client, stream: Stream, case: Bad) -> None:
    response = send(client, case)
    assert response.status_code == case.status, response.text[:300]
    error = response.json()["error"]
    assert set(response.json()) == {"error"}
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == case.param
    assert error["code"]
    assert error["type"] == ("not_found_error" if case.status == 404 else "invalid_request_error")
    assert 10 < len(error["message"]) < 500
    assert "\n" not in error["message"]
    assert not LEAK.search(response.text)
    assert stream.goes_on()
    assert not stream.failures


@pytest.mark.parametrize(
    "body",
    [
        {"temperature": 3},
        {"n": 17},
        {"stop_token_ids": [VOCAB]},
        {"max_tokens": 4096},
        {"model": "gpt-9"},
        {"logit_bias": {"x": 1}},
        {"prompt": [[]], "messages": []},
    ],
    ids=str,
)
@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_a_stream_is_refused_by_status_too(client: httpx.Client, path: str, body: dict[str, object]) -> None:
    ok = OK_TEXT if path == TEXT else OK_CHAT
    response = client.post(path, json={**ok, **body, "stream": True})
    assert response.status_code == (404 if "model" in body else 400)
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-trace-id"]
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}


def test_there_are_enough_kinds() -> None:
    assert len({case.name for case in CASES}) == len(CASES) >= 161


def test_the_corpus_leaves_nothing_behind(gapped: Served, client: httpx.Client, stream: Stream) -> None:
    """Some of it, twice: no memory, no descriptor, nothing in flight but the stream."""
    process = psutil.Process()

    def measured() -> tuple[int, int]:
        for case in CASES[::4]:
            send(client, case)
        return process.memory_info().rss, process.num_fds()

    (first, first_fds), (second, second_fds) = measured(), measured()
    assert second - first < 8 << 20
    assert second_fds <= first_fds + 2
    assert stream.goes_on()
    assert gapped.state.in_flight == 1
    status = gapped.engine.status()
    assert (status.phase, status.running, status.waiting) == ("ready", 1, 0)


def test_fields_that_ask_for_nothing_pass(client: httpx.Client) -> None:
    body = {"prompt": "x", "max_tokens": 1, "suffix": "", "best_of": 1, "logit_bias": {}, "n": None, "user": "u"}
    assert client.post(TEXT, content=json.dumps(body), headers={"content-type": "application/json"}).is_success
