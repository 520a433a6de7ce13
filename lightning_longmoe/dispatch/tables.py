"""One rank's part of a plan, as the numbers that its region needs: splits, group sizes and the moves of rows.

Letters: n chunks - Ep ranks - P pieces of the plan - S experts that this rank hosts - C rows that it sends and R rows
that it receives in a chunk. A *move* brings runs of rows into another order: row i of the result is row
``shift[run of i] + i`` of the source, and run lengths are known on the host. So an index of any length is made on the
device from a few numbers, without waiting for it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_longmoe.dispatch.plan import DispatchPlan, Ints


@dataclass(frozen=True, eq=False)
class RankTables:
    """What one rank sends, receives and computes.

    Attributes:
        rows: [n] rows C of this rank in each chunk.
        sent, received: [n][Ep] rows to and from each rank.
        pack: [2, n, P] shifts and lengths of the move from (expert, token, slot) order to the order of sending:
            (rank, expert, token, slot).
        unpack: [2, n, S * Ep] shifts and lengths of the move from the order of arrival, (source, expert), to that of
            the products: (hosted expert, source).
        groups: [n][S] rows of each hosted expert: the home experts first, then the guests.
        home_experts: how many of the S are at home.
        block_rows: rows of the largest send or receive.
    """

    rows: list[int]
    sent: list[list[int]]
    received: list[list[int]]
    pack: Ints
    unpack: Ints
    groups: list[list[int]]
    home_experts: int
    block_rows: int

    @property
    def chunks(self) -> int:
        return len(self.rows)

    @property
    def guests(self) -> int:
        return len(self.groups[0]) - self.home_experts


def rank_tables(plan: DispatchPlan, rank: int) -> RankTables:
    """The part of ``plan`` that concerns ``rank``."""
    sent, pack = _sending(plan, rank)
    by_source = plan.received(rank)
    rows, received = plan.counts[rank].sum(1), by_source.sum(2)
    return RankTables(
        rows=rows.tolist(),
        sent=sent.tolist(),
        received=received.tolist(),
        pack=pack,
        unpack=_unpacking(by_source, plan.hosted(rank)),
        groups=by_source.sum(1).tolist(),
        home_experts=plan.experts_per_rank,
        block_rows=int(max(rows.max(), received.sum(1).max())),
    )


def _sending(plan: DispatchPlan, rank: int) -> tuple[Ints, Ints]:
    rows = plan.sent_pieces(rank)
    starts = _before(rows)  # pieces are ordered by expert, as the rows are
    order = np.lexsort((plan.piece_expert, plan.piece_rank))
    return plan.sent_to(rank), _move(starts[:, order], rows[:, order])


def _unpacking(rows: Ints, hosted: list[int]) -> Ints:
    """``rows`` [n, Ep, S] from each source for each hosted expert."""
    by_expert = np.argsort(np.array(hosted))  # a source sends them in the order of their numbers
    starts = np.empty_like(rows)
    arriving = rows[:, :, by_expert].reshape(rows.shape[0], -1)
    starts[:, :, by_expert] = _before(arriving).reshape(rows.shape)
    target = (rows.shape[0], rows.shape[1] * rows.shape[2])
    return _move(starts.transpose(0, 2, 1).reshape(target), rows.transpose(0, 2, 1).reshape(target))


def _before(lengths: Ints) -> Ints:
    """[n, runs] rows before each run."""
    return np.cumsum(lengths, 1) - lengths


def _move(starts: Ints, lengths: Ints) -> Ints:
    return np.stack([starts - _before(lengths), lengths])


def group_ends(tables: RankTables) -> NDArray[np.int32]:
    """[n, S] where each group ends, counted from the first home expert's and, anew, from the first guest's row."""
    groups = np.array(tables.groups, dtype=np.int32).reshape(tables.chunks, -1)
    home = tables.home_experts
    return np.concatenate([groups[:, :home].cumsum(1), groups[:, home:].cumsum(1)], axis=1).astype(np.int32)
