"""Token embedding over vocabulary shards: ids travel to the ranks that own them, rows come back.

Letters: N ids of this rank - U different ones among them - V vocabulary - H hidden size - P ranks - b bytes of an
element of the weight, w of a wide one (4, or 8 for float64).

Each different id is asked for once, however often it occurs. Ids go out in one all-to-all; rows come back in P - 1
rounds, in round i from rank r - i, straight to their place. So a rank holds [U, H] rows and what it sends in two
rounds, at most V / P rows each, even where one rank owns the tokens of all others (frequent tokens have low ids).

Sent by one rank: 8 bytes for each id that another rank owns, and H·b for each row that another asks for. The backward
sums the gradient of each different id first and sends it wide, H·w a row. No two additions meet in one call of
``index_add_``, and rounds come in a fixed order, so that runs are bitwise equal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_longmoe.kernels.expert_grad import wide_dtype
from lightning_longmoe.vocabulary.agreement import agree, ring_of
from lightning_longmoe.vocabulary.record import current_record
from lightning_longmoe.vocabulary.ring import Ring, Traffic
from lightning_longmoe.vocabulary.spans import VocabularySplit

_NAME = "vocabulary_embedding"
_COLUMNS = 1024


def vocabulary_embedding(
    ids: Tensor,
    weight_shard: Tensor,
    *,
    group: dist.ProcessGroup | None,
    vocab_size: int,
    padding_idx: int | None = None,
) -> Tensor:
    """``F.embedding`` of this rank's ids in a weight whose rows are spread over a group. All ranks must call it.

    Args:
        ids: any shape, int64 or int32, global ids; may be empty and differ in shape between ranks.
        weight_shard: this rank's rows [r·Vp, (r+1)·Vp), Vp = ceil(V / P), of H columns; the last shards may be padded
            to Vp rows, or short, or empty.
        group: the P ranks, in the order of their shards. None: one process.
        vocab_size: V.
        padding_idx: an id whose row gets no gradient; None: there is none.

    Returns:
        [*ids.shape, H] in the dtype of the weight. In the backward, which all ranks must run if any does, a rank's
        weight gradient is the sum over the ids of all ranks, accumulated in float32 (float64 for float64).

    Raises:
        ValueError: shapes do not fit, ids are outside the vocabulary, or no group where several processes run. What
            one rank finds, all ranks raise.
    """
    ring = ring_of(group, _NAME)
    refusal = _refusal(ring, ids, weight_shard, vocab_size)
    flat = ids.reshape(-1).long() if refusal is None else ids.new_zeros(0, dtype=torch.int64)
    request = _agreed_request(ring, flat, weight_shard, vocab_size, padding_idx, refusal)
    if ring.size == 1:
        rows = F.embedding(flat, weight_shard[:vocab_size], padding_idx)
    else:
        # a rank whose shard is frozen still sends the gradients of the others' rows
        anchor = torch.zeros((), device=ids.device, requires_grad=request.wanted and torch.is_grad_enabled())
        rows = _Lookup.apply(weight_shard, anchor, request)
    return rows.view(*ids.shape, weight_shard.size(1))


@dataclass(frozen=True, eq=False)
class _Request:
    """What one call asks of the ranks, and they of this one.

    Attributes:
        ring: the ranks.
        split: of the vocabulary.
        unique: [U] the different ids of this rank, ascending, and so in the order of their owners.
        inverse: [N] where each id is in ``unique``.
        counts: [P][P] how many different ids each rank (first index) asks of each (second).
        padding_idx: the id without gradient.
        wanted: whether any rank wants the gradient.
        traffic: counts what is sent.
    """

    ring: Ring
    split: VocabularySplit
    unique: Tensor
    inverse: Tensor
    counts: tuple[tuple[int, ...], ...]
    padding_idx: int | None
    wanted: bool
    traffic: Traffic

    def of(self, owner: int) -> slice:
        """Where the ids of ``owner`` are in ``unique``."""
        own = self.counts[self.ring.rank]
        return slice(sum(own[:owner]), sum(own[: owner + 1]))


def _agreed_request(
    ring: Ring,
    flat: Tensor,
    weight: Tensor,
    vocab_size: int,
    padding_idx: int | None,
    refusal: ValueError | None,
) -> _Request:
    split = VocabularySplit(vocab_size if refusal is None else 1, ring.size)
    unique, inverse = torch.unique(flat, return_inverse=True)
    starts = torch.tensor([split.start(rank) for rank in range(ring.size)] + [split.vocab_size], device=flat.device)
    agreement = agree(
        ring,
        what=f"{_NAME}: ids",
        tokens=flat.numel(),
        strangers=((flat < 0) | (flat >= split.vocab_size)).sum(),
        numbers=torch.searchsorted(unique, starts).diff(),
        wanted=[torch.is_grad_enabled() and weight.requires_grad],
        settings=(_NAME, vocab_size, *weight.shape[1:], weight.dtype, padding_idx),
        refusal=refusal,
    )
    traffic = current_record().lookup
    return _Request(ring, split, unique, inverse, agreement.numbers, padding_idx, agreement.wanted[0], traffic)


def _refusal(ring: Ring, ids: Tensor, weight: Tensor, vocab_size: int) -> ValueError | None:
    if isinstance(vocab_size, bool) or not isinstance(vocab_size, int) or vocab_size < 1:
        return ValueError(f"{_NAME}(vocab_size={vocab_size!r}) is not allowed: give a whole number of at least 1.")
    if ids.dtype not in (torch.int64, torch.int32):
        return ValueError(f"{_NAME}: ids are {ids.dtype}: give int64 or int32 ids.")
    split = VocabularySplit(vocab_size, ring.size)
    least, most = split.rows(ring.rank), split.padded_rows
    if weight.dim() != 2 or not weight.is_floating_point() or not least <= weight.size(0) <= most:
        return ValueError(
            f"{_NAME}: weight_shard {list(weight.shape)} {weight.dtype} does not fit vocab_size={vocab_size} over"
            f" {ring.size} ranks. Rank {ring.rank} owns {least} rows, from {split.start(ring.rank)}: give [{least}, H],"
            f" or up to {most} rows with padding."
        )
    return None


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, anchor: Tensor, request: _Request) -> Tensor:  # type: ignore[override]
        ring = request.ring
        asked = _exchange_ids(request)
        table = weight.new_empty(request.unique.numel(), weight.size(1))
        table[request.of(ring.rank)] = weight.index_select(0, asked[ring.rank])
        _in_rounds(
            request,
            outgoing=lambda peer: weight.index_select(0, asked[peer]),
            incoming=lambda peer: table[request.of(peer)],
            arrived=lambda peer, rows: None,
        )
        ctx.request, ctx.asked, ctx.shape, ctx.dtype = request, asked, weight.shape, weight.dtype
        return table.index_select(0, request.inverse)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None]:  # type: ignore[override]
        request: _Request = ctx.request
        asked: list[Tensor] = ctx.asked
        wide = wide_dtype(ctx.dtype)
        of_ids = _sum_by_id(grad, request, wide)
        total = torch.zeros(ctx.shape, dtype=wide, device=grad.device)
        total.index_add_(0, asked[request.ring.rank], of_ids[request.of(request.ring.rank)])
        _in_rounds(
            request,
            outgoing=lambda peer: of_ids[request.of(peer)],
            incoming=lambda peer: of_ids.new_empty(asked[peer].numel(), of_ids.size(1)),
            arrived=lambda peer, rows: total.index_add_(0, asked[peer], rows),
        )
        return total.to(ctx.dtype) if ctx.needs_input_grad[0] else None, None, None


def _exchange_ids(request: _Request) -> list[Tensor]:
    """[P] the rows of this rank's shard that each rank asks for."""
    ring, counts = request.ring, request.counts
    sent = list(counts[ring.rank])
    received = [counts[rank][ring.rank] for rank in range(ring.size)]
    asked = request.unique.new_empty(sum(received))
    dist.all_to_all_single(asked, request.unique, received, sent, group=ring.group)
    request.traffic.sent_bytes += (sum(sent) - sent[ring.rank]) * request.unique.element_size()
    return list((asked - request.split.start(ring.rank)).split(received))


