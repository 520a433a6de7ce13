"""Whole tensors for one file: parts travel to rank 0's host memory, one tensor after the other."""

from __future__ import annotations

import dataclasses
import math

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_longmoe.runtime.pieces import Piece, piece_of
from lightning_longmoe.saving.agreement import (
    CheckpointError,
    ControlGroup,
    gather_per_rank,
    on_all_ranks,
    size_and_rank,
)
from lightning_longmoe.saving.contents import KeyPath


def own_pieces(tensors: dict[KeyPath, Tensor], group: ControlGroup) -> dict[KeyPath, Piece]:
    """The pieces that this rank can save; rank 0 saves what is whole on every rank. Collective."""
    rank = size_and_rank(group)[1]

    def find() -> dict[KeyPath, Piece]:
        mine = {key: piece_of(value) for key, value in tensors.items() if rank == 0 or isinstance(value, DTensor)}
        return {key: piece for key, piece in mine.items() if piece is not None}

    return on_all_ranks("Locating shards", find, group)


def as_bytes(tensor: Tensor) -> Tensor:
    """The content as flat uint8, whatever the data type; shares memory with a contiguous tensor."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@dataclasses.dataclass(frozen=True)
class _Part:
    """Shape, place and data type of a piece, as ranks tell each other."""

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    size: tuple[int, ...]
    dtype: torch.dtype


def gather(tensors: dict[KeyPath, Tensor], group: ControlGroup) -> dict[KeyPath, Tensor]:
    """Whole tensors in rank 0's host memory, one after the other; nothing on the other ranks. Collective."""
    rank = size_and_rank(group)[1]
    pieces = own_pieces(tensors, group)
    parts = {
        key: _Part(piece.shape, piece.offset, tuple(piece.local.shape), piece.local.dtype)
        for key, piece in pieces.items()
    }
    everyone = gather_per_rank(parts, group)
    owners = {key: _owners(key, everyone) for key in tensors}
    _check_whole(tensors, owners, everyone)
    full: dict[KeyPath, Tensor] = {}
    try:
        for key, tensor in tensors.items():
            if rank == 0:
                full[key] = torch.empty(tensor.shape, dtype=tensor.dtype)
                for owner in owners[key].values():
                    _receive(full[key], everyone[owner][key], owner, pieces.get(key), group)
            elif key in parts and owners[key][parts[key].offset] == rank:
                dist.send(as_bytes(pieces[key].local.cpu()), group_dst=0, group=group)
    except RuntimeError as error:
        raise CheckpointError(f"Lost contact with a rank while gathering tensors. ({error})") from error
    return full


def _owners(key: KeyPath, everyone: list[dict[KeyPath, _Part]]) -> dict[tuple[int, ...], int]:
    """For each part, by its offset, the rank that sends it: the lowest of those that hold a replica."""
    owners: dict[tuple[int, ...], int] = {}
    for rank, parts in enumerate(everyone):
        if key in parts:
            owners.setdefault(parts[key].offset, rank)
    return owners


def _check_whole(
    tensors: dict[KeyPath, Tensor],
    owners: dict[KeyPath, dict[tuple[int, ...], int]],
    everyone: list[dict[KeyPath, _Part]],
) -> None:
    for key, tensor in tensors.items():
        found = sum(math.prod(everyone[rank][key].size) for rank in owners[key].values())
        if found != tensor.numel():
            raise CheckpointError(
                f"The ranks hold {found} of the {tensor.numel()} elements of {'.'.join(key)}, which is placed as"
                f" {getattr(tensor, 'placements', 'a plain tensor')}: it is not what that placement says."
            )


def _receive(full: Tensor, part: _Part, owner: int, mine: Piece | None, group: ControlGroup) -> None:
    if owner == 0:
        assert mine is not None
        full[mine.slices].copy_(mine.local)
        return
    buffer = torch.empty(part.size, dtype=part.dtype)
    dist.recv(as_bytes(buffer), group_src=owner, group=group)
    full[Piece(part.shape, part.offset, buffer).slices].copy_(buffer)
