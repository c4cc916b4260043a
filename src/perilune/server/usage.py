"""The usage log: a JSON line per request that asked for tokens, for billing and audit. No content.

A thread writes, so that a slow disk holds nobody up. A disk that is full costs lines, not requests: what could not be
written is counted, and told once until writing works again. A line is whole or absent: what a full disk cut is taken
back. Operators rotate the file by moving it and sending SIGHUP, which opens the path anew.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import queue
import threading
from pathlib import Path
from typing import Final

import msgspec

from perilune.errors import UsageError
from perilune.server.records import UsageLine

logger = logging.getLogger(__name__)

_MAX_WAITING: Final = 10_000
_CLOSE_S: Final = 5.0
_MODE: Final = 0o640


class UsageLog:
    """Appends to one file. ``write``, ``reopen`` and ``close`` never raise and never wait for the disk (but ``close``).

    Raises:
        UsageError: the file cannot be opened at the start.
    """

    def __init__(self, path: Path) -> None:
        self.lost = 0
        """Lines that could not be written."""
        self._path = path
        self._encoder = msgspec.json.Encoder()
        self._waiting: queue.Queue[UsageLine | str] = queue.Queue(_MAX_WAITING)
        self._complained = False
        try:
            self._file = _open(path)
        except OSError as error:
            raise _refused(path, error) from None
        self._thread = threading.Thread(target=self._run, name="perilune-usage", daemon=True)
        self._thread.start()

    def write(self, line: UsageLine) -> None:
        """Queues a line."""
        try:
            self._waiting.put_nowait(line)
        except queue.Full:
            self._lose("the disk is too slow")

    def reopen(self) -> None:
        """After what is queued, goes on in a file of the same name."""
        with contextlib.suppress(queue.Full):
            self._waiting.put_nowait("reopen")

    def close(self) -> None:
        """Writes what is queued, in bounded time."""
        with contextlib.suppress(queue.Full):
            self._waiting.put("close", timeout=_CLOSE_S)
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        while (item := self._waiting.get()) != "close":
            if isinstance(item, UsageLine):
                self._append(item)
            else:
                self._reopen()
        os.close(self._file)

    def _append(self, item: UsageLine) -> None:
        try:
            line = self._encoder.encode(item) + b"\n"
            written = os.write(self._file, line)
            if written < len(line):
                with contextlib.suppress(OSError):  # a pipe or a terminal can't be cut
                    os.ftruncate(self._file, os.fstat(self._file).st_size - written)
                self._lose("no space left")
                return
        except OSError as error:
            self._lose((error.strerror or type(error).__name__).lower())
            return
        except UnicodeError:  # a name that an operator gave in no encoding at all
            self._lose("a name in it is not Unicode")
            return
        self._complained = False

    def _reopen(self) -> None:
        try:
            file = _open(self._path)
        except OSError as error:
            logger.error("the usage log cannot be opened anew, the old file stays: %s", error.strerror)
            return
        os.close(self._file)
        self._file = file

    def _lose(self, why: str) -> None:
        self.lost += 1
        if not self._complained:
            self._complained = True
            logger.error("the usage log loses lines: %s", why)


def check_log(path: Path) -> None:
    """Whether ``UsageLog`` could open it; makes no file.

    Raises:
        UsageError: it could not.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        os.close(os.open(path, flags))
    except FileNotFoundError as error:
        if not os.access(path.parent, os.W_OK | os.X_OK):
            raise _refused(path, error) from None
    except OSError as error:
        if error.errno != errno.ENXIO:  # a pipe that nobody reads yet
            raise _refused(path, error) from None


def _refused(path: Path, error: OSError) -> UsageError:
    return UsageError(f"usage log `{path}` cannot be written: {(error.strerror or '').lower()}")


def _open(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, _MODE)
