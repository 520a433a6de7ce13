"""Host memory for offloaded tensors: one slab of exact size, page-locked once and used again in every step.

A slab cannot know its size before a step has shown it. So the first step takes memory of its own for each tensor,
pageable; between two steps `HostSlab.fit` makes a slab for what that step held at most, and the next step finds room in
it. A later step that needs more takes the rest from pageable memory again, and the slab grows once, between steps.

Glossary: *slab* - one allocation; *slot* - the part of it that one tensor uses, lent until ``release``; *overflow* - a
slot outside the slab.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from lightning_longmoe.runtime.streams import Streams

ALIGNMENT_BYTES = 64


class Slot:
    """Host memory of one tensor.

    Attributes:
        memory: [nbytes] uint8.
    """

    def __init__(self, slab: HostSlab, memory: Tensor, span: tuple[int, int] | None) -> None:
        self._slab: HostSlab | None = slab
        self.memory = memory
        self._span = span

    def release(self) -> None:
        """Give the memory back. Whoever writes it next must do so after what still reads it. Repeating is harmless."""
        slab, self._slab = self._slab, None
        if slab is not None:
            slab._take_back(self._span, self.memory.nbytes)


class HostSlab:
    """Slots in one page-locked allocation, and beside it where that is too small.

    Attributes:
        used_bytes: of all slots that are lent.
        allocations: how often memory was page-locked (or would be, without a device).
    """

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._memory: Tensor | None = None
        self._free: list[tuple[int, int]] = []  # (start, end), in order, none adjacent to the next
        self._overflow_bytes = 0
        self._needed = self._held = 0  # aligned bytes of all slots: the most, and now
        self._pinned = False
        self._overflowed = False
        self.used_bytes = 0
        self.allocations = 0

    @property
    def host_bytes(self) -> int:
        """Memory that is held, lent or not."""
        return (0 if self._memory is None else self._memory.nbytes) + self._overflow_bytes

    @property
    def needed_bytes(self) -> int:
        """The most that was lent at one time."""
        return self._needed

    def take(self, nbytes: int) -> Slot:
        """Memory for ``nbytes``; the first gap that is large enough."""
        size = _aligned(nbytes)
        self.used_bytes += nbytes
        self._held += size
        self._needed = max(self._needed, self._held)
        for index, (start, end) in enumerate(self._free):
            if end - start >= size:
                self._free[index : index + 1] = [(start + size, end)] if end - start > size else []
                assert self._memory is not None
                return Slot(self, self._memory[start : start + nbytes], (start, start + size))
        self._overflow_bytes += nbytes
        self._overflowed = True
        return Slot(self, torch.empty(nbytes, dtype=torch.uint8), None)

    def _take_back(self, span: tuple[int, int] | None, nbytes: int) -> None:
        self.used_bytes -= nbytes
        self._held -= _aligned(nbytes)
        if span is None:
            self._overflow_bytes -= nbytes
            return
        merged: list[tuple[int, int]] = []
        for start, end in sorted([*self._free, span]):
            if merged and merged[-1][1] == start:
                merged[-1] = (merged[-1][0], end)
            else:
                merged.append((start, end))
        self._free = merged

    def fit(self) -> bool:
        """Make the slab as large as was needed; call it between steps, when no slot is lent.

        Returns:
            whether memory was allocated: the host then waited for the device.
        """
        assert self._held == 0, "slots are lent"
        capacity = 0 if self._memory is None else self._memory.nbytes
        overflowed, self._overflowed = self._overflowed, False
        if not overflowed or self._needed <= capacity:
            return False
        self.close()
        memory = torch.empty(self._needed, dtype=torch.uint8)
        self._pinned = self._streams.pin(memory)
        self.allocations += 1
        self._memory, self._free = memory, [(0, memory.nbytes)]
        if not self._pinned and torch.cuda.is_available():
            warnings.warn(
                f"{memory.nbytes / 2**30:.2f} GiB of host memory could not be page-locked; copies to it do not overlap"
                " with computation. Raise the limit of locked memory (`ulimit -l`), or lower the host budget."
            )
        return True

    def close(self) -> None:
        """Free the slab; no slot may be lent. The next ``fit`` makes one again."""
        if self._memory is None:
            return
        self._streams.synchronize()
        if self._pinned:
            self._streams.unpin(self._memory)
        self._memory, self._free, self._pinned = None, [], False
        self._overflowed = self._needed > 0


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
