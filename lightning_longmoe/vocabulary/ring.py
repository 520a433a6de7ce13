"""The ring: ranks in a circle, hops between neighbours, and pieces that visit every rank.

Letters: P ranks - r this rank - q pieces of each rank. Rank r sends to r + 1 and receives from r - 1.

In a *round* one piece of every rank goes around. Step i of a round finds at rank r the piece of owner r - i - 1, so
that a rank's own piece comes *last*. A piece has a *given* part, which its owner sends out and nobody changes, and a
*carried* part, to which every rank adds. With P = 4, the way of rank 0's piece and of what it carries:

    step            0          1          2          3
    visits rank     1          2          3          0
    hop before it   given      given      given      -
                    -          carried    carried    carried (home)

Both parts make P - 1 hops: the given part need not come home, and the carried part need not leave it. A hop is one
``batch_isend_irecv`` with everything that moves at that time.

Where a part is carried, two rounds take turns: while a piece of one is worked on, a piece of the other is on its way.
Where nothing is carried, the next piece travels while this one is worked on in any case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_longmoe.runtime.ledger import Arena
from lightning_longmoe.runtime.ranges import ranged
from lightning_longmoe.vocabulary.spans import Pieces

TRAVELLING, CARRIED = "travelling pieces", "travelling accumulators"


@dataclass
class Traffic:
    """What this rank sent.

    Attributes:
        hops: batches of sends and receives.
        sent_bytes: payload of all sends.
    """

    hops: int = 0
    sent_bytes: int = 0


class Ring:
    """The ranks of a process group in a circle, in group order.

    Args:
        group: best one that nothing else uses, so that a hop never waits behind another collective. None: no messages
            are sent, for one process or a dry run.
        size: P; needed without a group only.
        rank: r, likewise.
        traffic: counts what is sent. None: a new one.
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, size: int = 1, rank: int = 0, traffic: Traffic | None = None
    ) -> None:
        self.group = group
        self.size = size if group is None else dist.get_world_size(group)
        self.rank = rank if group is None else dist.get_rank(group)
        self.traffic = Traffic() if traffic is None else traffic

    @ranged("longmoe/vocabulary/hop")
    def hop(self, send: Sequence[Tensor], receive: Sequence[Tensor]) -> list[dist.Work]:
        """Start sending to the next rank and receiving from the one before, in one batch.

        Args:
            send: contiguous tensors; the next rank lists buffers of the same sizes in the same order.
            receive: buffers. Empty tensors are left out on both sides.

        Returns:
            handles; buffers belong to the hop until all of them were waited for.
        """
        send, receive = [t for t in send if t.numel()], [t for t in receive if t.numel()]
        self.traffic.hops += 1
        self.traffic.sent_bytes += sum(t.nbytes for t in send)
        if self.group is None or not (send or receive):
            return []
        ahead, behind = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        operations = [dist.P2POp(dist.isend, t, group=self.group, group_peer=ahead, tag=i) for i, t in enumerate(send)]
        operations += [
            dist.P2POp(dist.irecv, t, group=self.group, group_peer=behind, tag=i) for i, t in enumerate(receive)
        ]
        return dist.batch_isend_irecv(operations)


def warm_up(group: dist.ProcessGroup, device: torch.device) -> None:
    """Use the connections of a ring once: made lazily in the middle of a step they find the memory full, or hang."""
    ring = Ring(group)
    sent, received = torch.zeros(1, device=device), torch.zeros(1, device=device)
    for work in ring.hop([sent], [received]) if ring.size > 1 else []:
        work.wait()


def _zero(carried: tuple[Tensor, ...]) -> None:
    for tensor in carried:
        tensor.zero_()


@dataclass(frozen=True)
class Cargo:
    """What travels, as tensors whose rows are cut into pieces.

    Attributes:
        pieces: how the rows of each rank are cut.
        given: this rank's rows of the given part, at most ``pieces.sizes[r]`` of them; missing rows travel as zeros.
        carried: where this rank's rows of the carried part come home to, ``pieces.sizes[r]`` of them, with their
            initial values in place.
        start: gives a foreign piece's carried tensors their initial values in place.
    """

    pieces: Pieces
    given: tuple[Tensor, ...]
    carried: tuple[Tensor, ...] = ()
    start: Callable[[tuple[Tensor, ...]], None] = _zero


@dataclass(frozen=True, eq=False)
class _Buffers:
    """Room for one piece of the given or of the carried part."""

    part: str
    tensors: tuple[Tensor, ...]


@dataclass(eq=False)
class Visit:
    """A piece at this rank.

    Attributes:
        owner: the rank that it belongs to.
        piece: its index in what that rank owns.
        given: rows of each given tensor, to read. At home they end where the owner's tensors do.
        carried: rows of each carried tensor, to add to.
    """

    owner: int
    piece: int
    given: tuple[Tensor, ...] = ()
    carried: tuple[Tensor, ...] = ()
    _borrowed: list[_Buffers] = field(default_factory=list)


