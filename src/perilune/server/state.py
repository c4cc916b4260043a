"""What the whole server shares: the engine once there is one, its phase, its names, keys, and who uses it.

No engine, a failed or silent one, or a server that drains are a 503 with a time to come back; the bounds for those that
are let in are ``admission``'s. Written by the runner (phases) on the event loop, but for the progress of loading, which
the loading thread replaces as one value.
"""

from __future__ import annotations

import os
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from starlette.types import Scope

from perilune.chat.markers import require_markers
from perilune.config import EngineConfig, ModelSpec, read_json
from perilune.errors import ConfigError
from perilune.server.admission import Admission
from perilune.server.auth import KeyRing
from perilune.server.bodies import Budget
from perilune.server.limits import Limits
from perilune.server.metered import MeteredEngine
from perilune.server.replies import unavailable
from perilune.server.usage import UsageLog
from perilune.text.tokenizer import Tokenizer
from perilune.types import Request, TokenOut

if TYPE_CHECKING:
    from perilune.engine.options import EngineStatus

Phase = Literal["loading", "ready", "silent", "draining", "failed", "stopped"]
"""``silent``: the engine's heartbeat is overdue, it may come back. ``draining``: only what is open is finished.
``failed`` and ``stopped`` are final."""


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
    if not os.path.lexists(path):  # a link that leads nowhere is no absent file
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
        keys: None: no key is needed.
        usage_log: None: none is kept.
        metrics_compat: whose metric names ``/metrics`` tells beside our own.
        strict: what is otherwise taken with a warning is refused, and so is what Moonshot's own service refuses.
    """

    def __init__(
        self,
        names: tuple[str, ...],
        limits: Limits | None = None,
        keys: KeyRing | None = None,
        usage_log: UsageLog | None = None,
    ) -> None:
        self.names = names
        self.limits = limits or Limits()
        self.keys = keys
        self.usage_log = usage_log
        self.admission = Admission(self.limits)
        self.bodies = Budget(max(self.limits.max_bodies_bytes, self.limits.max_body_bytes), "request bodies")
        self.answers = Budget(self.limits.max_bodies_bytes, "answers")
        if keys is not None:
            self.set_keys(keys)
        self.defaults = SamplingDefaults()
        self.metrics_compat: Literal["", "vllm"] = ""
        self.strict = False
        self.created = int(time.time())
        self.progress = (0, 0)
        self._engine: Engine | None = None
        self._phase: Phase = "loading"

    @property
    def phase(self) -> Phase:
        """The engine's own phase, as soon as there is an engine."""
        if self._engine is not None and self._phase == "ready":
            return self._engine.status().phase
        return self._phase

    @property
    def in_flight(self) -> int:
        """Requests that were let in and have not ended."""
        return self.admission.in_flight

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

    def ready(self, engine: Engine, defaults: SamplingDefaults) -> None:
        """From now on ``engine`` answers.

        Raises:
            ConfigError: its vocabulary lacks a marker of the chat format.
        """
        require_markers(engine.tokenizer)
        self.defaults = defaults
        self._engine, self._phase = engine, "ready"

    def set_keys(self, keys: KeyRing) -> None:
        """From now on these keys and limits hold; what runs goes on."""
        self.keys = keys
        limits = keys.limits
        self.admission.keep_tenants(limits.keys())
        for name, limit in limits.items():
            self.admission.tenant(name).set_limits(limit)

    def drain(self) -> None:
        """From now on nothing new is let in."""
        if self._phase not in ("failed", "stopped"):
            self._phase = "draining"

    def end(self, phase: Literal["failed", "stopped"]) -> None:
        """From now on nothing is answered."""
        self._phase = phase

    @contextmanager
    def admit(self, scope: Scope) -> Iterator[MeteredEngine]:
        """Lets a request in. The engine that it yields keeps the bounds of whoever sent ``scope``.

        Raises:
            HttpError: 503, no engine or too many requests; 429, the key's own limits.
        """
        with self.admission.enter(scope, self.engine) as engine:
            yield engine
