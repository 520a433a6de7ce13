"""Where the rows of every expert go: the plan of one layer and forward, from the counts of all ranks.

Letters: Ep ranks - E experts - P pieces - S experts that one rank hosts. *Piece*: the rows of one expert that one rank
computes; an expert has one piece on each of its *hosts*. *Cell*: one source's rows of one expert in one chunk.

Least-loaded assignment (arXiv 2601.17111, Alg. 2 and 3, with the three changes of `_assign`), then every cell is split
over the expert's hosts in proportion to its pieces, so that no source sends to one host alone. Rounding is cumulative
over the cells in (chunk, source) order: every piece gets exactly its rows, every chunk and every source its share but
for a row or two.

A plan is a pure function of counts and config: every rank computes the same one, and nothing about it is exchanged.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_longmoe.config import PipelinedLLEP

Ints = NDArray[np.int64]


def count_chunks(most_tokens: int, config: PipelinedLLEP) -> int:
    """n = min(ceil(N_max / tokens_per_chunk), max_chunks), at least 1 (arXiv 2609.14306, Eq. 1).

    Args:
        most_tokens: N_max, the largest token count of a rank of the group.
    """
    chunks = max(1, -(-most_tokens // config.tokens_per_chunk))
    return chunks if config.max_chunks is None else min(chunks, config.max_chunks)


def plan_dispatch(counts: Any, *, config: PipelinedLLEP) -> DispatchPlan:
    """Assign the rows of all experts to ranks.

    Args:
        counts: [Ep, chunks, E] integers (array or CPU tensor): rows of each expert in each chunk of each rank.
        config: capacity, smallest piece and imbalance threshold are read.

    Raises:
        ValueError: the counts are not of that form.
    """
    table = _as_counts(counts)
    ranks, _, experts = table.shape
    totals = table.sum((0, 1))
    native = totals.reshape(ranks, -1).sum(1)
    pieces = [[(expert * ranks // experts, int(total))] for expert, total in enumerate(totals.tolist())]
    if _imbalance(native) >= config.imbalance_threshold:
        even = -(-int(totals.sum()) // ranks)
        capacity = max(even, math.floor(config.capacity_factor * even))
        for expert, hosts in _assign(totals, native, capacity, config.min_tokens_per_gemm).items():
            pieces[expert] = hosts
    flat = [(expert, rank, rows) for expert, hosts in enumerate(pieces) for rank, rows in hosts]
    piece_expert, piece_rank, piece_rows = np.array(flat, dtype=np.int64).reshape(-1, 3).T
    return DispatchPlan(table, piece_expert, piece_rank, piece_rows)


def _as_counts(counts: Any) -> Ints:
    array = np.asarray(counts)
    if array.ndim != 3 or array.dtype.kind not in "iu" or 0 in array.shape:
        raise ValueError(
            f"counts of shape {array.shape} and type {array.dtype} are not allowed: give integers [ranks, chunks,"
            " experts], none of them 0."
        )
    if array.shape[2] % array.shape[0]:
        raise ValueError(f"{array.shape[2]} experts cannot be shared evenly by {array.shape[0]} ranks.")
    if array.min() < 0:
        raise ValueError("counts must not be negative.")
    return array.astype(np.int64)


def _imbalance(loads: Ints) -> float:
    """Largest over mean; 1 where there is nothing."""
    total = int(loads.sum())
    return 1.0 if total == 0 else int(loads.max()) * loads.size / total


def _assign(totals: Ints, native: Ints, capacity: int, smallest: int) -> dict[int, list[tuple[int, int]]]:
    """Pieces [(rank, rows), ...], home first, of every expert whose home is overloaded.

    As in LLEP a rank's load counts the native rows that it has yet to take, experts go in descending load, the home
    keeps what fits and the rest goes to the least loaded rank. Unlike there, a rank gets one piece of an expert at
    most, ties go to the lower index, and what fits nowhere is shared out in pieces of ``smallest`` where LLEP puts all
    of it on one rank: no load exceeds ``capacity + smallest - 1``.
    """
    loads: list[int] = native.tolist()
    per_rank = totals.size // native.size
    overloaded = np.flatnonzero((native > capacity).repeat(per_rank) & (totals > 0))
    order = overloaded[np.argsort(-totals[overloaded], kind="stable")]
    assigned = {}
    for expert, total in zip(order.tolist(), totals[order].tolist(), strict=True):
        home = expert // per_rank
        loads[home] -= total
        keep = min(total, max(0, capacity - loads[home]))
        loads[home] += keep
        hosts = {home: keep}
        _spill(total - keep, home, hosts, loads, capacity, smallest)
        assigned[expert] = [(rank, rows) for rank, rows in hosts.items() if rows]
    return assigned


def _spill(rest: int, home: int, hosts: dict[int, int], loads: list[int], capacity: int, smallest: int) -> None:
    """Add ``rest`` rows of one expert to ``hosts`` and ``loads``."""
    while rest:
        rank = min((load, rank) for rank, load in enumerate(loads) if rank != home)[1]
        free = capacity - loads[rank]
        if free >= rest:
            rows = rest
        elif free >= smallest:
            rows = free
        else:
            rank = min((load, rank) for rank, load in enumerate(loads))[1]
            rows = min(rest, smallest)
        hosts[rank] = hosts.get(rank, 0) + rows
        loads[rank] += rows
        rest -= rows


@dataclass(frozen=True, eq=False)
class DispatchPlan:
    """Who sends how many rows of which expert to whom, in each chunk.

    Attributes:
        counts: [Ep, chunks, E] int64, what was planned.
        piece_expert, piece_rank, piece_rows: [P] int64, the pieces, ordered by expert and then home first; every expert
            has at least one.
    """

    counts: Ints
    piece_expert: Ints
    piece_rank: Ints
    piece_rows: Ints

    @property
    def ranks(self) -> int:
        return self.counts.shape[0]

    @property
    def chunks(self) -> int:
        return self.counts.shape[1]

    @property
    def experts(self) -> int:
        return self.counts.shape[2]

    @property
    def experts_per_rank(self) -> int:
        return self.experts // self.ranks

    @cached_property
    def guests(self) -> list[tuple[int, int]]:
        """(expert, rank) of every piece away from home, sorted."""
        away = self.piece_rank != self.piece_expert // self.experts_per_rank
        return sorted(zip(self.piece_expert[away].tolist(), self.piece_rank[away].tolist(), strict=True))

    def guests_of(self, rank: int) -> list[int]:
        """The experts that visit ``rank``, sorted."""
        return [expert for expert, host in self.guests if host == rank]

    def hosted(self, rank: int) -> list[int]:
        """The experts that ``rank`` computes: its home experts, idle ones too, then its guests."""
        share = self.experts_per_rank
        return [*range(rank * share, (rank + 1) * share), *self.guests_of(rank)]

    @cached_property
    def _split_rows(self) -> tuple[Ints, Ints]:
        """The rows of every piece of an expert with several: [P] index into the second or -1, [., chunks, Ep] rows."""
        hosts = np.bincount(self.piece_expert, minlength=self.experts)
        split = hosts[self.piece_expert] > 1
        index = np.where(split, np.cumsum(split) - 1, -1)
        experts = np.flatnonzero(hosts > 1)
        rows = np.zeros((int(split.sum()), self.chunks * self.ranks), dtype=np.int64)
        first = np.concatenate([[0], np.cumsum(hosts[experts])])[:-1].astype(np.int64)
        piece_rows = self.piece_rows[split]
        left = self.counts[:, :, experts].transpose(2, 1, 0).reshape(experts.size, self.chunks * self.ranks)
        left_total = left.sum(1)
        for level in range(int(hosts.max())):
            keep = hosts[experts] > level
            experts, first, left, left_total = experts[keep], first[keep], left[keep], left_total[keep]
            piece = piece_rows[first + level]
            share = np.cumsum(left, 1) * piece[:, None] // left_total[:, None]
            taken = np.diff(share, axis=1, prepend=0)
            rows[first + level] = taken
            left, left_total = left - taken, left_total - piece
        return index, rows.reshape(-1, self.chunks, self.ranks)

    def _rows_of(self, pieces: Ints) -> Ints:
        """[pieces, chunks, Ep] rows of some pieces, by chunk and source."""
        index, split = self._split_rows
        rows = self.counts[:, :, self.piece_expert[pieces]].transpose(2, 1, 0)
        several = index[pieces] >= 0
        rows[several] = split[index[pieces][several]]
        return rows

    def sent_pieces(self, source: int) -> Ints:
        """[chunks, P] rows that ``source`` sends to each piece."""
        index, split = self._split_rows
        rows = self.counts[source][:, self.piece_expert]
        several = index >= 0
        rows[:, several] = split[:, :, source].T
        return rows

    def sent(self, source: int) -> Ints:
        """[chunks, Ep, E] rows that ``source`` sends to each rank; they sum to ``counts[source]`` over the ranks."""
        dense = np.zeros((self.chunks, self.ranks, self.experts), dtype=np.int64)
        dense[:, self.piece_rank, self.piece_expert] = self.sent_pieces(source)
        return dense

    def sent_to(self, source: int) -> Ints:
        """[chunks, Ep] rows that ``source`` sends to each rank."""
        return _sum_by(self.sent_pieces(source), self.piece_rank, self.ranks)

    def received(self, rank: int) -> Ints:
        """[chunks, Ep, S] rows that ``rank`` gets from each source, for each expert of ``hosted(rank)``."""
        hosted = self.hosted(rank)
        out = np.zeros((self.chunks, self.ranks, len(hosted)), dtype=np.int64)
        pieces = np.flatnonzero(self.piece_rank == rank)
        column = {expert: i for i, expert in enumerate(hosted)}
        out[:, :, [column[expert] for expert in self.piece_expert[pieces].tolist()]] = self._rows_of(pieces).transpose(
            1, 2, 0
        )
        return out

    @cached_property
    def received_rows(self) -> Ints:
        """[chunks, Ep] rows that each rank receives in each chunk."""
        per_piece = self.counts.sum(0)[:, self.piece_expert]
        index, split = self._split_rows
        per_piece[:, index >= 0] = split.sum(2).T
        return _sum_by(per_piece, self.piece_rank, self.ranks)

    @cached_property
    def home_loads(self) -> Ints:
        """[Ep] rows of each rank's home experts: the loads before the plan."""
        return self.counts.sum((0, 1)).reshape(self.ranks, -1).sum(1)

    @cached_property
    def loads(self) -> Ints:
        """[Ep] rows that each rank computes."""
        return np.bincount(self.piece_rank, self.piece_rows, minlength=self.ranks).astype(np.int64)

    @property
    def imbalance_before(self) -> float:
        """Largest over mean load of the ranks with every row at home."""
        return _imbalance(self.home_loads)

    @property
    def imbalance_after(self) -> float:
        return _imbalance(self.loads)

    def send_ratio(self, source: int) -> float:
        """Largest over the mean of what ``source`` sends to one rank, in its worst chunk; 1 where it sends nothing."""
        sent = self.sent_to(source)
        mean = sent.mean(1)
        return float((sent.max(1)[mean > 0] / mean[mean > 0]).max(initial=1.0))

    def receive_ratio(self) -> float:
        """Largest receive of a rank over the even share of its chunk, in the worst chunk."""
        mean = self.received_rows.mean(1)
        return float((self.received_rows.max(1)[mean > 0] / mean[mean > 0]).max(initial=1.0))

    def predicted_bytes(self, *, row_bytes: int, expert_bytes: int) -> Ints:
        """[Ep] bytes of each rank that depend on the routing: its largest receive and its guests' weights.

        Args:
            row_bytes: one row, H elements.
            expert_bytes: the weights of one expert.
        """
        guests = np.bincount([rank for _, rank in self.guests], minlength=self.ranks).astype(np.int64)
        return self.received_rows.max(0) * row_bytes + guests * expert_bytes


def _sum_by(rows: Ints, labels: Ints, size: int) -> Ints:
    """[chunks, P] summed over the pieces of one label -> [chunks, size]."""
    order = np.argsort(labels, kind="stable")
    ends = np.searchsorted(labels[order], np.arange(size + 1))
    sums = np.concatenate([np.zeros((rows.shape[0], 1), dtype=np.int64), np.cumsum(rows[:, order], 1)], axis=1)
    return sums[:, ends[1:]] - sums[:, ends[:-1]]
