"""The loader: what it says where there is a library, none, or a foreign one."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from perilune import native
from perilune.errors import PeriluneError

API = Path(native.__file__).with_name("api.h")


@pytest.fixture
def fresh() -> Iterator[None]:
    """``codecs()`` remembers its answer; these tests ask it anew."""
    native.codecs.cache_clear()
    yield
    native.codecs.cache_clear()


def test_a_machine_with_a_compiler_has_the_library() -> None:
    """Else every other test here would be skipped, and nobody would notice."""
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler")
    assert native.codecs() is not None, "install the package: `make dev-env`"


@pytest.mark.usefixtures("fresh")
def test_without_a_library_there_are_no_codecs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(native, "__path__", [str(tmp_path)])
    assert native.codecs() is None
    assert native.describe() == "native codecs: none built (no C++ compiler), torch serves"


@pytest.mark.usefixtures("fresh")
def test_the_library_is_found_in_any_folder_of_the_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, codecs: native.Codecs
) -> None:
    shutil.copy(codecs.path, tmp_path / codecs.path.name)
    monkeypatch.setattr(native, "__path__", [str(tmp_path / "absent"), str(tmp_path)])
    found = native.codecs()
    assert found is not None
    assert found.path.parent == tmp_path
    assert native.describe() == f"native codecs: {codecs.isa}"


def test_a_file_that_is_no_library_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "libperilune_codecs.so"
    path.write_bytes(b"\x7fELF but no more")
    with pytest.raises(PeriluneError, match="does not load") as caught:
        native.open_codecs(path)
    assert "make" in caught.value.hint


def test_a_library_of_another_version_is_an_error(tmp_path: Path) -> None:
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    source, path = tmp_path / "other.cc", tmp_path / "libperilune_codecs.so"
    source.write_text('extern "C" int pl_codecs_abi() { return 4711; }\n')
    subprocess.run([compiler, "-shared", "-fPIC", "-o", path, source], check=True)
    with pytest.raises(PeriluneError, match=r"has interface 4711, this source needs \d+"):
        native.open_codecs(path)


def test_a_unit_beyond_the_machine_is_refused(codecs: native.Codecs) -> None:
    if codecs.isa == native.ISAS[-1]:
        assert codecs.with_isa("avx512").isa == "avx512"
    else:
        with pytest.raises(PeriluneError, match="the best unit is"):
            codecs.with_isa(native.ISAS[-1])


def test_python_and_header_agree() -> None:
    text = API.read_text()
    assert f"#define PL_CODECS_ABI {native._ABI}\n" in text
    names = [
        part.split("=")[0].strip() for part in text.split("enum PlIsa", 1)[1].split("{")[1].split("}")[0].split(",")
    ]
    assert names == [f"PL_{isa.upper()}" for isa in native.ISAS]
