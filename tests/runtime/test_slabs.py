"""Host slabs: exact sizes, reuse, growth between steps only."""

from __future__ import annotations

import pytest
import torch

from lightning_longmoe.runtime.slabs import HostSlab
from lightning_longmoe.runtime.streams import HostStreams


class _Rounding(HostStreams):
    """Notes what is page-locked; an allocator that rounds up would be asked for each tensor."""

    def __init__(self) -> None:
        self.pinned: list[int] = []

    def pin(self, memory: torch.Tensor) -> bool:
        self.pinned.append(memory.nbytes)
        return True


def test_one_page_locked_allocation_of_what_was_needed() -> None:
    streams = _Rounding()
    slab = HostSlab(streams)
    sizes = [9_000_003, 9_000_003, 100, 7]
    for _ in range(5):
        slots = [slab.take(size) for size in sizes]
        assert slab.used_bytes == sum(sizes)
        assert slab.host_bytes <= 1.03 * sum(sizes)
        for slot in reversed(slots):
            slot.release()
        slab.fit()
    assert len(streams.pinned) == slab.allocations == 1
    assert sum(sizes) <= streams.pinned[0] <= 1.001 * sum(sizes)


def test_slots_that_are_lent_never_overlap_whatever_the_order() -> None:
    generator = torch.Generator().manual_seed(0)
    slab = HostSlab(HostStreams())
    for _ in range(30):
        lent: dict[int, object] = {}
        for number in range(40):
            size = int(torch.randint(1, 500, (), generator=generator))
            slot = slab.take(size)
            slot.memory.fill_(number)
            lent[number] = slot
            if float(torch.rand((), generator=generator)) < 0.4:
                gone = list(lent)[int(torch.randint(len(lent), (), generator=generator))]
                lent.pop(gone).release()  # type: ignore[attr-defined]
            assert all((slot.memory == number).all() for number, slot in lent.items())  # type: ignore[attr-defined]
        for slot in lent.values():
            slot.release()  # type: ignore[attr-defined]
            slot.release()  # type: ignore[attr-defined]
        assert slab.used_bytes == 0
        slab.fit()
    assert slab.allocations <= 15


def test_fitting_while_slots_are_lent_is_a_fault_of_the_caller() -> None:
    slab = HostSlab(HostStreams())
    slab.take(10)
    with pytest.raises(AssertionError):
        slab.fit()
