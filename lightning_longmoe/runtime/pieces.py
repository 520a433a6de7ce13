"""Where this rank's part of a tensor lies in the whole.

A DTensor knows its mesh and placements; what files need is a box: offset and size in the global tensor. `piece_of`
computes it, and everything that saves or loads works on pieces.

FSDP2 over what an expert mesh already shards along the same dimension makes a strided placement: the expert mesh cuts
first, FSDP2 cuts what it left. The boxes are computed here by cutting in that order, since torch's own rule for the
placement gives parts to other ranks where sizes do not divide (7 rows over 3 x 2 ranks).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Shard

from lightning_longmoe import _compat


@dataclass(frozen=True)
class Piece:
    """The part of one tensor that this rank holds.

    Attributes:
        shape: of the whole tensor.
        offset: where the part begins, per dimension.
        local: the part itself, any device; shares memory with the tensor it came from.
    """

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    local: Tensor

    @property
    def slices(self) -> tuple[slice, ...]:
        """Index of the part in the whole tensor."""
        return tuple(slice(o, o + n) for o, n in zip(self.offset, self.local.shape, strict=True))


def piece_of(tensor: Tensor) -> Piece | None:
    """The part of ``tensor`` that this rank holds; None where it holds nothing of it.

    Args:
        tensor: a plain tensor (whole on every rank that has it) or a DTensor, any placement but partial sums.

    Raises:
        ValueError: a placement that has no box.
    """
    local = _compat.local_tensor(tensor.detach())
    if not isinstance(tensor, DTensor):
        return Piece(tuple(tensor.shape), (0,) * tensor.ndim, local)
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return None
    offset, size = box(tuple(tensor.shape), tensor.placements, tuple(tensor.device_mesh.shape), tuple(coordinate))
    if size != tuple(local.shape):
        raise ValueError(
            f"A tensor of shape {tuple(tensor.shape)} placed as {tensor.placements} on {tensor.device_mesh} should have"
            f" a part of shape {size} here, but it is {tuple(local.shape)}: make it with distribute_tensor or"
            " fully_shard."
        )
    return Piece(tuple(tensor.shape), offset, local) if local.numel() else None


def box(
    shape: tuple[int, ...], placements: Sequence[Placement], mesh: tuple[int, ...], coordinate: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Offset and size of the part at ``coordinate`` of a mesh of size ``mesh``; strided placements cut last.

    Raises:
        ValueError: a placement that is neither a shard nor a replica.
    """
    size, offset = list(shape), [0] * len(shape)
    first, last = [], []
    for axis, placement in enumerate(placements):
        if _compat.is_strided_shard(placement):
            last.append(axis)
        elif isinstance(placement, Shard):
            first.append(axis)
        elif not placement.is_replicate():
            raise ValueError(f"A tensor placed as {tuple(placements)} cannot be saved: only shards and replicas can.")
    for axis in first + last:
        dim = placements[axis].dim  # type: ignore[attr-defined]
        chunk = -(-size[dim] // mesh[axis])
        start = min(chunk * coordinate[axis], size[dim])
        offset[dim] += start
        size[dim] = min(chunk, size[dim] - start)
    return tuple(offset), tuple(size)


def is_local_part(value: Tensor, parameter: Tensor) -> bool:
    """Whether a plain tensor is this rank's part of something shaped like ``parameter``, a DTensor."""
    if isinstance(value, DTensor) or not isinstance(parameter, DTensor) or value.ndim == 0:
        return False
    return value.shape == _compat.local_tensor(parameter).shape


def like_parameter(parameter: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialised tensor sharded like ``parameter``, its local part on ``device``."""
    return torch.empty_like(parameter.detach(), dtype=dtype, device=device)


def as_sharded(value: Tensor, parameter: Tensor) -> Tensor:
    """This rank's part ``value`` as a DTensor placed like ``parameter``."""
    assert isinstance(parameter, DTensor)
    if value.device.type == parameter.device_mesh.device_type:
        return DTensor.from_local(
            value,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
    sharded = like_parameter(parameter, value.dtype, value.device)  # from_local would move it to the mesh's device
    _compat.local_tensor(sharded).copy_(value)
    return sharded
