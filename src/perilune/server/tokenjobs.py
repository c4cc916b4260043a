"""What can be asked of a preparing process, and the frames in which it is asked. Plain data, no pickle.

A frame is a little-endian 32-bit length and so many bytes of msgpack. ``Boot`` comes first, then each ``Ask``,
followed by its body as it is. It is answered by ``Taken`` when the body has arrived, and by ``Done`` (followed by
the result), ``Refused`` or ``Broken`` when the job is over. Results are JSON: tools may hold integers of any size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Generic, TypeVar

import msgspec

from perilune import errors
from perilune.errors import RequestError
from perilune.server.prepare import (
    ChatTask,
    Detokenized,
    TextTask,
    Tokenized,
    detokenize,
    prepare_chat,
    prepare_completion,
    tokenize,
)
from perilune.server.wishes import Facts
from perilune.text.tokenizer import Tokenizer

T = TypeVar("T")

HEAD_BYTES: Final = 4
MAX_FRAME: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class Job(Generic[T]):
    """A function from a body to plain data. ``run`` raises RequestError for whatever is wrong with the body."""

    name: str
    run: Callable[[bytes, Facts, Tokenizer], T]
    result: type[T]

    def encoded(self, body: bytes, facts: Facts, tokenizer: Tokenizer) -> bytes:
        """The result as JSON."""
        return msgspec.json.encode(self.run(body, facts, tokenizer))


CHAT: Final = Job("chat", prepare_chat, ChatTask)
COMPLETION: Final = Job("completion", prepare_completion, TextTask)
TOKENIZE: Final = Job("tokenize", tokenize, Tokenized)
DETOKENIZE: Final = Job("detokenize", detokenize, Detokenized)
JOBS: Final = MappingProxyType({job.name: job for job in (CHAT, COMPLETION, TOKENIZE, DETOKENIZE)})


class Boot(msgspec.Struct, frozen=True, tag="boot"):
    """A vocabulary: arguments of ``Tokenizer``."""

    tokens: list[bytes]
    names: dict[int, str]
    vocab_size: int


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """A body to prepare. ``size`` bytes of it follow the frame."""

    job: str
    facts: Facts
    size: int


class Taken(msgspec.Struct, frozen=True, tag="taken"):
    """The body has arrived. Until then nothing was done with it: another process can be asked the same."""


class Done(msgspec.Struct, frozen=True, tag="done"):
    """``size`` bytes of JSON follow the frame: the job's result."""

    size: int


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """A ``RequestError``. ``kind`` is the name of its class."""

    kind: str
    message: str
    param: str | None
    code: str
    hint: str


class Broken(msgspec.Struct, frozen=True, tag="broken"):
    """Any other exception; the process goes on."""

    error: str


Reply = Taken | Done | Refused | Broken

decode_reply: Final = msgspec.msgpack.Decoder(Reply).decode
decode_ask: Final = msgspec.msgpack.Decoder(Ask).decode
decode_boot: Final = msgspec.msgpack.Decoder(Boot).decode


def frame(message: Boot | Ask | Reply) -> bytes:
    """A message as it goes through a pipe."""
    data = msgspec.msgpack.encode(message)
    return len(data).to_bytes(HEAD_BYTES, "little") + data


def boot_of(tokenizer: Tokenizer) -> Boot:
    """What rebuilds ``tokenizer`` elsewhere."""
    return Boot(
        tokens=[tokenizer.token_bytes(token) for token in range(tokenizer.num_ranks)],
        names={token: name for name, token in tokenizer.specials.items()},
        vocab_size=tokenizer.vocab_size,
    )


def refusal(error: RequestError) -> Refused:
    """An error as a message."""
    return Refused(type(error).__name__, error.message, error.param, error.code, error.hint)


def error_of(refused: Refused) -> RequestError:
    """The error that the message tells."""
    kind = getattr(errors, refused.kind, RequestError)
    if not (isinstance(kind, type) and issubclass(kind, RequestError)):
        kind = RequestError
    error = kind(refused.message, param=refused.param, hint=refused.hint)
    error.code = refused.code
    return error
