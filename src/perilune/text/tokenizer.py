"""Kimi's vocabulary: text to ids and ids to bytes.

Owns the reading of ``tiktoken.model`` (a line per token: base64 of its bytes, a space, its rank) and of the names of
special tokens in ``tokenizer_config.json``. The byte-pair merging itself is tiktoken's. Both files are hostile until
checked; nothing is downloaded and no code of the model directory is run.

Refuses to know what a special token means: text that looks like one is encoded as plain text, always, so a marker
can enter a prompt only by its id. Prompt formats live in ``chat``.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final

import tiktoken

from perilune.config import read_json
from perilune.errors import ConfigError, RequestError

RANKS_FILE: Final = "tiktoken.model"
NAMES_FILE: Final = "tokenizer_config.json"
NUM_SPECIALS: Final = 256
"""Ids behind the ranks that belong to special tokens, named or reserved."""

_MAX_FILE_BYTES: Final = 64 << 20
_MAX_RANKS: Final = 1 << 20
_MAX_TOKEN_BYTES: Final = 4096
_MAX_NAME_CHARS: Final = 128

_HAN_FREE_UPPER: Final = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_HAN_FREE_LOWER: Final = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_CONTRACTION: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
SPLIT_PATTERN: Final = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_HAN_FREE_UPPER}*{_HAN_FREE_LOWER}+{_CONTRACTION}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_HAN_FREE_UPPER}+{_HAN_FREE_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
"""Kimi's pre-tokenisation: no merge crosses a border between two matches."""

KIMI_SPECIALS: Final[Mapping[int, str]] = MappingProxyType(
    {
        0: "[BOS]",
        1: "[EOS]",
        2: "<|im_end|>",
        3: "<|im_user|>",
        4: "<|im_assistant|>",
        6: "<|start_header_id|>",
        7: "<|end_header_id|>",
        9: "[EOT]",
        10: "<|im_system|>",
        11: "<|tool_calls_section_begin|>",
        12: "<|tool_calls_section_end|>",
        13: "<|tool_call_begin|>",
        14: "<|tool_call_argument_begin|>",
        15: "<|tool_call_end|>",
        17: "<|im_middle|>",
        18: "<|media_begin|>",
        19: "<|media_content|>",
        20: "<|media_end|>",
        21: "<|media_pad|>",
        22: "<think>",
        23: "</think>",
        254: "[UNK]",
        255: "[PAD]",
    }
)
"""Names by offset from the number of ranks, for a directory whose tokenizer_config.json lists none."""

# The reference cuts long input before it encodes, and a cut can change ids: these two numbers are part of the format.
_SEGMENT_CHARS: Final = 400_000
_RUN_CHARS: Final = 25_000
_RUNS: Final = re.compile(r"\s+|\S+")


