"""Ulysses: each rank gives away its tokens' heads and gets all tokens of its own heads (arXiv 2309.14509).

Letters: U lanes of a ring position - N tokens of a rank - Hq query heads, Hk key/value heads.

    before  rank r holds the tokens of part r, all heads    after  the tokens of all U parts, heads r·Hq/U to ...

A rank needs the key/value heads that its query heads use: Hk / U of them, or one, which several ranks then get, where
there are fewer of those than lanes. Bytes that one rank sends forward, for (query, key, value) and then the output:

    (U - 1) · B · N · (Hq / U · (D + Dv) + h · (D + Dv)) · b,  h = max(1, Hk / U);  backward as many
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_longmoe.context.order import Arrangement
from lightning_longmoe.context.wire import Wire


def query_heads(heads: int, lanes: int, lane: int) -> slice:
    """The query heads of a lane."""
    share = heads // lanes
    return slice(lane * share, (lane + 1) * share)


def kv_heads(heads: int, kv: int, lanes: int, lane: int) -> slice:
    """The key/value heads that the query heads of a lane use."""
    mine, group = query_heads(heads, lanes, lane), heads // kv
    return slice(mine.start // group, (mine.stop - 1) // group + 1)


def check_heads(heads: int, kv: int, lanes: int) -> None:
    """Raise ValueError where query heads cannot be dealt evenly over the lanes."""
    if heads % kv:
        raise ValueError(f"{heads} query heads cannot share {kv} key/value heads: give a multiple of those.")
    if heads % lanes:
        sizes = [n for n in range(1, heads + 1) if heads % n == 0]
        raise ValueError(
            f"Ulysses over {lanes} ranks cannot deal out {heads} query heads: use a Ulysses size among {sizes}, or"
            " kind='ring'."
        )
    group, share = heads // kv, heads // lanes
    if share % group and group % share:
        raise ValueError(
            f"Ulysses over {lanes} ranks would cut through groups of {group} query heads that share a key/value head"
            f" ({heads} query, {kv} key/value heads). Use a size that divides {kv}, or a multiple of it that divides"
            f" {heads}, or kind='ring'."
        )


def to_heads(tensor: Tensor, wire: Wire, arrangement: Arrangement, heads: list[slice]) -> Tensor:
    """[B, H, N, D] of this rank's tokens -> [B, heads of this lane, U·N, D] of the tokens of all lanes.

    Args:
        tensor: all heads.
        wire, arrangement: of the context group.
        heads: of each lane, into the H of ``tensor``.
    """
    return _ToHeads.apply(tensor, wire, arrangement, heads)


def to_tokens(tensor: Tensor, wire: Wire, arrangement: Arrangement, heads: list[slice], total: int) -> Tensor:
    """The way back: [B, heads of this lane, U·N, D] -> [B, total, N, D]; a head that several lanes hold is summed."""
    return _ToTokens.apply(tensor, wire, arrangement, heads, total)


def gather_tokens(tensor: Tensor, wire: Wire, arrangement: Arrangement) -> Tensor:
    """[B, N] -> [B, U·N] of the tokens of all lanes, without gradient."""
    if arrangement.lanes == 1:
        return tensor
    spread = tensor.view(tensor.size(0), 1, -1, 1)
    return _exchange_heads(spread, wire, arrangement, [slice(0, 1)] * arrangement.lanes).view(tensor.size(0), -1)


def _lane_ranks(wire: Wire, arrangement: Arrangement) -> range:
    first = wire.rank // arrangement.lanes * arrangement.lanes
    return range(first, first + arrangement.lanes)


def _count(heads: slice) -> int:
    return heads.stop - heads.start


def _exchange_heads(tensor: Tensor, wire: Wire, arrangement: Arrangement, heads: list[slice]) -> Tensor:
    batch, _, tokens, size = tensor.shape
    ranks = _lane_ranks(wire, arrangement)
    mine = _count(heads[wire.rank - ranks.start])
    empty = tensor.new_empty(0)
    pieces = [tensor[:, heads[rank - ranks.start]] if rank in ranks else empty for rank in range(wire.size)]
    shapes = [(batch, mine, tokens, size) if rank in ranks else (0,) for rank in range(wire.size)]
    received = wire.all_to_all(pieces, shapes)
    return torch.cat([received[rank] for rank in ranks], dim=2)


def _exchange_tokens(
    tensor: Tensor, wire: Wire, arrangement: Arrangement, heads: list[slice], total: int
) -> Tensor:
    batch, mine, tokens, size = tensor.shape
    share = tokens // arrangement.lanes
    ranks = _lane_ranks(wire, arrangement)
    empty = tensor.new_empty(0)
    parts = tensor.split(share, dim=2)
    pieces = [parts[rank - ranks.start] if rank in ranks else empty for rank in range(wire.size)]
    shapes = [
        (batch, _count(heads[rank - ranks.start]), share, size) if rank in ranks else (0,) for rank in range(wire.size)
    ]
    received = wire.all_to_all(pieces, shapes)
    out = tensor.new_zeros((batch, total, share, size))
    for rank in ranks:  # in the order of the lanes, so that sums are the same in each run
        out[:, heads[rank - ranks.start]] += received[rank]
    return out


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, wire: Wire, arrangement: Arrangement, heads: list[slice]) -> Tensor:  # type: ignore[override]
        ctx.way = wire, arrangement, heads, tensor.size(1)
        return _exchange_heads(tensor, wire, arrangement, heads)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        return _exchange_tokens(grad.contiguous(), *ctx.way), None, None, None


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, tensor: Tensor, wire: Wire, arrangement: Arrangement, heads: list[slice], total: int
    ) -> Tensor:
        ctx.way = wire, arrangement, heads
        return _exchange_tokens(tensor, wire, arrangement, heads, total)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:  # type: ignore[override]
        return _exchange_heads(grad.contiguous(), *ctx.way), None, None, None, None
