"""How much memory a node has, and how a share of it is written."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_longmoe.runtime.host_memory import _cgroup_limits, local_ranks, node_bytes, parse_bytes, parse_share


@pytest.mark.parametrize(
    ("text", "expected"),
    [("16GiB", 16 * 2**30), ("16 gib", 16 * 2**30), ("500MB", 500 * 10**6), (7, 7), ("1e9", 10**9), ("0.5KiB", 512)],
)
def test_bytes_are_numbers_or_texts_with_a_unit(text: object, expected: int) -> None:
    assert parse_bytes(text, "x") == expected  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["", "GiB", "16Gi", "-3", 0, "1..2GB", True, None, "0.1"])
def test_anything_else_is_refused_by_name(text: object) -> None:
    with pytest.raises(ValueError, match=r"BoundaryOffload.host_budget=.* is not allowed: give bytes above 0"):
        parse_bytes(text, "BoundaryOffload.host_budget")  # type: ignore[arg-type]


@pytest.mark.parametrize(("text", "expected"), [("0.8", 800), (0.25, 250), (1, 1000), ("900", 900), ("1KB", 1000)])
def test_a_share_is_a_fraction_or_bytes(text: object, expected: int) -> None:
    assert parse_share(text, 1000) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["0", 0.0, "2KB", "much", -0.5, "1.5"])
def test_a_share_that_cannot_be_is_refused(text: object) -> None:
    with pytest.raises(ValueError, match="host_memory="):
        parse_share(text, 1000)  # type: ignore[arg-type]


def test_the_tightest_control_group_counts(tmp_path: Path) -> None:
    root, membership = tmp_path / "cgroup", tmp_path / "membership"
    inner = root / "a" / "b"
    inner.mkdir(parents=True)
    (root / "a" / "memory.max").write_text("5000\n")
    (inner / "memory.max").write_text("max\n")
    (root / "memory" / "job").mkdir(parents=True)
    (root / "memory" / "job" / "memory.limit_in_bytes").write_text("4000\n")
    (root / "memory" / "memory.limit_in_bytes").write_text(str(2**63 - 4096))
    membership.write_text("0::/a/b\n4:memory:/job\n3:cpu:/job\n")
    assert sorted(_cgroup_limits(root, membership)) == [4000, 5000]
    assert _cgroup_limits(root, tmp_path / "missing") == []


def test_this_node_has_memory() -> None:
    assert node_bytes() > 2**28


def test_ranks_of_a_node_are_what_the_launcher_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert local_ranks() == 8
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    monkeypatch.delenv("SLURM_NTASKS_PER_NODE", raising=False)
    assert local_ranks() == 1
