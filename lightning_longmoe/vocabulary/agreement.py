"""What the ranks of a ring tell each other before a call: one small all-gather, and one wait for the device.

Everything that decides which messages are sent must be the same on all ranks: token counts, what travels, which
gradients are wanted. And a rank that refuses its arguments must not leave the others waiting for it.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_longmoe.vocabulary.ring import Ring

all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # its name from torch 2.13 on


@dataclass(frozen=True)
class Agreement:
    """What all ranks know after an exchange.

    Attributes:
        tokens: [P] tokens of each rank.
        numbers: [P] what each rank had to say besides.
        wanted: for each flag, whether it is set on any rank.
    """

    tokens: tuple[int, ...]
    numbers: tuple[tuple[int, ...], ...]
    wanted: tuple[bool, ...]


def agree(
    ring: Ring,
    *,
    what: str,
    tokens: int,
    strangers: Tensor,
    numbers: Tensor,
    wanted: Sequence[bool],
    settings: tuple[object, ...],
    refusal: ValueError | None,
) -> Agreement:
    """Exchange the numbers of this call with all ranks of the ring.

    Args:
        ring: its group; none is needed for one process.
        what: the operator's name and what its ids are, such as "ring_cross_entropy: targets", for messages.
        tokens: N of this rank.
        strangers: int64 scalar on the device, ids of this rank that are outside the vocabulary and not ignored.
        numbers: [k] int64 on the device, anything else; k is the same on all ranks.
        wanted: flags, the same ones in the same order on all ranks.
        settings: must be equal on all ranks.
        refusal: what this rank finds wrong with its arguments.

    Raises:
        ValueError: on all ranks alike, where any rank refuses its arguments, has ids outside the vocabulary, or was
            called with other settings.
    """
    host = [tokens, int(refusal is not None), zlib.crc32(repr(settings).encode()), *map(int, wanted)]
    row = torch.cat([torch.tensor(host, device=numbers.device), strangers.reshape(1), numbers])
    rows = row.unsqueeze(0)
    if ring.group is not None and ring.size > 1:
        rows = torch.empty((ring.size, row.numel()), dtype=row.dtype, device=row.device)
        all_gather(rows.view(-1), row, group=ring.group)
    table = [tuple(line) for line in rows.tolist()]  # the one wait for the device
    if refusal is not None:
        raise refusal
    flags = slice(3, 3 + len(wanted))
    _raise_disagreement(what, ring, table, settings, stranger_column=flags.stop)
    return Agreement(
        tokens=tuple(line[0] for line in table),
        numbers=tuple(line[flags.stop + 1 :] for line in table),
        wanted=tuple(any(flag) for flag in zip(*(line[flags] for line in table), strict=True)),
    )


def _raise_disagreement(
    what: str, ring: Ring, table: list[tuple[int, ...]], settings: tuple[object, ...], stranger_column: int
) -> None:
    operator, _, ids = what.partition(": ")
    refused = [rank for rank, line in enumerate(table) if line[1]]
    if refused:
        raise ValueError(
            f"{operator}: ranks {refused} of the group refused their arguments; their own messages say why."
        )
    others = [rank for rank, line in enumerate(table) if line[2] != table[ring.rank][2]]
    if others:
        raise ValueError(
            f"{operator}: ranks {others} of the group were called with other settings than this one, rank {ring.rank},"
            f" which has {settings}. Call it with the same sizes, dtype and options on all ranks."
        )
    strange = {rank: line[stranger_column] for rank, line in enumerate(table) if line[stranger_column]}
    if strange:
        raise ValueError(
            f"{operator}: {sum(strange.values())} {ids} are outside the vocabulary (number by rank of the group:"
            f" {strange}). Allowed are 0 to vocab_size - 1, and ignore_index where there is one."
        )


def ring_of(group: dist.ProcessGroup | None, operator: str) -> Ring:
    """The ring over ``group``.

    Raises:
        ValueError: no group where there are several processes, or a group that this rank is not in.
    """
    if group is None:
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            raise ValueError(
                f"{operator}(group=None) means one process that holds the whole vocabulary, but"
                f" {dist.get_world_size()} processes are running. Give the process group whose ranks hold the shards"
                " (torch.distributed.group.WORLD for all of them)."
            )
        return Ring()
    if dist.get_rank(group) < 0:
        raise ValueError(f"{operator}(group=...) got a process group that this rank is not in.")
    return Ring(group)
