"""The bundled models' vocabulary: byte-level BPE learned on their own chats, in Kimi's file format.

Ranks 0–255 are the single bytes in GPT-2's order (as in Kimi's file), then come merges; behind the ranks lie Kimi's
256 special ids under Kimi's names. Pieces are cut by Kimi's pattern before merging, so a group of digits is a piece of
its own: those are left out of the count, no merge contains a digit, and every digit is one token.
"""

from __future__ import annotations

import base64
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path

import regex

from perilune.text.tokenizer import KIMI_SPECIALS, NAMES_FILE, NUM_SPECIALS, RANKS_FILE, SPLIT_PATTERN


def gpt2_byte_order() -> list[int]:
    """All bytes: those that print in Latin-1 first, then the rest, each in ascending order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return printable + [byte for byte in range(256) if byte not in set(printable)]


def learn(texts: Iterable[str], num_ranks: int) -> list[bytes]:
    """Byte-pair encoding (Sennrich et al., arXiv 1508.07909) over counted pieces.

    Ties go to the pair that sorts first, so equal texts give equal tokens. Fewer than ``num_ranks`` come out only when
    nothing is left to merge.
    """
    splitter = regex.compile(SPLIT_PATTERN, regex.V1)
    counts: Counter[bytes] = Counter()
    for text in texts:
        counts.update(piece.encode() for piece in splitter.findall(text) if not any(map(str.isdigit, piece)))
    words = {piece: [bytes((byte,)) for byte in piece] for piece in counts}
    tokens = [bytes((byte,)) for byte in gpt2_byte_order()]
    while len(tokens) < num_ranks:
        pairs: Counter[tuple[bytes, bytes]] = Counter()
        for piece, word in words.items():
            for pair in pairwise(word):
                pairs[pair] += counts[piece]
        if not pairs:
            break
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        tokens.append(best[0] + best[1])
        words = {piece: list(_merged(word, best)) for piece, word in words.items()}
    return tokens


def _merged(word: list[bytes], pair: tuple[bytes, bytes]) -> Iterator[bytes]:
    index = 0
    while index < len(word):
        if tuple(word[index : index + 2]) == pair:
            yield pair[0] + pair[1]
            index += 2
        else:
            yield word[index]
            index += 1


def write(out: Path, tokens: list[bytes]) -> None:
    """``tiktoken.model`` and ``tokenizer_config.json``, the same bytes for the same tokens."""
    out.mkdir(parents=True, exist_ok=True)
    lines = (base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens))
    (out / RANKS_FILE).write_bytes(b"".join(lines))
    kept_in_text = ("<|tool_call", "<think>", "</think>")
    names = {
        str(len(tokens) + offset): {
            "content": name,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": not name.startswith(kept_in_text),
        }
        for offset, name in sorted(KIMI_SPECIALS.items())
    }
    config = {
        "added_tokens_decoder": names,
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "clean_up_tokenization_spaces": False,
        "tokenizer_class": "TikTokenTokenizer",
    }
    (out / NAMES_FILE).write_text(json.dumps(config, indent=2) + "\n")


def vocab_size(tokens: list[bytes]) -> int:
    """Ranks and special ids together."""
    return len(tokens) + NUM_SPECIALS
