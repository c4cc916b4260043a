"""The exception tree. Every error that a user, a file or a client can cause is one of these.

    PeriluneError                exit code 1
    ├── UsageError               2  an option or argument that cannot be used
    ├── ModelError               3  a model directory that cannot be served
    │   ├── ConfigError             a field of config.json (or another JSON file) is absent or absurd
    │   └── CheckpointError         a safetensors file, the index or a tensor is broken, missing or unknown
    ├── CapacityError            4  the model or its cache does not fit
    ├── PortError                5  the address cannot be bound
    ├── PeerError                6  a server we talk to is unreachable or answered nonsense
    ├── EngineError              7  the engine stopped or a step failed
    └── RequestError             –  a client's request is refused: carries an HTTP status
        ├── ContextLengthError      the prompt leaves no room for an answer
        └── NotFoundError           an unknown model or path

A message names the offending value, what is allowed; ``hint`` says what to do next. Nothing here
imports anything: every level may raise these.
"""

from __future__ import annotations


class PeriluneError(Exception):
    """Root of the tree.

    Args:
        message: what is wrong and what would be right, one sentence without a trailing period.
        hint: the next step for the reader, or empty.
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(PeriluneError):
    """An option or an argument that cannot be used as given."""

    exit_code = 2


class ModelError(PeriluneError):
    """A model directory that cannot be served."""

    exit_code = 3


class ConfigError(ModelError):
    """A field of a model's JSON files is absent, of the wrong type, or absurd."""


class CheckpointError(ModelError):
    """A weight file, the index or a tensor is broken, missing or unknown."""


class CapacityError(PeriluneError):
    """The model, or the cache it needs, does not fit into the memory that is there."""

    exit_code = 4


class PortError(PeriluneError):
    """The address cannot be bound."""

    exit_code = 5


class PeerError(PeriluneError):
    """A server we talk to is unreachable, or answered with something that is not its protocol."""

    exit_code = 6


class EngineError(PeriluneError):
    """The engine stopped, or a step failed. Clients see 503."""

    exit_code = 7


class RequestError(PeriluneError):
    """A client's request is refused.

    Args:
        message: names the value and what is allowed.
        param: the field at fault, in dotted form (``messages[2].role``), or None.
        code: a short stable word that programs can compare.
    """

    status = 400
    type = "invalid_request_error"

    def __init__(self, message: str, *, param: str | None = None, code: str = "invalid_value", hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.param = param
        self.code = code


class ContextLengthError(RequestError):
    """The prompt, or the prompt with the tokens asked for, exceeds the model's context."""

    def __init__(self, message: str, *, param: str | None = "messages", hint: str = "") -> None:
        super().__init__(message, param=param, code="context_length_exceeded", hint=hint)


class NotFoundError(RequestError):
    """An unknown model or path."""

    status = 404
    type = "not_found_error"

    def __init__(self, message: str, *, param: str | None = None, code: str = "not_found", hint: str = "") -> None:
        super().__init__(message, param=param, code=code, hint=hint)
