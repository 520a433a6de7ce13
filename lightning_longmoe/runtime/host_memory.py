"""How much memory a node has, and the share of it that one rank may fill with offloaded tensors."""

from __future__ import annotations

import os
import re
from pathlib import Path

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_NO_LIMIT = 2**60
"""What old cgroups write where they have no limit is about 2^63."""


def parse_bytes(value: int | float | str, name: str) -> int:
    """Bytes from a number or a text such as "16GiB", "500 MB", "1e9".

    Raises:
        ValueError: neither, or not above 0; the text names ``name``.
    """
    match = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([a-zA-Z]*)\s*", str(value))
    if match is not None and not isinstance(value, bool) and match[2].upper() in _UNITS:
        try:
            nbytes = int(float(match[1]) * _UNITS[match[2].upper()])
        except ValueError:
            nbytes = 0
        if nbytes > 0:
            return nbytes
    raise ValueError(f"{name}={value!r} is not allowed: give bytes above 0, as a number or like '16GiB' or '500MB'.")


def parse_share(value: int | float | str, node: int) -> int:
    """Bytes of a node's memory from a fraction ("0.8") or bytes ("900GiB").

    Args:
        value: at most 1 without a unit: a fraction; else bytes.
        node: bytes of the node.

    Raises:
        ValueError: neither, or more than the node has.
    """
    text = str(value).strip()
    if re.fullmatch(r"-?[0-9]*\.[0-9]*|0|1", text) and not isinstance(value, bool):
        fraction = float(text) if text != "." else 0.0
        if not 0 < fraction <= 1:
            raise ValueError(f"host_memory={value!r} is not allowed: a fraction is above 0 and at most 1.")
        return int(fraction * node)
    nbytes = parse_bytes(value, "host_memory")
    if nbytes > node:
        raise ValueError(
            f"host_memory={value!r} is {nbytes / 2**30:.1f} GiB, and this node has {node / 2**30:.1f} GiB. Give at most"
            " that, or a fraction such as '0.8'."
        )
    return nbytes


def node_bytes() -> int:
    """Memory of this node, or of the control group that this process may use, where that is less."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([physical, *_cgroup_limits(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"))])


def _cgroup_limits(root: Path, membership: Path) -> list[int]:
    """The limits of this process's control groups and of all above them, in both versions of the interface."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        lines = []
    files = [root / "memory.max", root / "memory" / "memory.limit_in_bytes"]
    for line in lines:
        _, controllers, path = line.split(":", 2)
        base, name = root, "memory.max"
        if controllers == "memory":
            base, name = root / "memory", "memory.limit_in_bytes"
        elif controllers:
            continue
        folder = base / path.lstrip("/")
        while folder != base and base in folder.parents:
            files.append(folder / name)
            folder = folder.parent
    limits = [_read_limit(file) for file in files]
    return [limit for limit in limits if limit is not None]


def _read_limit(file: Path) -> int | None:
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() and 0 < int(text) < _NO_LIMIT else None


def local_ranks() -> int:
    """Ranks on this node, as the launcher tells; 1 without one."""
    for name in ("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE"):
        value = os.environ.get(name, "")
        if value.isdigit() and int(value) > 0:
            return int(value)
    return 1
