"""Ring attention: queries stay, keys and values of other ranks come by, one rank's at a time.

In step s each rank sends its keys and values to the rank s places on and receives those of the rank s places back, so
that every pair meets once and nobody forwards what is not its own. Of the two chunks of a part only those travel that
some query of the receiver can see: under a causal rule about three quarters of all, under a window of w tokens the few
that are less than w away. In the backward they travel again, and the gradients of a chunk (float32 at least) go
straight home, where they are added in the order of the steps.

Bytes that one rank sends, with T(s) the tokens of its chunks that rank s places on can see, b bytes an element:

    forward   sum over s of B · T(s) · Hk · (D + Dv) · b, and 8 · B · T(s) more where there are document ids
    backward  the same, and sum over s of B · T'(s) · Hk · (D + Dv) · 4, T'(s) the tokens received in step s
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_longmoe.context.order import Arrangement
from lightning_longmoe.context.runs import backward_runs, forward_runs
from lightning_longmoe.context.tiles import Block, Rule, finite, merge_, wide
from lightning_longmoe.context.wire import Wire
from lightning_longmoe.runtime.once import only_once


@dataclass(frozen=True)
class Ring:
    """One rank's place in a ring.

    Attributes:
        wire: sends and receives between the ranks of the context group, and counts bytes.
        arrangement: of the group.
        rank: in the group.
        parts: [size of the ring] positions of each ring part, as the ranks hold them.
        rule: what queries see.
        scale: of the scores.
    """

    wire: Wire
    arrangement: Arrangement
    rank: int
    parts: tuple[Tensor, ...]
    rule: Rule
    scale: float

    @property
    def place(self) -> int:
        return self.rank // self.arrangement.lanes

    def peer(self, distance: int) -> int:
        """The rank of the group ``distance`` places on, in the same lane."""
        place = (self.place + distance) % self.arrangement.ring
        return place * self.arrangement.lanes + self.rank % self.arrangement.lanes

    def travelling(self, owner: int, receiver: int) -> Tensor:
        """Indices into the part of ring place ``owner`` of the chunks that ``receiver`` can see."""
        keys, queries = self.parts[owner], self.parts[receiver]
        halves = range(2) if self.arrangement.ring > 1 else range(1)
        size = len(keys) // len(halves)
        chosen = [half for half in halves if self._sees(queries, keys[half * size : (half + 1) * size])]
        return torch.cat([torch.arange(half * size, (half + 1) * size) for half in chosen] or [torch.arange(0)])

    def _sees(self, queries: Tensor, keys: Tensor) -> bool:
        span = (int(keys[0]), int(keys[-1]))
        half = len(queries) // 2 or 1
        return any(self.rule.can_see((int(q[0]), int(q[-1])), span) for q in queries.split(half))


def ring_attention(
    ring: Ring, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, documents: Tensor | None
) -> Tensor:
    """Attention of this rank's queries to the keys of all ring places.

    Args:
        ring: this rank's place.
        query: [B, Hq, N, D], N positions of its ring part.
        key, value: [B, Hk, N, D], [B, Hk, N, Dv].
        sinks: [Hq] unscaled logits that take part in each softmax and have no value; None: none.
        documents: [B, N] int64; None: one document.

    Returns:
        [B, Hq, N, Dv] in the dtype of the query.
    """
    return _RingAttention.apply(query, key, value, sinks, documents, ring)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        documents: Tensor | None,
        ring: Ring,
    ) -> Tensor:
        out, lse = _forward(ring, query, key, value, documents)
        if sinks is not None:
            total = torch.logaddexp(lse, sinks.to(lse.dtype).view(1, -1, 1))
            out.mul_((lse - total).exp().unsqueeze(-1))
            lse = total
        result = out.to(query.dtype)
        ctx.ring, ctx.documents = ring, documents
        ctx.save_for_backward(query, key, value, sinks, result, lse)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        saved = ctx.saved_tensors  # once: a checkpoint gives them out no second time
        with torch.no_grad():
            grads = _RingAttention._gradients(ctx, saved, grad)
        return (*only_once(grads, (*saved[:4], grad), "context_attention"), None, None)

    @staticmethod
    def _gradients(ctx: Any, saved: tuple[Any, ...], grad: Tensor) -> list[Tensor | None]:
        query, key, value, sinks, result, lse = saved
        dtype = wide(query.dtype)
        grad = grad.contiguous()
        delta = (grad.to(dtype) * result.to(dtype)).sum(-1)
        grads = _backward(ctx.ring, grad, result, delta, lse, query, key, value, ctx.documents)
        grad_sinks = None
        if sinks is not None:
            share = (sinks.to(dtype).view(1, -1, 1) - finite(lse)).exp()
            grad_sinks = -(share * delta).sum((0, 2)).to(sinks.dtype)
        like = (query, key, value)
        return [*(g.to(t.dtype) for g, t in zip(grads, like, strict=True)), grad_sinks]


def _cargo(tensors: tuple[Tensor, ...], documents: Tensor | None, indices: Tensor) -> list[Tensor]:
    device = tensors[0].device
    chosen = indices.to(device)
    cargo = [tensor.index_select(2, chosen) for tensor in tensors]
    return cargo if documents is None else [*cargo, documents.index_select(1, chosen)]


def _room(
    tensors: tuple[Tensor, ...], documents: Tensor | None, tokens: int, dtype: torch.dtype | None = None
) -> list[Tensor]:
    room = [t.new_empty((*t.shape[:2], tokens, t.shape[3]), dtype=dtype or t.dtype) for t in tensors]
    return room if documents is None else [*room, documents.new_empty((documents.size(0), tokens))]


class _Visits:
    """Keys and values of all ring places, one's own first; the next is on its way while one is looked at."""

    def __init__(self, ring: Ring, key: Tensor, value: Tensor, documents: Tensor | None) -> None:
        self._ring, self._own, self._documents = ring, (key, value), documents
        self._next: Any = None

    def __iter__(self) -> Any:
        ring, size = self._ring, self._ring.arrangement.ring
        own = torch.arange(len(ring.parts[ring.place]))
        self._launch(1)
        yield 0, own, self._own, self._documents
        for step in range(1, size):
            indices, room, work = self._next
            ring.wire.wait(work)
            self._launch(step + 1)
            documents = None if self._documents is None else room[2]
            yield step, indices, (room[0], room[1]), documents

    def _launch(self, step: int) -> None:
        ring, size = self._ring, self._ring.arrangement.ring
        if step >= size:
            return
        there, back = (ring.place + step) % size, (ring.place - step) % size
        outgoing, incoming = ring.travelling(ring.place, there), ring.travelling(back, ring.place)
        room = _room(self._own, self._documents, len(incoming))
        cargo = _cargo(self._own, self._documents, outgoing)
        self._next = (incoming, room, ring.wire.exchange(cargo, ring.peer(step), room, ring.peer(-step)))


