"""Files, folders, globs and the standard library become documents."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import numpy as np
import pytest

from lightning_longmoe.data import find_files, sources
from lightning_longmoe.data.sources import read_bytes


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "below" / ".hidden").mkdir(parents=True)
    (tmp_path / "b.txt").write_text("bb")
    (tmp_path / "a.txt").write_text("aaa")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / ".secret").write_text("no")
    (tmp_path / "below" / "c.md").write_text("cccc")
    (tmp_path / "below" / ".hidden" / "d.md").write_text("no")
    return tmp_path


def names(files: list[Path], folder: Path) -> list[str]:
    return [file.relative_to(folder).as_posix() for file in files]


def test_a_folder_means_all_its_visible_files_in_sorted_order(folder: Path) -> None:
    assert names(find_files(str(folder)), folder) == ["a.txt", "b.txt", "below/c.md", "empty.txt"]


def test_globs_files_and_folders_mix_and_each_file_comes_once(folder: Path) -> None:
    given = [str(folder / "*.txt"), str(folder / "b.txt"), str(folder / "below")]
    assert names(find_files(given), folder) == ["a.txt", "b.txt", "below/c.md", "empty.txt"]
    assert names(find_files(str(folder / "**" / "*.md")), folder) == ["below/c.md"]


@pytest.mark.parametrize("missing", ["nowhere/*.txt", "nowhere", "below/.hidden/x"])
def test_a_path_without_files_is_named(folder: Path, missing: str) -> None:
    with pytest.raises(ValueError, match=rf"{missing.replace('*', '.')}' matches no file"):
        find_files([str(folder), str(folder / missing)])


def test_an_empty_folder_and_an_empty_list_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is a folder without files"):
        find_files(str(tmp_path))
    with pytest.raises(ValueError, match=r"paths=\[\].* names no file"):
        find_files([])


def test_documents_hold_the_bytes_and_are_named_below_their_common_folder(folder: Path) -> None:
    documents = read_bytes(find_files(str(folder)))
    assert [d.name for d in documents] == ["a.txt", "b.txt", "below/c.md"]  # the empty file is none
    assert [bytes(d.tokens) for d in documents] == [b"aaa", b"bb", b"cccc"]
    assert all(d.tokens.dtype == np.uint8 for d in documents)


def test_a_limit_cuts_the_last_document(folder: Path) -> None:
    assert [bytes(d.tokens) for d in read_bytes(find_files(str(folder)), 4)] == [b"aaa", b"b"]


def test_large_files_are_mapped(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "MAP_FROM_BYTES", 3)
    documents = read_bytes(find_files(str(folder)))
    assert [isinstance(d.tokens, np.memmap) for d in documents] == [True, False, True]
    assert [bytes(d.tokens) for d in documents] == [b"aaa", b"bb", b"cccc"]


def test_the_standard_library_comes_without_installed_packages() -> None:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [file.relative_to(root).as_posix() for file in find_files(None)]
    assert {"abc.py", "json/decoder.py", "asyncio/events.py"} <= set(files)
    assert files == [str(file) for file in sorted(Path(file) for file in files)]
    assert not [file for file in files if "site-packages" in file or not file.endswith(".py")]


def test_a_python_without_source_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(ValueError, match="comes without its source"):
        find_files(None)