class Tokenizer:
    """An immutable vocabulary: ranks ``0 … num_ranks - 1``, then 256 special ids, then unused ids to ``vocab_size``.

    Args:
        tokens: bytes of every rank, in order; all 256 single bytes among them, no two equal, none empty.
        names: special id → name. Ids that it leaves out are called ``<|reserved_token_{id}|>``.
        vocab_size: rows of the model's embedding.

    Raises:
        ConfigError: the tokens, the names or the sizes contradict each other.
    """

    __slots__ = ("_encoding", "_names", "_tokens", "num_ranks", "specials", "vocab_size")

    def __init__(self, tokens: Sequence[bytes], names: Mapping[int, str], vocab_size: int) -> None:
        _checked_ranks(tokens)
        first, end = len(tokens), len(tokens) + NUM_SPECIALS
        if end > vocab_size:
            raise ConfigError(
                f"the vocabulary has {first} ranks and {NUM_SPECIALS} special ids, vocab_size is {vocab_size}",
                hint="vocab_size in config.json must be at least their sum",
            )
        for token, name in names.items():
            if not first <= token < end:
                raise ConfigError(f"special token {name!r} has id {token}, ids from {first} to {end - 1} are special")
        self._names = [names.get(token, f"<|reserved_token_{token}|>") for token in range(first, end)]
        specials = {name: token for token, name in enumerate(self._names, first)}
        if len(specials) != NUM_SPECIALS:
            twice = next(name for token, name in enumerate(self._names, first) if specials[name] != token)
            raise ConfigError(f"two special ids are called {twice!r}, names must differ")
        self.num_ranks: Final = first
        self.vocab_size: Final = vocab_size
        self.specials: Final[Mapping[str, int]] = MappingProxyType(specials)
        self._tokens: Final = tuple(tokens)
        self._encoding: tiktoken.Encoding | None = None

    @classmethod
    def from_dir(cls, path: Path, vocab_size: int) -> Tokenizer:
        """Reads ``tiktoken.model`` and, where it is there, ``tokenizer_config.json`` of a model directory.

        Raises:
            ConfigError: a file is missing, too large or malformed; the message names file and line.
        """
        tokens = _read_ranks(path / RANKS_FILE)
        names: Mapping[int, str] | None = None
        if os.path.lexists(path / NAMES_FILE):  # a link that leads nowhere, or in circles, is there and is broken
            names = _read_names(path / NAMES_FILE)
        if names is None:
            names = {len(tokens) + offset: name for offset, name in KIMI_SPECIALS.items()}
        return cls(tokens, names, vocab_size)

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``. Never a special id, whatever the text says.

        Raises:
            RequestError: the text holds a lone surrogate, which has no UTF-8.
        """
        check_text(text)
        encode = self.prepare().encode_ordinary
        if len(text) <= _RUN_CHARS:
            return encode(text)
        return [token for piece in _pieces(text) for token in encode(piece)]

    def prepare(self) -> tiktoken.Encoding:
        """Makes what ``encode`` needs, which is done once: half a second and 60 MB for Kimi's vocabulary.

        Not done before it is needed: an engine only ever turns ids into bytes.
        """
        if self._encoding is None:
            self._encoding = tiktoken.Encoding(
                "kimi",
                pat_str=SPLIT_PATTERN,
                mergeable_ranks=_checked_ranks(self._tokens),
                special_tokens=dict(self.specials),
            )
        return self._encoding

    def token_bytes(self, token: int) -> bytes:
        """UTF-8 of an ordinary id (perhaps part of a character); empty for every other integer."""
        return self._tokens[token] if 0 <= token < self.num_ranks else b""

    def is_special(self, token: int) -> bool:
        """True for the 256 ids behind the ranks."""
        return self.num_ranks <= token < self.num_ranks + NUM_SPECIALS

    def special(self, name: str) -> int:
        """Id of a special token.

        Raises:
            ConfigError: this vocabulary has none of that name.
        """
        token = self.specials.get(name)
        if token is None:
            raise ConfigError(
                f"the vocabulary has no special token {str(name)!r}",
                hint=f"a model of the Kimi K2 Thinking family names it in {NAMES_FILE}",
            )
        return token

    def decode(self, tokens: Iterable[int]) -> str:
        """Text for people: special tokens by name, invalid UTF-8 as U+FFFD, unused ids as nothing."""
        parts = (
            self._names[token - self.num_ranks].encode() if self.is_special(token) else self.token_bytes(token)
            for token in tokens
        )
        return b"".join(parts).decode("utf-8", "replace")


def check_text(text: str, param: str | None = None) -> None:
    """Refuses text that has no UTF-8.

    Raises:
        RequestError: with the place of the first lone surrogate.
    """
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"text holds a lone surrogate U+{ord(text[error.start]):04X} at character {error.start}",
            param=param,
            code="invalid_unicode",
            hint="send valid Unicode: a character beyond U+FFFF is a pair of \\u escapes",
        ) from None


def _pieces(text: str) -> Iterator[str]:
    """The reference's cuts: every 400,000 characters, and inside runs of more than 25,000 (non-)space characters."""
    for start in range(0, len(text), _SEGMENT_CHARS):
        segment = text[start : start + _SEGMENT_CHARS]
        begin = 0
        for run in _RUNS.finditer(segment):
            for cut in range(run.start() + _RUN_CHARS, run.end(), _RUN_CHARS):
                yield segment[begin:cut]
                begin = cut
        yield segment[begin:]


