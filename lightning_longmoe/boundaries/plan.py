"""What an offload of boundaries needs, from numbers alone: before any launch, without a device.

Source: arXiv 2609.14306, Eq. 4 and Table 3; ours keeps ``keep_last`` boundaries on the device and rounds nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_longmoe.config import BoundaryOffload

IN_FLIGHT = 2
"""Boundaries beside those that stay which the device holds: one on its way to the host and one just made, or one
restored and one on its way back."""


@dataclass(frozen=True)
class BoundaryPlan:
    """Counts and bytes of one forward and backward of one rank.

    Attributes:
        boundaries: of all checkpointed parts.
        offloaded: those that go to the host, the earliest first.
        boundary_bytes: of one.
        host_bytes: of all that are offloaded.
        device_bytes: the most that the device holds at one time.
    """

    boundaries: int
    offloaded: int
    boundary_bytes: int
    host_bytes: int
    device_bytes: int


def plan_boundaries(boundaries: int, boundary_bytes: int, config: BoundaryOffload) -> BoundaryPlan:
    """Which boundaries go to the host.

    Args:
        boundaries: layers times boundaries a layer, of all micro-batches that are alive at once.
        boundary_bytes: tokens of the rank x H x bytes of an element.
        config: budget and ``keep_last``.
    """
    budget = config.host_budget_bytes
    fitting = boundaries if budget is None else budget // boundary_bytes
    offloaded = max(0, min(boundaries - config.keep_last, fitting))
    on_device = min(boundaries, max(boundaries - offloaded, config.keep_last + IN_FLIGHT if offloaded else 0))
    return BoundaryPlan(
        boundaries, offloaded, boundary_bytes, offloaded * boundary_bytes, on_device * boundary_bytes
    )
