"""Names of blocks: the same everywhere, different for whatever differs."""

from __future__ import annotations

import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from perilune.kv.prefix import BlockChain, block_hash, root_hash

TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=40)


@given(TOKENS, st.integers(1, 8), st.lists(st.integers(0, 40), max_size=4))
def test_a_chain_grown_in_pieces_is_the_chain_of_the_whole(tokens: list[int], size: int, cuts: list[int]) -> None:
    whole, pieces = BlockChain(root_hash("m", "s"), size), BlockChain(root_hash("m", "s"), size)
    whole.extend(tokens)
    for cut in sorted(cuts):
        pieces.extend(tokens[:cut])
    pieces.extend(tokens)
    assert pieces.hashes == whole.hashes
    assert len(whole.hashes) == len(tokens) // size


@given(TOKENS, TOKENS, st.text(max_size=5), st.text(max_size=5))
def test_names_differ_where_anything_differs(a: list[int], b: list[int], salt_a: str, salt_b: str) -> None:
    name_a, name_b = block_hash(root_hash("m", salt_a), a), block_hash(root_hash("m", salt_b), b)
    assert (name_a == name_b) == ((a, salt_a) == (b, salt_b))


def test_partitions_do_not_collide() -> None:
    """vLLM CVE-2025-25183, SGLang CVE-2026-10775: fields without lengths, digests cut short."""
    assert root_hash("ab", "c") != root_hash("a", "bc")
    root = root_hash("", "")
    assert len(root) == 32
    assert block_hash(root, [1, 2]) != block_hash(root, [1, 512])
    assert block_hash(block_hash(root, [1]), [2]) != block_hash(root, [1, 2])


def test_names_do_not_depend_on_the_process() -> None:
    script = "from perilune.kv.prefix import *; print(block_hash(root_hash('m', 's'), [1, 2, 3]).hex())"
    names = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for seed in ("0", "1")
    }
    assert names == {block_hash(root_hash("m", "s"), [1, 2, 3]).hex() + "\n"}