def _forward(
    ring: Ring, query: Tensor, key: Tensor, value: Tensor, documents: Tensor | None
) -> tuple[Tensor, Tensor]:
    own = ring.parts[ring.place].to(query.device)
    queries = Block(own, documents)
    result: tuple[Tensor, Tensor] | None = None
    for step, indices, (k, v), docs in _Visits(ring, key, value, documents):
        if len(indices) == 0:
            continue
        owner = (ring.place - step) % ring.arrangement.ring
        keys = Block(ring.parts[owner][indices].to(query.device), docs)
        out, lse = forward_runs(query, k, v, queries, keys, ring.rule, ring.scale)
        if result is None:
            result = out, lse
        else:
            merge_(*result, out, lse)
    assert result is not None
    return result


def _backward(
    ring: Ring,
    grad: Tensor,
    result: Tensor,
    delta: Tensor,
    lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    dtype, size = wide(query.dtype), ring.arrangement.ring
    queries = Block(ring.parts[ring.place].to(query.device), documents)
    grad_query = torch.zeros_like(query, dtype=dtype)
    totals = [torch.zeros_like(key, dtype=dtype), torch.zeros_like(value, dtype=dtype)]
    homing: Any = None
    for step, indices, (k, v), docs in _Visits(ring, key, value, documents):
        owner = (ring.place - step) % size
        keys = Block(ring.parts[owner][indices].to(query.device), docs)
        gradients = [torch.zeros_like(k, dtype=dtype), torch.zeros_like(v, dtype=dtype)]
        if len(indices):
            gradients = list(
                backward_runs(
                    grad, result, delta, lse, query, k, v, queries, keys, ring.rule, ring.scale, grad_query
                )
            )
        if step == 0:
            _add_home(totals, indices, gradients)
            continue
        _land(ring, homing, totals)
        mine = ring.travelling(ring.place, (ring.place + step) % size)
        room = _room((key, value), None, len(mine), dtype)
        homing = (mine, room, ring.wire.exchange(gradients, ring.peer(-step), room, ring.peer(step)))
    _land(ring, homing, totals)
    return grad_query, totals[0], totals[1]


def _land(ring: Ring, homing: Any, totals: list[Tensor]) -> None:
    if homing is not None:
        indices, room, work = homing
        ring.wire.wait(work)
        _add_home(totals, indices, room)


def _add_home(totals: list[Tensor], indices: Tensor, gradients: list[Tensor]) -> None:
    for total, gradient in zip(totals, gradients, strict=True):
        total.index_add_(2, indices.to(total.device), gradient)
