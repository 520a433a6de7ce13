"""Putting a checkpoint in place with one rename, and what an interruption leaves behind.

A checkpoint ``runs/last.ckpt`` grows at ``runs/.longmoe-saving/last.ckpt/new``. When all ranks are done it takes the
place of the one before it:

* nothing there yet: rename;
* Linux: ``renameat2`` exchanges the two in one step, and the one before is deleted afterwards;
* where that does not exist (some network file systems): the one before steps aside to ``.../last.ckpt/old``, then the
  new one is renamed. Between these two renames ``runs/last.ckpt`` is missing; `resolve` then reads the new one, and the
  next save in the folder finishes the move.

So at every moment ``resolve("runs/last.ckpt")`` is a complete checkpoint. The staging folder has a name of its own,
since Lightning looks through the entries of a checkpoint folder by name.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import shutil
import zipfile
from collections.abc import Generator
from pathlib import Path

from lightning_longmoe.saving.agreement import CheckpointError

STAGING = ".longmoe-saving"
METADATA = ".metadata"
"""Index of the shards; torch.distributed.checkpoint writes it when all ranks have written their shards."""
META_FILE = "meta.pt"
"""Everything of Lightning's checkpoint that is not a sharded tensor."""

# ------------------------------------------------------------------------------------------------- what is complete


def is_complete(path: str | os.PathLike[str]) -> bool:
    """Whether a checkpoint, folder or file, can be loaded from ``path`` (also after an interrupted replacement)."""
    return resolve(Path(path)) is not None


def resolve(path: Path) -> Path | None:
    """Where the checkpoint ``path`` really lies; None where there is no complete one."""
    if _has_all(path):
        return path
    staging = staging_folder(path)
    if os.path.lexists(path) or not os.path.lexists(staging / "old"):
        return None
    return next((found for found in (staging / "new", staging / "old") if _has_all(found)), None)


def missing_part(path: Path) -> str:
    """Why ``path`` is no complete checkpoint, in words."""
    if not path.exists():
        return "there is nothing"
    if path.is_dir():
        absent = [name for name in (METADATA, META_FILE) if not (path / name).is_file()]
        return f"it is incomplete: no {' and no '.join(absent)}"
    return "it is damaged, or not a file that torch.save wrote"


def newest_complete(folder: str | os.PathLike[str]) -> Path | None:
    """The newest complete checkpoint in ``folder``, by the time it was completed; None if there is none.

    Looks at folders and at files that end in ``.ckpt``. A link loses against what it points to.
    """
    folder = Path(folder)
    if not folder.is_dir():
        return None
    names = {entry.name for entry in folder.iterdir() if entry.is_dir() or entry.suffix == ".ckpt"}
    staging = folder / STAGING
    names |= {entry.name for entry in staging.iterdir()} if staging.is_dir() else set()
    found = [(folder / name, real) for name in sorted(names - {STAGING}) if (real := resolve(folder / name))]
    return max(found, key=lambda pair: (_completed_at(pair[1]), not pair[0].is_symlink()), default=(None,))[0]


def _has_all(path: Path) -> bool:
    if path.is_dir():
        return (path / METADATA).is_file() and (path / META_FILE).is_file()
    return path.is_file() and zipfile.is_zipfile(path)  # the directory of a zip file is its end


def _completed_at(path: Path) -> int:
    return (path / METADATA if path.is_dir() else path).stat().st_mtime_ns


# ------------------------------------------------------------------------------------------- staging; rank 0 only


def staging_folder(path: Path) -> Path:
    """Where the checkpoint ``path`` is prepared: the same file system, out of the sight of Lightning."""
    return path.parent / STAGING / path.name


@contextlib.contextmanager
def staged(path: Path) -> Generator[Path, None, None]:
    """Clean up what interrupted saves left, and offer a place for the new checkpoint. On rank 0.

    Yields:
        a path that does not exist; what stands there on a normal end is committed to ``path``. After an exception
        it is deleted, and what was at ``path`` stays.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    clean(path.parent)
    staging = staging_folder(path)
    staging.mkdir(parents=True, exist_ok=True)
    with _locked(staging) as free:
        if not free:
            raise CheckpointError(f"Another process is saving to {path}: give each run a folder of its own.")
        if os.path.lexists(staging / "new"):
            raise CheckpointError(f"{staging} holds the rest of an interrupted save and cannot be deleted: delete it.")
        try:
            yield staging / "new"
            _commit(staging, path)
        finally:
            if os.path.lexists(path) or not os.path.lexists(staging / "old"):
                _delete(staging)


def _commit(staging: Path, path: Path) -> None:
    new, old = staging / "new", staging / "old"
    if new.is_dir():
        sync_folder(new)
    sync_folder(staging)
    if not os.path.lexists(path):
        os.rename(new, path)
    elif not new.is_dir() and (path.is_symlink() or not path.is_dir()):
        os.replace(new, path)
    elif not _exchange(new, path):
        os.rename(path, old)
        try:
            os.rename(new, path)
        except OSError:
            os.rename(old, path)
            raise
    sync_folder(path.parent)


def clean(folder: Path) -> None:
    """Finish replacements in ``folder`` that were interrupted, and delete what other interrupted saves left."""
    staging = folder / STAGING
    for leftover in sorted(staging.iterdir()) if staging.is_dir() else []:
        with contextlib.suppress(FileNotFoundError), _locked(leftover) as free:  # another process may clean as well
            if not free:
                continue  # a save of another process that still runs
            target = folder / leftover.name
            real = resolve(target)
            if real is not None and real.parent == leftover:
                os.rename(real, target)
            _delete(leftover)


def remove(path: str | os.PathLike[str]) -> None:
    """Delete a checkpoint, folder or file; of a link only the link. Nothing happens if there is none.

    A folder is renamed out of the way first, so that a half-deleted one never has a checkpoint's name.
    """
    path = Path(path)
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.is_dir():
        staging = staging_folder(path)
        _delete(staging)
        staging.mkdir(parents=True)
        os.rename(path, staging / "removed")
        _delete(staging)


def _delete(staging: Path) -> None:
    """Delete a staging folder, and the folder of staging folders with the last one; the next save deletes the rest."""
    with contextlib.suppress(OSError):
        for entry in staging.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()
        staging.rmdir()
        staging.parent.rmdir()


@contextlib.contextmanager
def _locked(staging: Path) -> Generator[bool, None, None]:
    """Hold the lock of a staging folder, if nobody else does. It ends with the process, however that ends.

    Yields:
        whether the lock is ours. True as well on file systems without locks.
    """
    handle = os.open(staging, os.O_RDONLY)
    try:
        free = True
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            free = False
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF, errno.EINVAL):
                raise
        yield free
    finally:
        os.close(handle)


# ---------------------------------------------------------------------------------------------------- system calls


def sync_folder(folder: Path) -> None:
    """Make the entries of a folder durable: a rename is not, until its folder is."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EBADF):  # file systems that cannot do it to a folder
            raise
    finally:
        os.close(handle)


def _exchange(first: Path, second: Path) -> bool:
    """Exchange two paths in one step; False where the system cannot."""
    at_current_folder, rename_exchange = -100, 2
    try:
        call = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        return False
    if call(at_current_folder, os.fsencode(first), at_current_folder, os.fsencode(second), rename_exchange) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTTY):
        return False
    raise OSError(code, os.strerror(code), str(first), None, str(second))
