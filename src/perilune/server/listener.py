"""The socket: accepts connections for an application, and closes them when told.

uvicorn's protocol speaks HTTP; its server is not used, because it wakes ten times a second to look at the time, and
because it can't refuse requests while it answers probes. Nothing here happens without a client. Never runs out of file
descriptors: the bound on connections leaves enough for the rest of the process.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import socket
from dataclasses import dataclass, field
from typing import Final

from starlette.types import ASGIApp
from uvicorn.config import Config

from perilune.logs import fields
from perilune.server.connection import Connection, Shared
from perilune.server.limits import Limits

logger = logging.getLogger(__name__)

_RESERVED_FILES: Final = 24  # the engine's pipes and sockets, a restart of it, logs, files of a model
_MOST_FILES: Final = 1 << 16
_FEWEST_CONNECTIONS: Final = 4
_BACKLOG: Final = 2048


@dataclass(slots=True)
class Listener:
    """One listening socket. ``close`` closes it."""

    app: ASGIApp
    limits: Limits
    sock: socket.socket
    _shared: Shared = field(init=False)
    _server: asyncio.Server | None = None

    def __post_init__(self) -> None:
        config = Config(
            self.app,
            http=Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",  # the edge logs what fails; uvicorn would tell it a second time
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=self.limits.idle_timeout_s,  # type: ignore[arg-type]  # it goes to call_later
        )
        config.load()
        self._shared = Shared(config, self.limits, connection_bound(self.limits.max_connections))

    @property
    def connections(self) -> int:
        """Open ones."""
        return len(self._shared.state.connections)

    async def start(self) -> None:
        """Accepts from now on."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: Connection(self._shared, loop), sock=self.sock, backlog=_BACKLOG
        )

    async def close(self, last_words_s: float) -> None:
        """Closes the socket and what is idle; cancels requests, and waits so long until they have said so."""
        if self._server is not None:
            self._server.close()
        self.sock.close()
        tasks = set(self._shared.state.tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=last_words_s)
        for connection in set(self._shared.state.connections):
            connection.shutdown()
        await asyncio.sleep(0)  # what was written goes out


def connection_bound(wanted: int) -> int:
    """At most ``wanted``, and no more than file descriptors allow. Raises the soft limit of those as far as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    raised = min(hard, _MOST_FILES) if hard != resource.RLIM_INFINITY else _MOST_FILES
    if soft != resource.RLIM_INFINITY and raised > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
        soft = raised
    if soft == resource.RLIM_INFINITY:
        return wanted
    free = soft - len(os.listdir("/proc/self/fd")) - _RESERVED_FILES
    bound = max(min(wanted, free), _FEWEST_CONNECTIONS)
    if bound < wanted:
        logger.warning("file descriptors bound the connections", extra=fields(connections=bound, descriptors=soft))
    return bound
