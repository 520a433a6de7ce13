"""Buffers that training changes on each rank by itself, such as the running statistics of BatchNorm.

Parameters are kept equal by their gradients; nothing keeps such buffers equal, and each rank sees other data. So before
an evaluation and before a checkpoint is written all ranks take the mean of each buffer that differs: what is evaluated
is what is saved. Buffers that are equal on all ranks, such as our routers' biases, keep their bits.

Values are compared, since kernels that update running statistics do not count as changes for torch.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]


@torch.no_grad()
def agree_on_buffers(module: nn.Module, control_group: dist.ProcessGroup | None) -> list[str]:
    """Give the buffers of ``module`` the same values on all ranks. A collective.

    Floating point buffers that differ become their mean, others their largest value. Buffers that no checkpoint holds
    and that have other shapes on other ranks (caches) are left alone.

    Args:
        module: sharded or not.
        control_group: all ranks, able to exchange objects; None: there is one rank.

    Returns:
        names of the buffers that differed.

    Raises:
        ValueError: a buffer that checkpoints hold has another shape on another rank; on all ranks.
    """
    if control_group is None or dist.get_world_size(control_group) == 1:
        return []
    present = {n: b for n, b in module.named_buffers() if not isinstance(b, DTensor) and not b.is_meta and b.numel()}
    shapes = {name: (tuple(buffer.shape), buffer.dtype) for name, buffer in present.items()}
    of_ranks: list[Shapes] = [{}] * dist.get_world_size(control_group)
    dist.all_gather_object(of_ranks, shapes, group=control_group)
    names = list(dict.fromkeys(name for of_rank in of_ranks for name in of_rank))
    alike = [name for name in names if len({of_rank.get(name) for of_rank in of_ranks}) == 1]
    _refuse(sorted(set(names) - set(alike)), module, of_ranks)
    return [name for name in alike if _agree(present[name])]


def _refuse(names: list[str], module: nn.Module, of_ranks: list[Shapes]) -> None:
    for name in names:
        owner, _, last = name.rpartition(".")
        if last not in module.get_submodule(owner)._non_persistent_buffers_set:
            found = [None if name not in of_rank else of_rank[name][0] for of_rank in of_ranks]
            raise ValueError(
                f"The buffer {name!r} has different shapes on the ranks, {found}: no checkpoint can hold it. Keep what"
                " grows with a rank's data in a plain attribute or a buffer with persistent=False."
            )


def _agree(buffer: Tensor) -> bool:
    """Whether the buffer differed between ranks; it does not any more."""
    if buffer.is_complex() or buffer.dtype == torch.bool:
        return False
    wide = buffer.to(torch.float64 if buffer.is_floating_point() else torch.int64)
    extremes = torch.stack([wide, -wide])
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
    largest = extremes[0]
    differs = bool((largest != -extremes[1]).any())  # the same on all ranks, and without NaN
    if not differs:
        return False
    if buffer.is_floating_point():
        dist.all_reduce(wide)
        buffer.copy_(torch.where(largest == -extremes[1], largest, wide / dist.get_world_size()))
    else:
        buffer.copy_(largest)
    return True
