"""The routes. ``build_app`` puts the endpoints behind the edge; ``runner`` puts the whole behind a socket."""

from __future__ import annotations

from collections.abc import Collection

import msgspec
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from perilune import __version__
from perilune.server.chat_api import chat_endpoint
from perilune.server.completions_api import completion_endpoint
from perilune.server.edge import Edge
from perilune.server.generation import Services
from perilune.server.metrics import CONTENT_TYPE, Metrics
from perilune.server.openapi import document, page
from perilune.server.replies import RETRY_AFTER_S, json_response
from perilune.server.state import ServerState
from perilune.server.tokenize_api import JobEndpoint, TokenizerEndpoint
from perilune.server.tokenjobs import DETOKENIZE, TOKENIZE
from perilune.server.tokenpool import PoolLimits, TokenPool
from perilune.server.wishes import served_name


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


def build_app(state: ServerState, allowed_hosts: Collection[str] | None) -> App:
    """The application.

    Args:
        allowed_hosts: see ``Edge``.
    """
    limits = PoolLimits(size=state.limits.token_processes, deadline_s=state.limits.token_deadline_s)
    services = Services(state, TokenPool(limits), Metrics(state))
    edge = Edge(Router(routes_of(services), redirect_slashes=False), state, allowed_hosts)
    return App(services.metrics.counted(edge), services)


def routes_of(services: Services) -> list[Route]:
    """Everything that is here."""
    info, about = _Info(services.state), _About(services)
    return [
        Route("/v1/chat/completions", chat_endpoint(services), methods=["POST"]),
        Route("/v1/completions", completion_endpoint(services), methods=["POST"]),
        Route("/v1/models", info.models),
        Route("/v1/models/{name:path}", info.model),
        Route("/tokenize", JobEndpoint(services, TOKENIZE), methods=["POST"]),
        Route("/detokenize", JobEndpoint(services, DETOKENIZE), methods=["POST"]),
        Route("/tokenizer_info", TokenizerEndpoint(services).__call__),
        Route("/version", about.version),
        Route("/metrics", about.metrics),
        Route("/openapi.json", about.openapi),
        Route("/docs", about.docs),
        Route("/health", info.health),
        Route("/ready", info.ready),
    ]


class App:
    """The application, and the end of what belongs to it."""

    def __init__(self, app: ASGIApp, services: Services) -> None:
        self._app, self._services = app, services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)

    async def close(self) -> None:
        """Ends the processes that prepare long requests."""
        await self._services.pool.close()


class _About:
    """Endpoints that tell of the server itself."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._document = msgspec.json.encode(document(services.state.limits))
        self._page = page(services.state.limits)

    async def version(self, _: Request) -> Response:
        """In vLLM's shape."""
        return json_response({"version": __version__})

    async def metrics(self, _: Request) -> Response:
        """For Prometheus. Made here: in a thread it would wait for whatever else threads do."""
        return Response(self._services.metrics.text(), media_type=CONTENT_TYPE)

    async def openapi(self, _: Request) -> Response:
        """For programs."""
        return Response(self._document, media_type="application/json")

    async def docs(self, _: Request) -> Response:
        """For people."""
        return HTMLResponse(self._page)


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
        return json_response(self._card(served_name(request.path_params["name"], self._state.names)))

    def _card(self, name: str) -> ModelCard:
        state = self._state
        return ModelCard(id=name, created=state.created, max_model_len=state.engine.max_model_len)
