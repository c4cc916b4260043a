"""Headers that lie. Every refusal names the file, the tensor and the value."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from perilune.checkpoint.header import MAX_HEADER_BYTES, TensorMeta, open_regular, read_header, shown
from perilune.errors import CheckpointError

MakeFile = Callable[..., Path]


def entry(dtype: Any = "F32", shape: Any = (1,), offsets: Any = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def test_reads_tensors_in_the_order_of_their_data(make_file: MakeFile) -> None:
    path = make_file({"b": entry("I8", [2, 1], [4, 6]), "a": entry(), "__metadata__": {"format": "pt"}}, bytes(6))
    start = path.stat().st_size - 6
    assert list(read_header(path).tensors) == [
        TensorMeta("a", "F32", (1,), path, start, start + 4),
        TensorMeta("b", "I8", (2, 1), path, start + 4, start + 6),
    ]


def test_empty_and_scalar_tensors_and_padded_headers_are_fine(make_file: MakeFile) -> None:
    header = {"none": entry("F32", [0, 7], [0, 0]), "scalar": entry("F64", [], [0, 8])}
    path = make_file(json.dumps(header).encode() + b"     ", bytes(8))
    assert {(meta.name, meta.nbytes, meta.numel) for meta in read_header(path).tensors} == {
        ("none", 0, 0),
        ("scalar", 8, 1),
    }


BAD_ENTRIES: list[tuple[str, Any, bytes, str]] = [
    ("no object", 7, b"", "entry is `7`"),
    ("a field too many", {**entry(), "extra": 1}, bytes(4), "entry is"),
    ("a field too few", {"dtype": "F32", "shape": [1]}, bytes(4), "entry is"),
    ("unknown dtype", entry("F12"), bytes(4), "dtype is `F12`, known: BOOL"),
    ("dtype no string", entry(["F32"]), bytes(4), "dtype is"),
    ("shape no list", entry(shape=4), bytes(4), "shape is `4`"),
    ("negative dimension", entry(shape=[-1]), bytes(4), "shape is `[-1]`"),
    ("two negative dimensions", entry(shape=[-1, -1]), bytes(4), "shape is `[-1, -1]`"),
    ("huge dimension", entry(shape=[1 << 63, 1 << 63]), bytes(4), "shape is `[9223372036854775808"),
    ("float dimension", entry(shape=[1.0]), bytes(4), "shape is `[1.0]`"),
    ("true as dimension", entry(shape=[True]), bytes(4), "shape is `[True]`"),
    ("rank 9", entry(shape=[1] * 9), bytes(4), "at most 8 integers"),
    ("one offset", entry(offsets=[4]), bytes(4), "data_offsets is `[4]`"),
    ("negative offset", entry(offsets=[-4, 0]), bytes(4), "data_offsets is `[-4, 0]`"),
    ("huge offset", entry(offsets=[0, 1 << 64]), bytes(4), "data_offsets is"),
    ("end before begin", entry(offsets=[4, 0]), bytes(4), "span -4 bytes"),
    ("bytes against shape", entry(shape=[1000, 1000]), bytes(4), "span 4 bytes, F32 [1000, 1000] needs 4000000"),
    ("a product that wraps in 64 bits", entry("U8", [1 << 32, 1 << 32], [0, 0]), b"", "needs 18446744073709551616"),
]


@pytest.mark.parametrize(
    ("value", "data", "message"), [row[1:] for row in BAD_ENTRIES], ids=[r[0] for r in BAD_ENTRIES]
)
def test_bad_entry(make_file: MakeFile, value: object, data: bytes, message: str) -> None:
    path = make_file({"layer.w": value}, data)
    with pytest.raises(CheckpointError) as caught:
        read_header(path)
    assert str(path) in str(caught.value)
    assert "tensor `layer.w`" in str(caught.value)
    assert message in str(caught.value)


BAD_LAYOUTS: list[tuple[str, dict[str, Any], int, str]] = [
    ("overlap", {"a": entry(), "b": entry(offsets=[2, 6])}, 6, "tensor `b` begins at data offset 2 and overlaps `a`"),
    ("same place", {"a": entry(), "b": entry()}, 4, "tensor `b` begins at data offset 0 and overlaps"),
    ("hole", {"a": entry(), "b": entry(offsets=[8, 12])}, 12, "tensor `b` begins at data offset 8 and leaves a hole"),
    ("hole in front", {"a": entry(offsets=[4, 8])}, 8, "begins at data offset 4 and leaves a hole behind the header"),
    ("trailing bytes", {"a": entry()}, 5, "1 bytes follow the last tensor"),
    ("cut by one byte", {"a": entry()}, 3, "1 bytes are missing"),
    ("no data at all", {"a": entry()}, 0, "4 bytes are missing"),
    ("only trailing bytes", {}, 3, "3 bytes follow"),
    ("metadata no object", {"__metadata__": 3}, 0, "`__metadata__` is `3`"),
    ("metadata no string", {"__metadata__": {"k": 3}}, 0, "key `k` is `3`, a string is needed"),
    ("name with NUL", {"a\0b": entry()}, 4, "printable"),
    ("empty name", {"": entry()}, 4, "a name needs"),
    ("long name", {"n" * 10_000: entry()}, 4, "(10000 characters)"),
    ("name of a lone surrogate", {"\ud800": entry()}, 4, "`'\\ud800'`"),
]


@pytest.mark.parametrize(
    ("header", "size", "message"), [row[1:] for row in BAD_LAYOUTS], ids=[r[0] for r in BAD_LAYOUTS]
)
def test_bad_layout(make_file: MakeFile, header: dict[str, Any], size: int, message: str) -> None:
    path = make_file(header, bytes(size))
    with pytest.raises(CheckpointError) as caught:
        read_header(path)
    assert str(path) in str(caught.value)
    assert message in str(caught.value)


BAD_JSON: list[tuple[str, bytes, str]] = [
    ("not JSON", b"{]", "not valid JSON"),
    ("an array", b"[]", "begins with b'[]', a JSON object"),
    ("space in front", b" {}", "begins with b' {}'"),
    ("nothing", b"", "begins with b''"),
    ("text behind", b"{}x", "not valid JSON"),
    ("two tensors of one name", b'{"a":1,"a":2}', "key `a` stands twice"),
    ("a field twice", b'{"a":{"dtype":"F32","dtype":"I8"}}', "key `dtype` stands twice"),
    ("100,000 deep", b'{"a":' + b"[" * 100_000, "nested too deep"),
    ("not UTF-8", b'{"\xff":1}', "not valid JSON"),
    ("UTF-16", b"{\0}\0", "not valid JSON"),
    ("NaN", b'{"a":NaN}', "NaN is not JSON"),
    ("infinity", b'{"a":-Infinity}', "-Infinity is not JSON"),
    ("a number of 10,000 digits", b'{"a":' + b"1" * 10_000 + b"}", "not valid JSON"),
]


@pytest.mark.parametrize(("raw", "message"), [row[1:] for row in BAD_JSON], ids=[row[0] for row in BAD_JSON])
def test_header_that_is_not_the_formats_json(make_file: MakeFile, raw: bytes, message: str) -> None:
    path = make_file(raw)
    with pytest.raises(CheckpointError) as caught:
        read_header(path)
    assert str(path) in str(caught.value)
    assert message in str(caught.value)


@pytest.mark.parametrize("size", [0, 1, 7])
def test_file_shorter_than_the_length_field(tmp_path: Path, size: int) -> None:
    path = tmp_path / "short"
    path.write_bytes(bytes(size))
    with pytest.raises(CheckpointError, match=rf"has {size} bytes, a safetensors file has at least 8"):
        read_header(path)


@pytest.mark.parametrize("length", [3, 1000, MAX_HEADER_BYTES])
def test_header_longer_than_the_file(make_file: MakeFile, length: int) -> None:
    with pytest.raises(CheckpointError, match=rf"announces a header of {length} bytes and has 10 bytes in all"):
        read_header(make_file(b"{}", length=length))


@pytest.mark.parametrize("length", [MAX_HEADER_BYTES + 1, (1 << 64) - 1])
def test_header_over_the_limit_is_refused_before_it_is_read(tmp_path: Path, length: int) -> None:
    path = tmp_path / "sparse"
    path.write_bytes(length.to_bytes(8, "little"))
    os.truncate(path, 5 << 40)  # five terabytes, none of them on the disk
    with pytest.raises(CheckpointError, match=f"header of {length} bytes, at most 100000000 are allowed"):
        read_header(path)


def test_sparse_file_of_five_terabytes_costs_nothing(make_file: MakeFile) -> None:
    size = 5 << 40
    path = make_file({"w": entry("U8", [size // 1024, 1024], [0, size])})
    os.truncate(path, path.stat().st_size + size)
    assert read_header(path).tensors[0].nbytes == size
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(CheckpointError, match="1 bytes are missing"):
        read_header(path)


@pytest.mark.parametrize("kind", ["fifo", "folder", "device", "link to a device", "absent", "dangling link"])
def test_only_regular_files_are_opened_and_none_hangs(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "device":
        path = Path("/dev/zero")
    elif kind == "link to a device":
        path.symlink_to("/dev/random")
    elif kind == "dangling link":
        path.symlink_to(tmp_path / "nowhere")
    signal.alarm(10)  # a pipe without a writer would wait for ever
    try:
        with pytest.raises(CheckpointError, match=r"not a regular file|cannot be read: No such file") as caught:
            open_regular(path)
    finally:
        signal.alarm(0)
    assert str(path) in str(caught.value)


def test_foreign_values_are_shown_on_one_short_line() -> None:
    assert shown("a.b") == "`a.b`"
    assert shown("a\nb") == "`'a\\nb'`"
    assert shown("x" * 500) == f"`{'x' * 120}…` (500 characters)"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(max_size=8), children, max_size=4),
    max_leaves=12,
)
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "I32", "U8", "F8_E4M3", "X"]) | json_values,
        "shape": st.lists(st.integers(-2, 5), max_size=3) | json_values,
        "data_offsets": st.lists(st.integers(-1, 64), min_size=2, max_size=2) | json_values,
    }
)
headers = st.dictionaries(st.text(max_size=6) | st.just("__metadata__"), entries | json_values, max_size=4)
raw_headers = headers.map(lambda value: json.dumps(value).encode()) | st.binary(max_size=80).map(lambda b: b"{" + b)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(raw=raw_headers, data=st.binary(max_size=64), slack=st.integers(-3, 3) | st.just(0))
def test_any_header_is_read_or_refused(tmp_path: Path, raw: bytes, data: bytes, slack: int) -> None:
    """No bytes lead to another exception, and what is accepted tiles the file."""
    path = tmp_path / "any"
    path.write_bytes(max(len(raw) + slack, 0).to_bytes(8, "little") + raw + data)
    message = ""
    try:
        metas = read_header(path).tensors
    except CheckpointError as error:
        message = str(error)
    if message:
        assert str(path) in message
        assert message.isprintable()
        return
    assert sum(meta.nbytes for meta in metas) + 8 + len(raw) + slack == path.stat().st_size


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_file_is_read_or_refused(tmp_path: Path, data: st.DataObject) -> None:
    """Flipped and cut bytes of a good file."""
    raw = json.dumps({"a": entry(), "b": entry("BF16", [2, 3], [4, 16])}).encode()
    good = bytearray(len(raw).to_bytes(8, "little") + raw + bytes(16))
    for _ in range(data.draw(st.integers(1, 3))):
        good[data.draw(st.integers(0, len(good) - 1))] ^= data.draw(st.integers(1, 255))
    path = tmp_path / "damaged"
    path.write_bytes(good[: data.draw(st.integers(0, len(good)))])
    try:
        metas = read_header(path).tensors
    except CheckpointError:
        return
    assert all(8 <= meta.begin <= meta.end <= path.stat().st_size for meta in metas)
