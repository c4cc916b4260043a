"""Writes a directory that transformers' AutoTokenizer reads, from ranks in tiktoken's form.

Usage: python hf_tokenizer.py MODEL OUT

Runs in the environment of a client that can't do without such a directory, so it needs `tokenizers` and nothing of
ours. Merges are recovered from the ranks: a token's pair is what is left of its bytes when only lower ranks merge.
Words are split as GPT-2 does, which differs from Kimi's way in places: good enough to make up prompts of a length.
"""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers


def byte_letters() -> dict[int, str]:
    """The printable letter that byte-level vocabularies write for each byte."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    letters = {byte: chr(byte) for byte in plain}
    rest = [byte for byte in range(256) if byte not in letters]
    return letters | {byte: chr(256 + index) for index, byte in enumerate(rest)}


def read_ranks(path: Path) -> dict[bytes, int]:
    """Bytes of each token and its rank."""
    lines = (line.split() for line in path.read_bytes().splitlines() if line)
    return {base64.b64decode(token): int(rank) for token, rank in lines}


def pair_of(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes]:
    """The two tokens that merge into ``token``."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        found = [
            (ranks[joined], index)
            for index in range(len(parts) - 1)
            if (joined := parts[index] + parts[index + 1]) in ranks and ranks[joined] < ranks[token]
        ]
        _, index = min(found)
        parts[index : index + 2] = [parts[index] + parts[index + 1]]
    return parts[0], parts[1]


def main(model: Path, out: Path) -> None:
    ranks = read_ranks(model / "tiktoken.model")
    letters = byte_letters()

    def word(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    ordered = sorted(ranks, key=ranks.__getitem__)
    pairs = [pair_of(token, ranks) for token in ordered if len(token) > 1]
    tokenizer = Tokenizer(
        models.BPE({word(token): rank for token, rank in ranks.items()}, [(word(a), word(b)) for a, b in pairs])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("[BOS]", special=True), AddedToken("[EOS]", special=True)])
    out.mkdir(parents=True)
    tokenizer.save(str(out / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "[BOS]", "eos_token": "[EOS]"}
    (out / "tokenizer_config.json").write_text(json.dumps(names))
    (out / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": len(ranks) + 2}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
