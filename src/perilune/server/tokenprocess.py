"""A preparing process as its server sees it: started, asked one thing at a time, killed.

What is said to it stands in ``tokenjobs``, what it does in ``tokenworker``. To ask has two halves: ``give``, until the
process says that it has all of a body, and ``reply``, which is that body's own affair.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Final

from perilune.server.bodies import Body
from perilune.server.tokenjobs import HEAD_BYTES, MAX_FRAME, Ask, Reply, Taken, boot_of, decode_reply, frame
from perilune.text.tokenizer import Tokenizer

_SLICE_BYTES: Final = 256 << 10
_PIECE_BYTES: Final = 64 << 10


class NotTakenError(EOFError):
    """The process ended before it had all of a body: it has done nothing with it."""


@dataclass(slots=True, eq=False)
class TokenProcess:
    """See the module. ``start`` makes one."""

    tokenizer: Tokenizer
    _process: Process
    booted: bool = False
    """It has been told the vocabulary, and has taken a body since."""

    @classmethod
    async def start(cls, tokenizer: Tokenizer) -> TokenProcess:
        """A new process. It is told the vocabulary with the first question."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "perilune.server.tokenworker", stdin=PIPE, stdout=PIPE
        )
        return cls(tokenizer, process)

    @property
    def alive(self) -> bool:
        """As far as is known."""
        return self._process.returncode is None

    async def give(self, ask: Ask, body: Body) -> None:
        """Asks. Empties ``body`` once the process has it.

        Raises:
            NotTakenError: the process was or went away, or made no sense; ``body`` is as it was.
        """
        try:
            if not self.booted:
                await self._tell(await asyncio.to_thread(lambda: frame(boot_of(self.tokenizer))))
            await self._tell(frame(ask))
            with body.view() as view:
                for start in range(0, len(view), _SLICE_BYTES):
                    await self._tell(view[start : start + _SLICE_BYTES])
            taken = isinstance(await self.reply(), Taken)
        except (
            EOFError,
            OSError,
            RuntimeError,
            ValueError,
        ) as error:  # RuntimeError: uvloop, of a pipe that has closed
            raise NotTakenError(repr(error)) from None
        if not taken:
            raise NotTakenError("out of step")
        self.booted = True
        body.empty()

    async def reply(self) -> Reply:
        """What comes next.

        Raises:
            EOFError, OSError: the process has ended. msgspec.DecodeError: it says what it never should.
        """
        return decode_reply(await self._read(int.from_bytes(await self._read(HEAD_BYTES), "little")))

    async def result(self, size: int) -> AsyncIterator[bytes]:
        """What follows a ``Done``, in pieces: to copy tens of megabytes at once would hold up every stream."""
        while size:
            piece = await self._read(min(_PIECE_BYTES, size))
            size -= len(piece)
            yield piece

    async def wait(self) -> None:
        """Until it has ended."""
        await self._process.wait()

    def kill(self) -> None:
        """Ends it now."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def _tell(self, data: bytes | memoryview) -> None:
        stdin: Any = self._process.stdin
        stdin.write(data)
        await stdin.drain()

    async def _read(self, size: int) -> bytes:
        if size > MAX_FRAME:
            raise EOFError(f"{size} bytes at once")
        stdout: Any = self._process.stdout
        data: bytes = await stdout.readexactly(size)
        return data
