"""Sends and receives between context ranks, with a count of bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Wire:
    """Point-to-point exchange over a process group.

    Args:
        group: the context ranks; None: one rank, which sends nothing.

    Attributes:
        sent_bytes: that this rank has sent through this object.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)
        self.sent_bytes = 0

    def exchange(self, cargo: Sequence[Tensor], to: int, room: Sequence[Tensor], source: int) -> list[dist.Work]:
        """Start to send ``cargo`` to one rank of the group and to fill ``room`` from another; both may be empty.

        The two ranks must agree on shapes: a tensor without elements is not sent.
        """
        operations = [
            dist.P2POp(dist.isend, tensor.contiguous(), group=self.group, group_peer=to)
            for tensor in cargo
            if tensor.numel()
        ]
        operations += [
            dist.P2POp(dist.irecv, tensor, group=self.group, group_peer=source) for tensor in room if tensor.numel()
        ]
        self.sent_bytes += sum(tensor.nbytes for tensor in cargo)
        return dist.batch_isend_irecv(operations) if operations else []

    def wait(self, work: Sequence[Any]) -> None:
        for one in work:
            one.wait()

    def all_to_all(self, pieces: Sequence[Tensor], like: Sequence[tuple[int, ...]]) -> list[Tensor]:
        """Send ``pieces[r]`` to rank r and receive a tensor of shape ``like[r]`` from it; shapes may be empty."""
        if self.group is None:
            return [pieces[0].contiguous()]
        flat = torch.cat([piece.reshape(-1) for piece in pieces])
        sizes = [torch.Size(shape).numel() for shape in like]
        out = flat.new_empty(sum(sizes))
        counts = [piece.numel() for piece in pieces]
        dist.all_to_all_single(out, flat, sizes, counts, group=self.group)
        self.sent_bytes += (sum(counts) - counts[self.rank]) * flat.element_size()
        return [part.view(shape) for part, shape in zip(out.split(sizes), like, strict=True)]
