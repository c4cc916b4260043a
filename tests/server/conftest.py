"""A server with the real engine on a tiny random model, and one whose engine says what a test wants."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from perilune.checkpoint.tiny import tiny_config, write_tiny
from perilune.config import EngineConfig, ModelSpec, read_json
from perilune.engine.client import AsyncEngine
from perilune.engine.options import EngineOptions, EngineStats, EngineStatus
from perilune.errors import EngineError
from perilune.server.limits import Limits
from perilune.server.runner import Load, Loaded, Running, background, bind
from perilune.server.state import Engine, SamplingDefaults, ServerState
from perilune.text.tokenizer import Tokenizer
from perilune.types import FinishReason, Request, TokenLogprobs, TokenOut

CONTEXT = 4096


@dataclass(frozen=True, slots=True)
class Served:
    """A server that takes requests."""

    url: str
    state: ServerState
    engine: Engine

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.url.removeprefix("http://").rpartition(":")
        return host, int(port)

    def post(self, body: Any = None, **kwargs: Any) -> httpx.Response:
        """A chat request; ``body`` is JSON data unless it is bytes."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"content-type": "application/json", **kwargs.pop("headers", {})}
        url = f"{self.url}/v1/chat/completions"
        return httpx.post(url, content=content, headers=headers, timeout=60, **kwargs)

    def events(self, body: dict[str, Any]) -> list[Any]:
        """The events of a streamed answer, decoded; ``[DONE]`` as that string. Checks their framing."""
        response = self.post({**body, "stream": True})
        assert response.status_code == 200, response.text
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        frames = response.text.split("\n\n")
        assert frames.pop() == ""
        assert all(frame.startswith("data: ") and "\n" not in frame for frame in frames)
        data = [frame.removeprefix("data: ") for frame in frames]
        return [event if event == "[DONE]" else json.loads(event) for event in data]

    def connect(self) -> socket.socket:
        """A raw connection."""
        return socket.create_connection(self.address, timeout=10)


ServerFactory = Callable[..., AbstractContextManager[Served]]


@contextmanager
def _serve(load: Load | Callable[[], Loaded], limits: Limits | None = None, grace_s: int = 0) -> Iterator[Served]:
    async def loading() -> Loaded:
        loaded = load()
        return await loaded if isinstance(loaded, Awaitable) else loaded

    state = ServerState(("tiny", "tiny-alias"), limits)
    with background(Running(state, bind("127.0.0.1", 0), loading, grace_s=grace_s)) as url:
        yield Served(url, state, state.engine)


@pytest.fixture(scope="session")
def serve() -> ServerFactory:
    """Starts a server on what ``load`` gives, for a ``with`` block."""
    return _serve


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint with a vocabulary of single bytes."""
    path = tmp_path_factory.mktemp("models") / "tiny"
    write_tiny(path, tiny_config(max_position_embeddings=CONTEXT, num_hidden_layers=2))
    return path


@pytest.fixture(scope="session")
def server(tiny_model: Path) -> Iterator[Served]:
    """The real engine behind the real server, for all tests that leave both as they were."""

    async def load() -> Loaded:
        return await asyncio.to_thread(AsyncEngine.start, tiny_model, EngineOptions()), SamplingDefaults()

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with _serve(load) as served:
            yield served
    finally:
        torch.set_num_threads(threads)


@dataclass(slots=True)
class Script:
    """An engine that has the interface of the real one and says what it was told to.

    Attributes:
        steps: ids of each step.
        finish: how the answer ends; ``ERROR`` ends it with an error after the last step; None never ends it.
        dies: the engine as a whole fails after the last step.
        delay_s: before each step.
        requests: what was asked; ``closed``: generators that were closed before their end.
        running, most_running: generators that are open, and have been at once.
    """

    model: Path
    steps: Sequence[Sequence[int]] = ()
    finish: FinishReason | None = FinishReason.STOP
    dies: bool = False
    delay_s: float = 0.0
    requests: list[Request] = field(default_factory=list)
    closed: int = 0
    running: int = 0
    most_running: int = 0
    phase: Any = "ready"
    tokenizer: Tokenizer = field(init=False)
    spec: ModelSpec = field(init=False)
    config: EngineConfig = field(init=False)
    max_model_len: int = CONTEXT

    def __post_init__(self) -> None:
        self.spec = ModelSpec.from_config(read_json(self.model / "config.json"))
        self.tokenizer = Tokenizer.from_dir(self.model, self.spec.vocab_size)
        self.config = EngineConfig(max_model_len=self.max_model_len)

    def ids(self, *pieces: str) -> list[int]:
        """Ids of text and markers, each piece one or the other."""
        found: list[int] = []
        for piece in pieces:
            special = self.tokenizer.specials.get(piece)
            found += self.tokenizer.encode(piece) if special is None else [special]
        return found

    async def generate(self, request: Request) -> AsyncGenerator[TokenOut, None]:
        self.requests.append(request)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        ended, count = False, 0
        try:
            for step in self.steps:
                await asyncio.sleep(self.delay_s)
                count += len(step)
                logprobs = self._logprobs(step, request.sampling.logprobs)
                tokens = tuple(step)
                yield TokenOut(request_id=request.id, tokens=tokens, logprobs=logprobs, completion_tokens=count)
            if self.dies:
                self.phase = "failed"
                raise EngineError("out of memory at /secret/path 0xdeadbeef")
            if self.finish is None:
                await asyncio.sleep(3600)
            ended = True
            error = "logits at /secret/path" if self.finish is FinishReason.ERROR else ""
            yield TokenOut(request_id=request.id, completion_tokens=count, finish=self.finish, error=error)
        finally:
            self.running -= 1
            self.closed += not ended

    def _logprobs(self, step: Sequence[int], top: int | None) -> tuple[TokenLogprobs, ...]:
        if top is None:
            return ()
        return tuple(TokenLogprobs(chosen=-1.0, top_ids=tuple(range(top)), top=(-2.0,) * top) for _ in step)

    def status(self) -> EngineStatus:
        error = "scripted failure" if self.phase == "failed" else ""
        return EngineStatus(self.phase, error, EngineStats(running=len(self.requests)))

    async def close(self) -> None:
        self.phase = "stopped"


ScriptFactory = Callable[..., Script]


@pytest.fixture(scope="session")
def script(tiny_model: Path) -> ScriptFactory:
    """Builds a scripted engine."""

    def build(**kwargs: Any) -> Script:
        return Script(tiny_model, **kwargs)

    return build
