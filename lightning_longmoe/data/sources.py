"""Where text comes from: files, folders, globs, or the source of the running Python's standard library."""

from __future__ import annotations

import glob
import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np

MAP_FROM_BYTES = 64 * 2**20
"""Files from this size on are memory-mapped, so that the ranks of a node share one copy; smaller ones are read."""

STANDARD_LIBRARY_LEAVES_OUT = frozenset({"site-packages", "dist-packages", "__pycache__"})
"""Folders that are installed packages or hold no source."""


@dataclass(frozen=True)
class Document:
    """One text.

    Attributes:
        name: where it comes from, for messages; documents are ordered by it.
        tokens: [T] integers.
    """

    name: str
    tokens: np.ndarray


def find_files(paths: str | list[str] | None) -> list[Path]:
    """The files that ``paths`` names, each once, in sorted order.

    Args:
        paths: files, folders (every file below them, hidden ones left out) or globs (``**`` descends). None: every
            ``*.py`` of the running Python's standard library with its own tests, without installed packages.

    Raises:
        ValueError: a path names no file.
    """
    if paths is None:
        return _standard_library()
    given = [paths] if isinstance(paths, str) else list(paths)
    found = {file for path in given for file in _expand(path)}
    if not found:
        raise ValueError(f"LongTextDataModule(paths={paths!r}) names no file. Give a file, a folder or a glob.")
    return sorted(found)


def _expand(path: str) -> list[Path]:
    expanded = Path(path).expanduser()
    if expanded.is_file():
        return [expanded.resolve()]
    if expanded.is_dir():
        matches = [file for file in expanded.rglob("*") if not _hidden(file.relative_to(expanded))]
    else:
        matches = [Path(match) for match in glob.glob(str(expanded), recursive=True)]
    files = [file.resolve() for file in matches if file.is_file()]
    if not files:
        what = "is a folder without files" if expanded.is_dir() else "matches no file"
        raise ValueError(f"LongTextDataModule(paths=...): {path!r} {what} (looked in {Path.cwd()}).")
    return files


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _standard_library() -> list[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    files: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in STANDARD_LIBRARY_LEAVES_OUT]
        files.extend(Path(folder, name) for name in names if name.endswith(".py"))
    if not files:
        raise ValueError(
            f"The standard library in {root} comes without its source. Give texts of your own:"
            " LongTextDataModule(paths=...)."
        )
    return sorted(files)


def read_bytes(files: list[Path], limit_tokens: int | None = None) -> list[Document]:
    """The bytes of each non-empty file as tokens 0 .. 255, uint8; of the first ``limit_tokens`` bytes only.

    A document is named by its path below the folder that all files share, wherever that folder lies.
    """
    documents: list[Document] = []
    shared = os.path.commonpath([file.parent for file in files]) if files else ""
    left = float("inf") if limit_tokens is None else limit_tokens
    for file in files:
        if left <= 0:
            break
        size = file.stat().st_size
        if size == 0:
            continue
        mapped = size >= MAP_FROM_BYTES
        tokens = np.memmap(file, np.uint8, "r") if mapped else np.frombuffer(file.read_bytes(), np.uint8)
        documents.append(Document(file.relative_to(shared).as_posix(), tokens[: int(min(left, tokens.size))]))
        left -= documents[-1].tokens.size
    return documents