@dataclass(frozen=True, eq=False)
class _Round:
    """Rows on their way to one rank and from another; they stay alive until the works were waited for."""

    works: list[dist.Work]
    behind: int
    sent: Tensor
    received: Tensor


def _in_rounds(
    request: _Request,
    outgoing: Callable[[int], Tensor],
    incoming: Callable[[int], Tensor],
    arrived: Callable[[int, Tensor], object],
) -> None:
    """Exchange rows with every other rank; while one round's are on their way, the next ones are gathered.

    Args:
        outgoing: rank -> contiguous rows for it, as many as it knows to come.
        incoming: rank -> contiguous buffer for its rows.
        arrived: called with each rank and its rows, in the order of rounds.
    """
    ring, flying = request.ring, None
    for i in range(1, ring.size):
        ahead, behind = (ring.rank + i) % ring.size, (ring.rank - i) % ring.size
        rows, buffer = outgoing(ahead), incoming(behind)
        operations = [
            dist.P2POp(operation, tensor, group=ring.group, group_peer=peer)
            for operation, tensor, peer in ((dist.isend, rows, ahead), (dist.irecv, buffer, behind))
            if tensor.numel()
        ]
        works = dist.batch_isend_irecv(operations) if operations else []
        request.traffic.hops += 1
        request.traffic.sent_bytes += rows.nbytes
        _finish(flying, arrived)
        flying = _Round(works, behind, rows, buffer)
    _finish(flying, arrived)


def _finish(flying: _Round | None, arrived: Callable[[int, Tensor], object]) -> None:
    if flying is not None:
        for work in flying.works:
            work.wait()
        arrived(flying.behind, flying.received)


def _sum_by_id(grad: Tensor, request: _Request, wide: torch.dtype) -> Tensor:
    """[U, H] wide: the gradient [N, H] summed over the places of each different id; 0 for ``padding_idx``."""
    total = torch.empty((request.unique.numel(), grad.size(1)), dtype=wide, device=grad.device)
    for start in range(0, grad.size(1), _COLUMNS):
        columns = slice(start, start + _COLUMNS)
        part = grad[:, columns].to(wide).contiguous()
        # index_add_ would add in the order of a GPU's threads; this sorts
        total[:, columns] = torch.ops.aten.embedding_dense_backward(part, request.inverse, len(total), -1, False)
    if request.padding_idx is not None:
        total[request.unique == request.padding_idx] = 0
    return total
