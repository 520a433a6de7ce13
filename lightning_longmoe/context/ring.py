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
from lightning_longmoe.context.tiles import Block, Rule, Upstream, finite, wide
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

    def travelling(self, owner: int, receiver: int) -> slice:
        """What of the part of ring place ``owner`` the place ``receiver`` can see: both chunks, one, or nothing."""
        chunk = len(self.parts[owner]) // 2
        keys, queries = self.parts[owner].split(chunk), self.parts[receiver].split(chunk)
        seen = [any(self.rule.can_see(_span(q), _span(k)) for q in queries) for k in keys]
        return slice(0 if seen[0] else chunk, 2 * chunk if seen[1] else chunk)


def _span(positions: Tensor) -> tuple[int, int]:
    return int(positions[0]), int(positions[-1])


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


def _cargo(tensors: tuple[Tensor, ...], documents: Tensor | None, part: slice) -> list[Tensor]:
    cargo = [tensor[:, :, part] for tensor in tensors]
    return cargo if documents is None else [*cargo, documents[:, part]]


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
        self._launch(1)
        yield 0, Block(ring.parts[ring.place], self._documents), self._own
        for step in range(1, size):
            positions, room, work = self._next
            ring.wire.wait(work)
            self._launch(step + 1)
            yield step, Block(positions, None if self._documents is None else room[2]), (room[0], room[1])

    def _launch(self, step: int) -> None:
        ring, size = self._ring, self._ring.arrangement.ring
        if step >= size:
            return
        there, back = (ring.place + step) % size, (ring.place - step) % size
        outgoing, incoming = ring.travelling(ring.place, there), ring.travelling(back, ring.place)
        room = _room(self._own, self._documents, incoming.stop - incoming.start)
        cargo = _cargo(self._own, self._documents, outgoing)
        work = ring.wire.exchange(cargo, ring.peer(step), room, ring.peer(-step))
        self._next = (ring.parts[back][incoming], room, work)


def _forward(
    ring: Ring, query: Tensor, key: Tensor, value: Tensor, documents: Tensor | None
) -> tuple[Tensor, Tensor]:
    queries = Block(ring.parts[ring.place], documents)
    result: tuple[Tensor, Tensor] | None = None
    for _, keys, (k, v) in _Visits(ring, key, value, documents):
        result = forward_runs(query, k, v, queries, keys, ring.rule, ring.scale, result)
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
    queries = Block(ring.parts[ring.place], documents)
    upstream = Upstream(grad, result, delta, lse)
    grad_query = torch.zeros_like(query, dtype=dtype)
    totals: tuple[Tensor, ...] = ()
    homing: Any = None
    for step, keys, (k, v) in _Visits(ring, key, value, documents):
        gradients = backward_runs(upstream, query, k, v, queries, keys, ring.rule, ring.scale, grad_query)
        if step == 0:
            totals = gradients
            continue
        _land(ring, homing, totals)
        mine = ring.travelling(ring.place, (ring.place + step) % size)
        room = _room((key, value), None, mine.stop - mine.start, dtype)
        homing = (mine, room, ring.wire.exchange(gradients, ring.peer(-step), room, ring.peer(step)))
    _land(ring, homing, totals)
    return grad_query, totals[0], totals[1]


def _land(ring: Ring, homing: Any, totals: tuple[Tensor, ...]) -> None:
    """Wait for the gradients of what another place saw, and add them to those of this rank's keys and values."""
    if homing is not None:
        part, room, work = homing
        ring.wire.wait(work)
        for total, gradient in zip(totals, room, strict=True):
            total[:, :, part] += gradient
