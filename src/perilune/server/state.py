"""What the whole server shares: the engine once there is one, its phase, its names, how many requests are in flight.

Owns admission: no engine, a failed engine or too many requests at once are a 503 with a time to come back. Written by
the runner (phases) and by endpoints (in flight), always on the event loop, but for the progress of loading, which the
loading thread replaces as one value.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from starlette.types import Scope

from perilune.config import EngineConfig, ModelSpec, read_json
from perilune.errors import ConfigError, NotFoundError
from perilune.server.limits import Limits
from perilune.server.replies import unavailable
from perilune.text.tokenizer import Tokenizer
from perilune.types import Request, TokenOut

if TYPE_CHECKING:
    from perilune.engine.options import EngineStatus

Phase = Literal["loading", "ready", "failed", "stopped"]


class Engine(Protocol):
    """What the server needs of an engine: ``perilune.engine.remote.RemoteEngine``, or its twin in this process."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def config(self) -> EngineConfig: ...

    @property
    def max_model_len(self) -> int: ...

    def generate(self, request: Request) -> AsyncGenerator[TokenOut, None]: ...

    def status(self) -> EngineStatus: ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What holds where a request says nothing."""

    temperature: float = 1.0
    top_p: float = 1.0


def read_defaults(model: Path) -> SamplingDefaults:
    """Temperature and top_p of ``generation_config.json``, where a model directory has one.

    Raises:
        ConfigError: not JSON, or a value out of range.
    """
    path = model / "generation_config.json"
    if not path.exists():
        return SamplingDefaults()
    data = read_json(path)
    values: dict[str, float] = {}
    for name, low, high in (("temperature", 0.0, 2.0), ("top_p", 1e-6, 1.0)):
        value = data.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
            raise ConfigError(f"`{path}`: `{name}` is {value!r:.80}, a number from {low:g} to {high:g} is needed")
        values[name] = float(value)
    return SamplingDefaults(**values)


class ServerState:
    """See the module. Starts without an engine, in phase ``loading``.

    Args:
        names: what clients may call the model; the first one is shown.

    Attributes:
        metrics_compat: whose metric names ``/metrics`` tells beside our own.
    """

    def __init__(self, names: tuple[str, ...], limits: Limits | None = None) -> None:
        self.names = names
        self.limits = limits or Limits()
        self.defaults = SamplingDefaults()
        self.metrics_compat: Literal["", "vllm"] = ""
        self.created = int(time.time())
        self.progress = (0, 0)
        self.in_flight = 0
        self._engine: Engine | None = None
        self._phase: Phase = "loading"

    @property
    def phase(self) -> Phase:
        """The engine's own phase, as soon as there is an engine."""
        if self._engine is not None and self._phase == "ready":
            return self._engine.status().phase
        return self._phase

    @property
    def engine(self) -> Engine:
        """The engine that takes requests.

        Raises:
            HttpError: 503 while there is none.
        """
        phase = self.phase
        if phase != "ready" or self._engine is None:
            raise unavailable(f"the server takes no requests now, its phase is {phase}", code=f"server_{phase}")
        return self._engine

    def served_name(self, asked: str | None) -> str:
        """The name under which to answer: what was asked for, or the first one.

        Raises:
            NotFoundError: the model has no such name.
        """
        if asked is None:
            return self.names[0]
        if asked not in self.names:
            raise NotFoundError(
                f"there is no model {asked[:120]!r}, this server has {', '.join(self.names)}",
                param="model",
                code="model_not_found",
            )
        return asked

    def ready(self, engine: Engine, defaults: SamplingDefaults) -> None:
        """From now on ``engine`` answers."""
        self.defaults = defaults
        self._engine, self._phase = engine, "ready"

    def end(self, phase: Literal["failed", "stopped"]) -> None:
        """From now on nothing is answered."""
        self._phase = phase

    @contextmanager
    def admit(self, scope: Scope) -> Iterator[Engine]:
        """Counts one request in flight. The engine that it yields keeps the bounds of whoever sent ``scope``.

        Raises:
            HttpError: 503, no engine or too many requests.
        """
        engine = self.engine
        if self.in_flight >= self.limits.max_in_flight:
            raise unavailable(f"{self.in_flight} requests are in flight, no more are taken", code="overloaded")
        self.in_flight += 1
        try:
            yield engine
        finally:
            self.in_flight -= 1