def _read_ranks(path: Path) -> list[bytes]:
    """Token bytes by rank."""
    if not path.is_file():
        raise ConfigError(f"`{path}` is missing or not a file", hint=f"Kimi's vocabulary is a file {RANKS_FILE}")
    size = path.stat().st_size
    if size > _MAX_FILE_BYTES:
        raise ConfigError(f"`{path}` has {size} bytes, at most {_MAX_FILE_BYTES} are read")
    data = path.read_bytes().removesuffix(b"\n")
    count = data.count(b"\n") + 1
    if count > _MAX_RANKS:
        raise ConfigError(f"`{path}` has {count} lines, at most {_MAX_RANKS} ranks are read")
    lines = data.split(b"\n")
    tokens: list[bytes] = [b""] * count
    for number, line in enumerate(lines, 1):
        encoded, _, rank = line.partition(b" ")
        try:
            token = base64.b64decode(encoded, validate=True)
        except binascii.Error:
            raise ConfigError(f"`{path}` line {number}: {encoded[:40]!r} is not base64") from None
        if not 0 < len(token) <= _MAX_TOKEN_BYTES:
            raise ConfigError(
                f"`{path}` line {number}: a token of {len(token)} bytes, 1 to {_MAX_TOKEN_BYTES} are valid"
            )
        index = int(rank) if rank.isdigit() and len(rank) < 10 else -1
        if not 0 <= index < count or tokens[index]:
            raise ConfigError(
                f"`{path}` line {number}: rank {rank[:40]!r}, each number from 0 to {count - 1} is needed once"
            )
        tokens[index] = token
    return tokens


def _checked_ranks(tokens: Sequence[bytes]) -> dict[bytes, int]:
    ranks = {token: rank for rank, token in enumerate(tokens)}
    if len(ranks) != len(tokens):
        twice = next(token for rank, token in enumerate(tokens) if ranks[token] != rank)
        raise ConfigError(f"token {twice[:40]!r} has two ranks, tokens must differ")
    missing = [byte for byte in range(256) if bytes((byte,)) not in ranks]
    if missing:
        raise ConfigError(f"byte 0x{missing[0]:02x} has no rank, all 256 single bytes are needed")
    return ranks


def _read_names(path: Path) -> dict[int, str] | None:
    """Names of special ids, or None where the file lists none."""
    listed = read_json(path).get("added_tokens_decoder")
    if listed is None:
        return None
    if not isinstance(listed, dict):
        raise ConfigError(f"`{path}`: `added_tokens_decoder` is a {type(listed).__name__}, an object is needed")
    if len(listed) > NUM_SPECIALS:
        raise ConfigError(f"`{path}`: `added_tokens_decoder` has {len(listed)} entries, at most {NUM_SPECIALS} fit")
    names: dict[int, str] = {}
    for key, entry in listed.items():
        if not (key.isascii() and key.isdigit() and len(key) < 10) or int(key) in names:
            raise ConfigError(f"`{path}`: `added_tokens_decoder` has key {key[:40]!r}, ids that differ are needed")
        name = entry.get("content") if isinstance(entry, dict) else None
        if not isinstance(name, str) or not 0 < len(name) <= _MAX_NAME_CHARS or not name.isascii():
            raise ConfigError(
                f"`{path}`: `added_tokens_decoder.{key}.content` is {name!r:.80}, "
                f"a name of 1 to {_MAX_NAME_CHARS} ASCII characters is needed"
            )
        names[int(key)] = name
    return names
