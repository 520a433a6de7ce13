"""Small exchanges of host values between all ranks: counts, votes, lengths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


class HostGroup:
    """All ranks that train together, able to exchange whole numbers in host memory.

    Every method is a collective: all ranks call it, in the same order.

    Args:
        group: a process group that works on CPU tensors (gloo). None: this process alone.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self.size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)

    def sum(self, values: Sequence[int]) -> list[int]:
        """The element-wise sum over the ranks; ``values`` is equally long on all of them."""
        if self._group is None:
            return list(values)
        total = torch.tensor(list(values), dtype=torch.int64)
        dist.all_reduce(total, group=self._group)
        return total.tolist()

    def every(self, value: int) -> list[int]:
        """The value of each rank, in rank order."""
        slots = [0] * self.size
        slots[self.rank] = value
        return self.sum(slots)

    def first_of(self, value: T | None) -> T:
        """The value of the first rank that has one (it is pickled). At least one rank must have one."""
        source = self.every(int(value is not None)).index(1)
        if self._group is None:
            return value  # type: ignore[return-value]
        box = [value]
        dist.broadcast_object_list(box, src=dist.get_global_rank(self._group, source), group=self._group)
        return box[0]  # type: ignore[return-value]
