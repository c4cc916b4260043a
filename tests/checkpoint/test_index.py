"""Which files of a folder are opened: names that leave it, links, shards that disagree with the index."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from perilune.checkpoint.index import INDEX_NAME, locate, read_index
from perilune.errors import CheckpointError


def shard(path: Path, *names: str) -> None:
    """A file of one-byte tensors."""
    header = {name: {"dtype": "U8", "shape": [1], "data_offsets": [at, at + 1]} for at, name in enumerate(names)}
    raw = json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(len(names)))


def write_index(root: Path, weight_map: object, **more: Any) -> None:
    (root / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map, **more}))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two shards with names that nobody would build, and their index."""
    folder = tmp_path / "model"
    folder.mkdir()
    shard(folder / "x-00001-of-000002.safetensors", "a", "b")
    shard(folder / "second.safetensors", "c")
    write_index(
        folder,
        {"a": "x-00001-of-000002.safetensors", "c": "second.safetensors", "b": "x-00001-of-000002.safetensors"},
        metadata={"total_size": 3},
    )
    return folder


def test_shards_are_those_that_the_index_names(root: Path) -> None:
    index = read_index(root)
    assert set(index.tensors) == {"a", "b", "c"}
    assert index.shards == ("second.safetensors", "x-00001-of-000002.safetensors")
    assert index.tensors["c"].file == root / "second.safetensors"
    assert (index.nbytes, index.total_size, index.notes) == (3, 3, ())


def test_a_single_file_needs_no_index(tmp_path: Path) -> None:
    shard(tmp_path / "model.safetensors", "a")
    index = read_index(tmp_path)
    assert (index.shards, list(index.tensors), index.total_size) == (("model.safetensors",), ["a"], None)


def test_the_root_may_be_a_link(root: Path, tmp_path: Path) -> None:
    (tmp_path / "alias").symlink_to(root)
    assert read_index(tmp_path / "alias").root == root


def test_other_weight_files_are_named_and_never_opened(root: Path) -> None:
    for name in ("pytorch_model.bin", "consolidated.safetensors", "model.gguf"):
        os.mkfifo(root / name)  # opening one would wait for ever
    index = read_index(root)
    assert index.unread == ("consolidated.safetensors", "model.gguf", "pytorch_model.bin")
    assert index.notes[0].startswith("3 weight files are not part of the checkpoint and are not opened")