@dataclass(eq=False)
class _Flight:
    """A visit whose parts are on their way here."""

    visit: Visit
    works: list[Any]
    leaving: list[_Buffers]
    """Where the parts lie that leave at the same time."""


def visiting_order(ranks: int, pieces: int, carries: bool) -> list[tuple[int, int]]:
    """(piece, step) in the order in which every rank works on them."""
    if not carries or ranks == 1:
        return [(piece, step) for piece in range(pieces) for step in range(ranks)]
    pairs = [range(first, min(first + 2, pieces)) for first in range(0, pieces, 2)]
    return [(piece, step) for pair in pairs for step in range(ranks) for piece in pair]


def circulate(ring: Ring, cargo: Cargo, arena: Arena) -> Iterator[Visit]:
    """Every piece of every rank, each once; what is carried is home when the last visit was left.

    All ranks run the same hops, whatever they own. The caller works on a visit before it asks for the next.
    """
    return _Circulation(ring, cargo, arena).run()


class _Circulation:
    """The hops of one cargo.

    Buffers are taken when first needed and then reused: two sets of the given part and none of the carried, or three of
    each, since a piece is worked on while another leaves and a third arrives.
    """

    def __init__(self, ring: Ring, cargo: Cargo, arena: Arena) -> None:
        self.ring, self.cargo, self.arena = ring, cargo, arena
        self.here: dict[int, Visit] = {}
        """The last visit of each round."""
        self.free: dict[str, list[_Buffers]] = {TRAVELLING: [], CARRIED: []}

    def run(self) -> Iterator[Visit]:
        carries = bool(self.cargo.carried)
        order = visiting_order(self.ring.size, self.cargo.pieces.count, carries)
        flight = self._launch(*order[0])
        for (piece, _), following in zip(order, [*order[1:], None], strict=True):
            visit = self._land(flight)
            needs_this = carries and following is not None and following[0] == piece
            if following is not None and not needs_this:
                flight = self._launch(*following)
            yield visit
            if following is not None and needs_this:
                flight = self._launch(*following)
        for buffers in [*self.free[TRAVELLING], *self.free[CARRIED]]:
            self.arena.release(*buffers.tensors)

    def _launch(self, piece: int, step: int) -> _Flight:
        """Send on what this rank has of the round, and let the visit of ``step`` come in."""
        last = self.ring.size - 1
        visit = Visit((self.ring.rank - step - 1) % self.ring.size, piece)
        send, leaving = self._outgoing(piece, step)
        receive: list[Tensor] = []
        if step < last:
            visit.given = self._room_for(visit, TRAVELLING, self.cargo.given)
            visit.carried = self._room_for(visit, CARRIED, self.cargo.carried)
            receive += visit.given
        else:
            visit.given = tuple(self._own(t, piece) for t in self.cargo.given)
            visit.carried = tuple(self._own(t, piece) for t in self.cargo.carried)
        if step > 0:
            receive += visit.carried
        elif last > 0:
            self.cargo.start(visit.carried)
        return _Flight(visit, self.ring.hop(send, receive) if send or receive else [], leaving)

    def _outgoing(self, piece: int, step: int) -> tuple[list[Tensor], list[_Buffers]]:
        """What the hop before ``step`` takes from here, and the buffers that are free after it."""
        last = self.ring.size - 1
        if step > 0:
            visit = self.here[piece]
            return [*(visit.given if step < last else ()), *visit.carried], visit._borrowed
        if last == 0:
            return [], []
        own = tuple(self._own(t, piece) for t in self.cargo.given)
        rows = self.cargo.pieces.span(self.ring.rank, piece).length
        if all(t.size(0) == rows for t in own):
            return list(own), []
        padded = Visit(self.ring.rank, piece)
        for buffer, tensor in zip(self._room_for(padded, TRAVELLING, self.cargo.given), own, strict=True):
            buffer[: tensor.size(0)].copy_(tensor)
            buffer[tensor.size(0) :].zero_()
            padded.given += (buffer,)
        return list(padded.given), padded._borrowed

    def _land(self, flight: _Flight) -> Visit:
        for work in flight.works:
            work.wait()
        for buffers in flight.leaving:
            self.free[buffers.part].append(buffers)
        self.here[flight.visit.piece] = flight.visit
        return flight.visit

    def _own(self, tensor: Tensor, piece: int) -> Tensor:
        span = self.cargo.pieces.span(self.ring.rank, piece)
        return tensor[span.start : span.stop]

    def _room_for(self, visit: Visit, part: str, like: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Rows for a visiting piece, with the columns and dtypes of ``like``."""
        if not like:
            return ()
        pieces, free = self.cargo.pieces, self.free[part]
        if not free:
            taken = tuple(self.arena.take(part, (pieces.longest, *t.shape[1:]), t.dtype) for t in like)
            free.append(_Buffers(part, taken))
        buffers = free.pop()
        visit._borrowed.append(buffers)
        rows = pieces.span(visit.owner, visit.piece).length
        return tuple(t[:rows] for t in buffers.tensors)
