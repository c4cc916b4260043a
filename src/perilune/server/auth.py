"""API keys: where they are read from, and whose key a request carries.

Knows the SHA-256 of each key, not the key. A request's key is compared with all of them, in constant time, whatever the
outcome, so neither time nor body tells an unknown key from a malformed one. Limits belong to a key; keeping them is
``tenants``' part.

No error shows a key, or what may be one: TOML's own messages are not passed on, since they quote the file; where name
and key may have been swapped, an entry is told by its number; and a path that may be a key is not shown.

A key file is TOML; a key is a string, or a table where it has limits:

    alice = "sk-…"

    [bob]
    sha256 = "…"                  # of the key, in hex, instead of `key`
    concurrency = 4               # requests at once
    tokens_per_minute = 100000    # prompt and answer
    max_tokens = 2048             # of one answer
    priority = [0, 10]            # range of the request field
"""

from __future__ import annotations

import difflib
import hashlib
import hmac
import os
import re
import stat
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec

from perilune.config import toml_fault
from perilune.errors import UsageError

MIN_KEY_CHARS: Final = 16
_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
_KEY: Final = re.compile(rf"[!-~]{{{MIN_KEY_CHARS},512}}")
_KEY_PREFIX: Final = "sk-"
_EXAMPLE: Final = 'a line looks like: alice = "sk-…"'
_MAX_FILE_BYTES: Final = 1 << 20
_FORBIDDEN_MODE: Final = 0o037  # group may read, and nothing else

Count = Annotated[int, msgspec.Meta(ge=1)]


class KeyLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one key may ask for; None: no limit of its own.

    ``concurrency``: requests at once. ``tokens_per_minute``: of prompt and answer. ``max_tokens``: of one answer.
    ``priority``: lowest and highest value of the request field; what is outside is moved to the nearer end.
    """

    concurrency: Count | None = None
    tokens_per_minute: Count | None = None
    max_tokens: Count | None = None
    priority: tuple[int, int] | None = None


class _Entry(KeyLimits, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A key's table in the file: exactly one of ``key`` and ``sha256``."""

    key: str | None = None
    sha256: Annotated[str, msgspec.Meta(pattern="^[0-9a-fA-F]{64}$")] | None = None


@dataclass(frozen=True, slots=True)
class Key:
    """A name, the SHA-256 of a key, and its limits."""

    name: str
    digest: bytes
    limits: KeyLimits


def key_of(name: str, secret: str, limits: KeyLimits | None = None, where: str = "the key") -> Key:
    """A key from its text; ``where`` it stands is for the error.

    Raises:
        UsageError: too short, or characters that a header can't carry. Quotes neither key nor name.
    """
    if not _KEY.fullmatch(secret):
        raise UsageError(
            f"{where} is not usable: {MIN_KEY_CHARS} to 512 printable ASCII characters without spaces are",
            hint="make one: python -c 'import secrets; print(\"sk-\" + secrets.token_urlsafe(32))'",
        )
    return Key(name, hashlib.sha256(secret.encode()).digest(), limits or KeyLimits())


def read_keys(path: Path) -> tuple[Key, ...]:
    """The keys of a file.

    Raises:
        UsageError: unreadable, readable or writable by others, no TOML, or an entry that is none. Quotes no key.
    """
    named = os.path.lexists(path) or path.is_absolute() or path.suffix == ".toml"
    where = f"key file `{path}`" if named else "the key file"
    text = _read_private(path, where)
    try:
        table = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where} is not TOML{toml_fault(error)}", hint=_EXAMPLE) from None
    keys = tuple(_read_key(name, value, f"{where}, entry {i}") for i, (name, value) in enumerate(table.items(), 1))
    if not keys:
        raise UsageError(f"{where} has no keys", hint=_EXAMPLE)
    if len({key.digest for key in keys}) < len(keys):
        raise UsageError(f"{where} has the same key under two names", hint="give everybody a key of their own")
    return keys


def _read_private(path: Path, where: str) -> str:
    try:
        # A pipe would hold up whoever opens it to read.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_size > _MAX_FILE_BYTES:
                raise UsageError(f"{where} is no regular file of at most {_MAX_FILE_BYTES} bytes")
            if stat.S_IMODE(status.st_mode) & _FORBIDDEN_MODE:
                mode = stat.S_IMODE(status.st_mode)
                raise UsageError(f"{where} has mode {mode:04o}, 0600 or 0640 is needed", hint=f"chmod 600 {path}")
            return file.read(_MAX_FILE_BYTES).decode()
    except OSError as error:
        hint = "" if "`" in where else "a path is needed; a single key can be given as PERILUNE_API_KEY"
        raise UsageError(f"{where} cannot be read: {(error.strerror or '').lower()}", hint=hint) from None
    except UnicodeDecodeError:
        raise UsageError(f"{where} is not TOML: it is not UTF-8", hint=_EXAMPLE) from None


def _read_key(name: str, value: Any, where: str) -> Key:
    if not _NAME.fullmatch(name) or name.startswith(_KEY_PREFIX):
        raise UsageError(
            f"{where}: what stands before the = is no name; up to 64 of A-Z a-z 0-9 . _ - are, not beginning with sk-",
            hint=_EXAMPLE,
        )
    table = {"key": value} if isinstance(value, str) else value
    if not isinstance(table, dict):
        raise UsageError(f"{where} is neither a text nor a table", hint=_EXAMPLE)
    _check_fields(table, where)
    try:
        entry = msgspec.convert(table, _Entry)
    except msgspec.ValidationError as error:
        raise UsageError(f"{where}: {error}") from None
    if (entry.key is None) == (entry.sha256 is None):
        raise UsageError(f"{where}: either `key` or `sha256` is needed")
    if entry.priority is not None and entry.priority[0] > entry.priority[1]:
        raise UsageError(f"{where}: `priority` is {list(entry.priority)}, the lower end comes first")
    limits = KeyLimits(**{field: getattr(entry, field) for field in KeyLimits.__struct_fields__})
    if entry.key is not None:
        return key_of(name, entry.key, limits, f"{where}: the key")
    return Key(name, bytes.fromhex(entry.sha256 or ""), limits)


def _check_fields(table: Mapping[str, Any], where: str) -> None:
    """Refuses unknown ones; shows those that are all but a known one."""
    for field in table:
        if field not in _Entry.__struct_fields__:
            close = difflib.get_close_matches(field, _Entry.__struct_fields__, 1, 0.8)
            hint = f"did you mean `{close[0]}`?" if close else f"known: {', '.join(_Entry.__struct_fields__)}"
            raise UsageError(f"{where} has an unknown field{f' `{field}`' if close else ''}", hint=hint)


class KeyRing:
    """The keys that are valid now."""

    def __init__(self, keys: Iterable[Key]) -> None:
        self._keys: tuple[Key, ...] = tuple(keys)

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def limits(self) -> Mapping[str, KeyLimits]:
        """By name."""
        return {key.name: key.limits for key in self._keys}

    def replace(self, keys: Iterable[Key]) -> None:
        """From now on these are valid, and no others."""
        self._keys = tuple(keys)

    def find(self, authorization: Sequence[str]) -> Key | None:
        """Whose key the ``Authorization`` headers carry; None: nobody's. Takes equally long for all that are wrong."""
        scheme, _, given = authorization[0].partition(" ") if len(authorization) == 1 else ("", "", "")
        digest = hashlib.sha256(given.strip(" ").encode("utf-8", "surrogateescape")).digest()
        found = None
        for key in self._keys:
            if hmac.compare_digest(key.digest, digest):
                found = key
        return found if scheme.lower() == "bearer" else None
