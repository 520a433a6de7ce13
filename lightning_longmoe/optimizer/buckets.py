"""Where each parameter's state lies in a flat slab, and how the slab is cut into buckets. Pure.

A bucket is a contiguous range of the slab, so that it travels in one copy for each kind of state. A parameter that does
not fit is cut, only at multiples of 16 elements from its own start: the vectorised kernels round what is left over at
the end of a call differently, and other cuts would change bits.

Glossary: *slab* - flat storage of one kind of state for many parameters; *piece* - a range of one parameter; *bucket* -
pieces that are updated together; *slot* - device memory that one bucket after another passes through.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ALIGNMENT = 16
"""Elements: of the start of each parameter in the slab, and of each cut."""


@dataclass(frozen=True)
class Piece:
    """Elements ``start`` to ``stop`` of parameter ``index``, at ``offset`` of the slab."""

    index: int
    start: int
    stop: int
    offset: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Bucket:
    """Elements ``start`` to ``stop`` of the slab."""

    start: int
    stop: int
    pieces: tuple[Piece, ...]

    @property
    def numel(self) -> int:
        return self.stop - self.start


def aligned(numel: int) -> int:
    """``numel`` rounded up to where the next parameter may start."""
    return -(-numel // ALIGNMENT) * ALIGNMENT


def cut(numels: Sequence[int], bucket_numel: int) -> list[Bucket]:
    """The buckets of parameters that lie one after another in a slab, each filled as far as it goes.

    Args:
        numels: elements of each parameter; those without any are in no bucket.
        bucket_numel: elements of a bucket, above 0; fewer than 16 count as 16.

    Returns:
        buckets in the slab's order; each holds at most ``bucket_numel`` elements, gaps of alignment counted in.
    """
    capacity = max(ALIGNMENT, bucket_numel // ALIGNMENT * ALIGNMENT)
    buckets: list[Bucket] = []
    pieces: list[Piece] = []
    start = offset = 0

    def close() -> None:
        nonlocal start, pieces
        if pieces:
            buckets.append(Bucket(start, offset, tuple(pieces)))
        start, pieces = offset, []

    for index, numel in enumerate(numels):
        if offset + aligned(numel) - start > capacity and aligned(numel) <= capacity:
            close()  # it fits whole into the next
        done = 0
        while done < numel:
            room = capacity - (offset - start)
            if room == 0:
                close()
                continue
            size = min(numel - done, room)
            pieces.append(Piece(index, done, done + size, offset))
            done += size
            offset += aligned(size)
    close()
    return buckets