def test_a_folder_with_pickles_only(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04")
    with pytest.raises(
        CheckpointError, match=r"neither `model.safetensors.index.json` nor `model.safetensors`"
    ) as caught:
        read_index(tmp_path)
    assert "`pytorch_model.bin` was not opened" in caught.value.hint


def test_a_stale_total_is_noted(root: Path) -> None:
    text = (root / INDEX_NAME).read_text().replace('"total_size": 3', '"total_size": 4')
    (root / INDEX_NAME).write_text(text)
    assert read_index(root).notes == ("the index states a total_size of 4, its tensors have 3 bytes",)


@pytest.mark.parametrize(
    "name",
    [
        "../model.safetensors",
        "/etc/passwd.safetensors",
        "a/../../b.safetensors",
        "a/b.safetensors",
        "..\\b.safetensors",
        "a\0.safetensors",
        "a\n.safetensors",
        "\ud800.safetensors",
        "n" * 300 + ".safetensors",
        "é" * 127 + ".safetensors",
    ],
)
def test_names_that_are_no_plain_file_names(root: Path, name: str) -> None:
    write_index(root, {"a": name})
    with pytest.raises(CheckpointError, match=r"is not a plain file name|longer than the 255 bytes") as caught:
        read_index(root)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("value", [7, None, ["x.safetensors"], "model.bin", "", "..", "x.safetensors.py"])
def test_values_that_name_no_safetensors_file(root: Path, value: object) -> None:
    write_index(root, {"a": value})
    with pytest.raises(CheckpointError, match=r"places tensor `a` in .*the name of a .safetensors file is needed"):
        read_index(root)


def test_a_link_out_of_the_folder_is_refused(root: Path, tmp_path: Path) -> None:
    shard(tmp_path / "secret.safetensors", "a")
    (root / "link.safetensors").symlink_to("../secret.safetensors")
    write_index(root, {"a": "link.safetensors"})
    with pytest.raises(CheckpointError, match=r"`link.safetensors` links to `.*secret.safetensors`, which is outside"):
        read_index(root)


def test_a_folder_whose_name_begins_alike_is_outside(root: Path, tmp_path: Path) -> None:
    (tmp_path / "model-evil").mkdir()
    shard(tmp_path / "model-evil" / "s.safetensors", "a")
    (root / "link.safetensors").symlink_to("../model-evil/s.safetensors")
    with pytest.raises(CheckpointError, match="which is outside"):
        locate(root, "link.safetensors")


def test_links_inside_the_folder_and_loops(root: Path) -> None:
    (root / "inner.safetensors").symlink_to("second.safetensors")
    assert locate(root, "inner.safetensors") == root / "second.safetensors"
    (root / "loop.safetensors").symlink_to("loop.safetensors")
    with pytest.raises(CheckpointError, match=r"`loop.safetensors` in .* cannot be followed"):
        locate(root, "loop.safetensors")


def test_the_hub_cache_keeps_its_files_in_blobs(tmp_path: Path) -> None:
    repo = tmp_path / "models--moonshotai--Kimi"
    snapshot = repo / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    (repo / "blobs").mkdir()
    shard(repo / "blobs" / "deadbeef", "a")
    (snapshot / "model.safetensors").symlink_to("../../blobs/deadbeef")
    assert read_index(snapshot).tensors["a"].file == repo / "blobs" / "deadbeef"
    # Only files directly in that folder, and only from a snapshot.
    shard(repo / "beside", "a")
    (snapshot / "x.safetensors").symlink_to("../../beside")
    with pytest.raises(CheckpointError, match="outside"):
        locate(snapshot, "x.safetensors")
    (repo / "blobs" / "link").symlink_to("../beside")
    (snapshot / "y.safetensors").symlink_to("../../blobs/link")
    with pytest.raises(CheckpointError, match="outside"):
        locate(snapshot, "y.safetensors")


def test_missing_shard(root: Path) -> None:
    (root / "second.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"`second.safetensors` is missing in") as caught:
        read_index(root)
    assert "finish the download" in caught.value.hint


def test_index_places_a_tensor_that_no_shard_holds(root: Path) -> None:
    first, second = "x-00001-of-000002.safetensors", "second.safetensors"
    write_index(root, {"a": first, "b": first, "z": second, "c": second})
    with pytest.raises(CheckpointError, match=r"places tensor `z` in `second.safetensors`, which does not hold it"):
        read_index(root)


def test_shard_holds_a_tensor_that_the_index_does_not_know(root: Path) -> None:
    shard(root / "second.safetensors", "c", "stray")
    with pytest.raises(CheckpointError, match=r"`second.safetensors` holds tensor `stray`, but .* does not name it"):
        read_index(root)


def test_tensor_in_two_shards(root: Path) -> None:
    shard(root / "second.safetensors", "c", "b")
    with pytest.raises(CheckpointError, match=r"tensor `b`.*`x-00001-of-000002.safetensors`"):
        read_index(root)
    write_index(root, {"a": "x-00001-of-000002.safetensors", "b": "second.safetensors", "c": "second.safetensors"})
    with pytest.raises(CheckpointError, match=r"tensor `b`.*`second.safetensors`"):
        read_index(root)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "needs an object `weight_map`"),
        ("{}", "needs an object `weight_map`"),
        ('{"weight_map": {}}', "needs an object `weight_map`"),
        ('{"weight_map": [1]}', "needs an object `weight_map`"),
        ('{"weight_map": {"a": "b", "a": "c"}}', "key `a` stands twice"),
        ('{"weight_map": NaN}', "NaN is not JSON"),
        ("[" * 100_000, "nested too deep"),
        ("", "not valid JSON"),
    ],
)
def test_index_that_is_none(root: Path, text: str, message: str) -> None:
    (root / INDEX_NAME).write_text(text)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_index(root)
    assert INDEX_NAME in str(caught.value)


def test_index_of_a_terabyte(root: Path) -> None:
    os.truncate(root / INDEX_NAME, 1 << 40)
    with pytest.raises(CheckpointError, match="has 1099511627776 bytes, at most 200000000 are read"):
        read_index(root)


def test_index_that_is_a_pipe(root: Path) -> None:
    (root / INDEX_NAME).unlink()
    os.mkfifo(root / INDEX_NAME)
    with pytest.raises(CheckpointError, match="is not a regular file"):
        read_index(root)


def test_paths_that_are_no_folder(root: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        read_index(root / "nowhere")
    with pytest.raises(CheckpointError, match="is not a folder"):
        read_index(root / "second.safetensors")


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    value=st.dictionaries(
        st.text(max_size=4), st.text(max_size=12) | st.text(max_size=4).map(lambda s: s + ".safetensors")
    )
    | st.recursive(
        st.none() | st.integers() | st.text(max_size=4), lambda c: st.lists(c) | st.dictionaries(st.text(), c)
    )
)
def test_any_index_is_read_or_refused(root: Path, value: object) -> None:
    write_index(root, value)
    with pytest.raises(CheckpointError):
        read_index(root)
