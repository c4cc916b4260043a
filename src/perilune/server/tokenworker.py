"""The preparing process: ``python -m perilune.server.tokenworker``, started by ``tokenpool`` only.

Is asked through its stdin. Does one job at a time and keeps nothing between them but the vocabulary. Ends when
its stdin does, so it cannot outlive its server.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from typing import BinaryIO, Final

from perilune import memory
from perilune.errors import RequestError
from perilune.server.tokenjobs import (
    HEAD_BYTES,
    JOBS,
    Ask,
    Broken,
    Done,
    Reply,
    Taken,
    decode_ask,
    decode_boot,
    frame,
    refusal,
)
from perilune.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_TRIM_BYTES: Final = 1 << 20
_NICE: Final = 5


def serve(source: BinaryIO, sink: BinaryIO) -> None:
    """Answers until ``source`` ends."""
    boot = decode_boot(_read(source))
    tokenizer = Tokenizer(boot.tokens, boot.names, boot.vocab_size)
    tokenizer.prepare()
    used = 0
    while data := _read(source):
        ask = decode_ask(data)
        body = source.read(ask.size)
        if len(body) < ask.size:
            return
        sink.write(frame(Taken()))
        sink.flush()
        reply, result = _answer(ask, body, tokenizer)
        sink.write(frame(reply))
        sink.write(result)
        sink.flush()
        used += len(body) + len(result)
        del body, result
        if used >= _TRIM_BYTES:
            used = 0
            memory.trim()


def _answer(ask: Ask, body: bytes, tokenizer: Tokenizer) -> tuple[Reply, bytes]:
    try:
        result = JOBS[ask.job].encoded(body, ask.facts, tokenizer)
    except RequestError as error:
        return refusal(error), b""
    except Exception as error:
        logger.exception("a %s request could not be prepared", ask.job)
        return Broken(type(error).__name__), b""
    return Done(len(result)), result


def _read(source: BinaryIO) -> bytes:
    """One frame's message; empty at the end."""
    return source.read(int.from_bytes(source.read(HEAD_BYTES), "little"))


def main() -> None:
    """Entry point."""
    # Ctrl-C reaches the whole process group; the server decides when its helpers end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(_NICE)  # where cores are few, streams and probes go before prompts that are still to come
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    serve(sys.stdin.buffer, sys.stdout.buffer)


if __name__ == "__main__":
    main()
