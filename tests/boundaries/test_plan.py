"""Bytes from numbers alone: the paper's Table 3, and agreement with what the offloader then does."""

from __future__ import annotations

import pytest

from lightning_longmoe import BoundaryOffload, BoundaryOffloader
from lightning_longmoe.bench.boundaries import PAPER_BOUNDARIES, PAPER_BOUNDARY_BYTES
from lightning_longmoe.boundaries import plan_boundaries
from tests.boundaries.parts import train


@pytest.mark.parametrize(
    ("budget", "offloaded", "host_gib"), [("8GiB", 21, 7.84), ("16GiB", 42, 15.69), (None, 47, 17.56)]
)
def test_table_3_of_the_paper_follows_from_its_model(budget: str | None, offloaded: int, host_gib: float) -> None:
    plan = plan_boundaries(PAPER_BOUNDARIES, PAPER_BOUNDARY_BYTES, BoundaryOffload(host_budget=budget, keep_last=0))
    assert plan.offloaded == offloaded
    assert plan.boundary_bytes / 2**30 == pytest.approx(0.3735, abs=1e-4)
    assert plan.host_bytes / 2**30 == pytest.approx(host_gib, abs=0.01)


def test_more_budget_never_means_fewer_boundaries_or_more_device_memory() -> None:
    plans = [plan_boundaries(40, 100, BoundaryOffload(host_budget=budget)) for budget in range(1, 4500, 50)]
    assert all(a.offloaded <= b.offloaded for a, b in zip(plans, plans[1:], strict=False))
    assert all(a.device_bytes >= b.device_bytes for a, b in zip(plans, plans[1:], strict=False) if a.offloaded > 1)


@pytest.mark.parametrize("budget", [None, 128, 500, 1000])
@pytest.mark.parametrize("keep_last", [0, 1, 2, 3, 20])
@pytest.mark.parametrize("depth", [1, 3, 12])
def test_the_plan_is_what_then_happens(depth: int, keep_last: int, budget: int | None) -> None:
    config = BoundaryOffload(keep_last=keep_last, host_budget=budget)
    offloader = BoundaryOffloader(config)
    train(offloader.checkpoint, depth=depth)
    plan, stats = plan_boundaries(depth, 128, config), offloader.stats()
    assert stats["offloaded"] == plan.offloaded
    assert stats["host_bytes"] == plan.host_bytes
    assert stats["peak_device_bytes"] == plan.device_bytes
