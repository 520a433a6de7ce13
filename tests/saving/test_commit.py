"""The file-system side alone: whatever moment a save or a removal is cut off at, a complete checkpoint is left."""

from __future__ import annotations

import os
import shutil
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_longmoe.saving import CheckpointError, commit, is_complete, newest_complete, remove
from lightning_longmoe.saving.commit import resolve, staged

CALLS = ["rename", "replace", "fsync", "mkdir", "unlink", "rmdir", "open"]


def _folder(path: Path, content: str) -> None:
    path.mkdir()
    for name in ("__0_0.distcp", "meta.pt", ".metadata"):
        (path / name).write_text(content)


def _file(path: Path, content: str) -> None:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("content", content)


def _content(path: Path) -> str:
    real = resolve(path)
    assert real is not None, f"{path} is not loadable"
    if real.is_dir():
        assert {file.read_text() for file in real.iterdir()} == {(real / "meta.pt").read_text()}
        return (real / "meta.pt").read_text()
    with zipfile.ZipFile(real) as file:
        return file.read("content").decode()


def _save(path: Path, make: Callable[[Path, str], None], content: str) -> None:
    with staged(path) as new:
        make(new, content)


def _killed_before_call(number: int, function: Callable[..., None], *args: Any) -> bool:
    """Run ``function`` in a forked process that ends, without a trace, before its ``number``-th system call.

    Returns:
        whether it was cut off; False when it came to its end.
    """
    child = os.fork()
    if child == 0:
        left = [number]

        def counted(call: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                left[0] -= 1
                if left[0] == 0:
                    os._exit(9)
                return call(*args, **kwargs)

            return run

        for name in CALLS:
            setattr(os, name, counted(getattr(os, name)))
        commit._exchange = counted(commit._exchange)
        try:
            function(*args)
        except BaseException:
            os._exit(1)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 9)
    return code == 9


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda handle: None)


@pytest.fixture(params=["exchange", "two renames"])
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "two renames":
        monkeypatch.setattr(commit, "_exchange", lambda first, second: False)


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("make", [_folder, _file])
@pytest.mark.parametrize("before", ["folder", "file", "link", None])
def test_a_save_cut_off_at_any_call_leaves_the_one_before_or_the_new_one(
    tmp_path: Path, make: Callable[[Path, str], None], before: str | None
) -> None:
    number, cut = 0, True
    while cut:
        number += 1
        folder = tmp_path / str(number)
        folder.mkdir()
        path = folder / "last.ckpt"
        _folder(folder / "older.ckpt", "older")
        os.utime(folder / "older.ckpt" / ".metadata", (1, 1))
        if before == "link":
            _folder(folder / "first.ckpt", "first")
            path.symlink_to("first.ckpt")
        elif before is not None:
            (_folder if before == "folder" else _file)(path, "first")
        cut = _killed_before_call(number, _save, path, make, "second")
        if before is None:
            assert newest_complete(folder) in (path, folder / "older.ckpt")
        else:
            assert _content(path) in ("first", "second")
            assert _content(newest_complete(folder)) in ("first", "second")  # type: ignore[arg-type]
        if not cut:
            assert _content(path) == "second"
        _save(path, make, "third")  # the next save works and cleans up
        assert _content(path) == "third"
        assert _content(folder / "older.ckpt") == "older"
        if before == "link":
            assert _content(folder / "first.ckpt") == "first"
        assert set(os.listdir(folder)) - {"first.ckpt"} == {"last.ckpt", "older.ckpt"}
        shutil.rmtree(folder)
    assert number > 5


def test_a_removal_cut_off_at_any_call_leaves_no_half_checkpoint(tmp_path: Path) -> None:
    number, cut = 0, True
    while cut:
        number += 1
        folder = tmp_path / str(number)
        folder.mkdir()
        _folder(folder / "a.ckpt", "a")
        cut = _killed_before_call(number, remove, folder / "a.ckpt")
        assert is_complete(folder / "a.ckpt") == (folder / "a.ckpt").exists()
        _save(folder / "b.ckpt", _folder, "b")
        assert set(os.listdir(folder)) <= {"a.ckpt", "b.ckpt"}
    assert number > 3


