"""A preparing process as its server sees it: started, asked one thing at a time, killed.

What is said to it stands in ``tokenjobs``, what it does in ``tokenworker``.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from asyncio.subprocess import PIPE, Process
from dataclasses import dataclass
from typing import Any, Final

from perilune.server.bodies import Body
from perilune.server.tokenjobs import HEAD_BYTES, MAX_FRAME, Ask, Done, Reply, Taken, boot_of, decode_reply, frame
from perilune.text.tokenizer import Tokenizer

_SLICE_BYTES: Final = 256 << 10


class NotTakenError(EOFError):
    """The process ended before it had all of a body: it has done nothing with it."""


@dataclass(slots=True, eq=False)
class TokenProcess:
    """See the module. ``start`` makes one."""

    tokenizer: Tokenizer
    _process: Process
    _booted: bool = False

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

    async def answer(self, ask: Ask, body: Body) -> tuple[Reply, memoryview]:
        """The reply, and the result that follows it. Empties ``body`` once the process has it.

        Raises:
            NotTakenError: the process was or went away; ``body`` is as it was. EOFError, OSError: later than that.
            msgspec.DecodeError: it says what it never should.
        """
        try:
            if not self._booted:
                self._booted = True
                await self._tell(await asyncio.to_thread(lambda: frame(boot_of(self.tokenizer))))
            await self._tell(frame(ask))
            with body.view() as view:
                for start in range(0, len(view), _SLICE_BYTES):
                    await self._tell(view[start : start + _SLICE_BYTES])
            taken = await self._reply()
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise NotTakenError(repr(error)) from None
        body.empty()
        reply = await self._reply()
        if not isinstance(taken, Taken) or isinstance(reply, Taken):
            raise EOFError("out of step")
        return reply, await self._result(reply.size if isinstance(reply, Done) else 0)

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

    async def _reply(self) -> Reply:
        return decode_reply(await self._read(int.from_bytes(await self._read(HEAD_BYTES), "little")))

    async def _read(self, size: int) -> bytes:
        if size > MAX_FRAME:
            raise EOFError(f"{size} bytes at once")
        stdout: Any = self._process.stdout
        data: bytes = await stdout.readexactly(size)
        return data

    async def _result(self, size: int) -> memoryview:
        """In pieces: to copy tens of megabytes at once would hold up every stream."""
        data = bytearray()
        while len(data) < size:
            piece = await self._read(min(_SLICE_BYTES, size - len(data)))
            data += piece
        return memoryview(data)
