"""The routes. ``build_app`` puts the endpoints behind the edge; ``runner`` puts the whole behind a socket."""

from __future__ import annotations

from collections.abc import Collection

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp

from perilune.server.chat_api import ChatEndpoint
from perilune.server.edge import Edge
from perilune.server.replies import RETRY_AFTER_S, json_response
from perilune.server.state import ServerState


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of ``/v1/models``. ``max_model_len``: tokens of prompt and answer together."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "perilune"
    max_model_len: int


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """``/v1/models``."""

    object: str = "list"
    data: tuple[ModelCard, ...]


class Readiness(msgspec.Struct, frozen=True, kw_only=True):
    """``/ready``. ``loaded`` and ``total`` are bytes of weights."""

    phase: str
    running: int = 0
    waiting: int = 0
    loaded: int = 0
    total: int = 0


def build_app(state: ServerState, allowed_hosts: Collection[str] | None) -> ASGIApp:
    """The application.

    Args:
        allowed_hosts: see ``Edge``.
    """
    info = _Info(state)
    routes = [
        Route("/v1/chat/completions", ChatEndpoint(state), methods=["POST"]),
        Route("/v1/models", info.models),
        Route("/v1/models/{name:path}", info.model),
        Route("/health", info.health),
        Route("/ready", info.ready),
    ]
    return Edge(Router(routes, redirect_slashes=False), state, allowed_hosts)


class _Info:
    """Endpoints that only tell."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def health(self, _: Request) -> Response:
        """Live: this process answers. Says nothing of the engine."""
        return json_response({"status": "ok"})

    async def ready(self, _: Request) -> Response:
        """Whether a chat request would be taken now."""
        state = self._state
        phase = state.phase
        loaded, total = state.progress
        if phase != "ready":
            body = Readiness(phase=phase, loaded=loaded, total=total)
            return json_response(body, 503, {"retry-after": str(RETRY_AFTER_S)})
        status = state.engine.status()
        body = Readiness(phase=phase, running=status.running, waiting=status.waiting, loaded=loaded, total=total)
        return json_response(body)

    async def models(self, _: Request) -> Response:
        """Every name of the model that is served."""
        return json_response(ModelList(data=tuple(self._card(name) for name in self._state.names)))

    async def model(self, request: Request) -> Response:
        """One name."""
        return json_response(self._card(self._state.served_name(request.path_params["name"])))

    def _card(self, name: str) -> ModelCard:
        state = self._state
        return ModelCard(id=name, created=state.created, max_model_len=state.engine.max_model_len)