def test_removing_a_link_keeps_what_it_points_to(tmp_path: Path) -> None:
    _folder(tmp_path / "a.ckpt", "a")
    (tmp_path / "last.ckpt").symlink_to("a.ckpt")
    assert _content(tmp_path / "last.ckpt") == "a"
    remove(tmp_path / "last.ckpt")
    remove(tmp_path / "nothing.ckpt")
    assert os.listdir(tmp_path) == ["a.ckpt"]
    remove(tmp_path / "a.ckpt")
    assert os.listdir(tmp_path) == []


@pytest.mark.usefixtures("_way")
def test_an_error_while_writing_keeps_the_one_before_and_frees_the_space(tmp_path: Path) -> None:
    _folder(tmp_path / "a.ckpt", "first")
    with pytest.raises(OSError, match="No space"), staged(tmp_path / "a.ckpt") as new:
        new.mkdir()
        raise OSError("No space left on device")
    assert _content(tmp_path / "a.ckpt") == "first"
    assert os.listdir(tmp_path) == ["a.ckpt"]


def test_an_error_in_the_second_rename_puts_the_one_before_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit, "_exchange", lambda first, second: False)
    _folder(tmp_path / "a.ckpt", "first")
    rename = os.rename

    def refuse(source: Path, target: Path) -> None:
        if Path(source).name == "new":
            raise OSError("stale file handle")
        rename(source, target)

    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(OSError, match="stale"):
        _save(tmp_path / "a.ckpt", _folder, "second")
    assert _content(tmp_path / "a.ckpt") == "first"


def test_the_newest_complete_checkpoint_is_found_among_others(tmp_path: Path) -> None:
    assert newest_complete(tmp_path) is None
    assert newest_complete(tmp_path / "nowhere") is None
    _folder(tmp_path / "old.ckpt", "old")
    _file(tmp_path / "middle.ckpt", "middle")
    _folder(tmp_path / "new.ckpt", "new")
    (tmp_path / "last.ckpt").symlink_to("new.ckpt")
    _folder(tmp_path / "broken.ckpt", "broken")
    (tmp_path / "broken.ckpt" / ".metadata").unlink()
    _file(tmp_path / "cut.ckpt", "cut" * 100)
    (tmp_path / "cut.ckpt").write_bytes((tmp_path / "cut.ckpt").read_bytes()[:50])
    (tmp_path / "notes.txt").write_text("no checkpoint")
    now = time.time()
    for age, name in enumerate(["new.ckpt/.metadata", "middle.ckpt", "old.ckpt/.metadata"]):
        os.utime(tmp_path / name, (now - age, now - age))
    assert newest_complete(tmp_path) == tmp_path / "new.ckpt"
    assert [is_complete(tmp_path / name) for name in ("last.ckpt", "broken.ckpt", "cut.ckpt")] == [True, False, False]
    remove(tmp_path / "new.ckpt")
    assert newest_complete(tmp_path) == tmp_path / "middle.ckpt"  # last.ckpt points to nothing


def test_a_save_of_another_process_that_still_runs_is_left_alone(tmp_path: Path) -> None:
    with staged(tmp_path / "a.ckpt") as new:
        _folder(new, "a")
        _save(tmp_path / "b.ckpt", _folder, "b")
        assert _content(new) == "a"
        with pytest.raises(CheckpointError, match="Another process"), staged(tmp_path / "a.ckpt"):
            pass
        assert _content(new) == "a"
    assert _content(tmp_path / "a.ckpt") == "a"
    assert sorted(os.listdir(tmp_path)) == ["a.ckpt", "b.ckpt"]


def test_the_system_exchanges_two_paths_in_one_step(tmp_path: Path) -> None:
    _folder(tmp_path / "a", "a")
    _file(tmp_path / "b", "b")
    if not commit._exchange(tmp_path / "a", tmp_path / "b"):
        pytest.skip("this file system cannot")
    assert (tmp_path / "a").is_file()
    assert _content(tmp_path / "b") == "a"
