"""What crosses between a server and an engine process: tagged msgpack structs with a fixed schema, no pickle.

server → engine   Boot (once, on stdin), Submit, Abort, Shutdown
engine → server   Loading …, then Ready or Failed, then News …; Heartbeat on a socket of its own
"""

from __future__ import annotations

from typing import Final

import msgspec

from perilune.config import EngineConfig
from perilune.engine.options import EngineOptions, EngineStats
from perilune.types import Request, TokenOut

SOCKETS: Final = ("requests", "heartbeats")
"""Names in the folder of one engine's addresses."""


class Boot(msgspec.Struct, frozen=True, kw_only=True):
    """What to load, whose child this is, and the folder with the ``ipc://`` names, which only this user can enter."""

    model: str
    options: EngineOptions
    parent: int
    folder: str

    @property
    def requests(self) -> str:
        return f"ipc://{self.folder}/requests"

    @property
    def heartbeats(self) -> str:
        return f"ipc://{self.folder}/heartbeats"


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    """A request that has passed ``check_request``."""

    request: Request


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Nobody listens to this request any more."""

    request_id: str


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """End after the current step."""


class Loading(msgspec.Struct, frozen=True, tag="loading"):
    """Bytes of weights taken, of all."""

    done: int
    total: int


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """Requests are taken from now on."""

    config: EngineConfig
    num_blocks: int


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The last message of an engine that can't go on. ``kind`` is the name of a class in ``perilune.errors``."""

    kind: str
    message: str
    hint: str = ""


class News(msgspec.Struct, frozen=True, tag="news"):
    """What one step made known, and how the engine stands after it."""

    outs: list[TokenOut]
    stats: EngineStats


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """Sent by a thread of its own, so that it comes during a long step too, and stops when the process does.

    ``step_seconds``: how long the current step has been running; 0 between steps.
    """

    stats: EngineStats
    step_seconds: float


ToEngine = Submit | Abort | Shutdown
FromEngine = Loading | Ready | Failed | News | Heartbeat

encode: Final = msgspec.msgpack.Encoder().encode
decode_to_engine: Final = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine: Final = msgspec.msgpack.Decoder(FromEngine).decode
