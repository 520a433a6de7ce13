"""`context_attention`: each rank has a part of every sequence, and its queries see the keys of all.

A hybrid of R ring places and U Ulysses lanes contains the other two kinds: heads are exchanged among the lanes, ring
attention runs over the places for this lane's heads, and heads go back.
"""

from __future__ import annotations

import math

import torch.distributed as dist
from torch import Tensor

from lightning_longmoe.context.order import Arrangement, Kind, arrange, context_order
from lightning_longmoe.context.ring import Ring, ring_attention
from lightning_longmoe.context.tiles import Rule
from lightning_longmoe.context.ulysses import check_heads, gather_tokens, kv_heads, query_heads, to_heads, to_tokens
from lightning_longmoe.context.wire import Wire


def context_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    group: dist.ProcessGroup | None,
    kind: Kind,
    causal: bool = True,
    window: int | None = None,
    sinks: Tensor | None = None,
    document_ids: Tensor | None = None,
    scale: float | None = None,
    ulysses_size: int | None = None,
    wire: Wire | None = None,
) -> Tensor:
    """Attention over sequences that are split over the ranks of ``group``. All ranks call it; backward is a collective.

    Args:
        query: [B, Hq, S/cp, D] of this rank's positions, as `context_order` deals them; any floating dtype.
        key: [B, Hk, S/cp, D]; Hk divides Hq.
        value: [B, Hk, S/cp, Dv].
        group: the context ranks. None means one process, and raises where a process group of several ranks exists.
        kind: "ulysses", "ring" or "hybrid".
        causal: a query sees its own and earlier positions. False: all.
        window: key j is seen by query i when 0 <= i - j < window; implies ``causal``. None: no limit.
        sinks: [Hq], the same on all ranks: unscaled logits that take part in each softmax and have no value. The
            gradient is of this rank's queries (and, with Ulysses, of its heads); sum it over the group.
        document_ids: [B, S/cp] int64, this rank's slice: a query sees keys of its own document only.
        scale: of query · key; None: D ** -0.5.
        ulysses_size: of a hybrid; see `arrange`.
        wire: counts bytes; None: a new one.

    Returns:
        [B, Hq, S/cp, Dv] in the dtype of the query.

    Raises:
        ValueError: shapes, sizes or options that do not fit, before anything is sent.
    """
    if group is None and dist.is_initialized() and dist.get_world_size() > 1:
        raise ValueError("context_attention(group=None) means one process, and there are several: give their group.")
    _check(query, key, value, sinks, document_ids, window)
    wire = Wire(group) if wire is None else wire
    arrangement = arrange(wire.size, kind, ulysses_size)
    heads, kv = query.size(1), key.size(1)
    check_heads(heads, kv, arrangement.lanes)
    rule = Rule(causal or window is not None, window)
    ring = Ring(wire, arrangement, wire.rank, _parts(query.size(2), arrangement, kind), rule, _scale(query, scale))
    if arrangement.lanes == 1:
        return ring_attention(ring, query, key, value, sinks, document_ids)
    lane = wire.rank % arrangement.lanes
    of_queries = [query_heads(heads, arrangement.lanes, n) for n in range(arrangement.lanes)]
    of_keys = [kv_heads(heads, kv, arrangement.lanes, n) for n in range(arrangement.lanes)]
    out = ring_attention(
        ring,
        to_heads(query, wire, arrangement, of_queries),
        to_heads(key, wire, arrangement, of_keys),
        to_heads(value, wire, arrangement, of_keys),
        None if sinks is None else sinks[of_queries[lane]],
        None if document_ids is None else gather_tokens(document_ids, wire, arrangement),
    )
    return to_tokens(out, wire, arrangement, of_queries, heads)


def _scale(query: Tensor, scale: float | None) -> float:
    return 1.0 / math.sqrt(query.size(-1)) if scale is None else scale


def _parts(tokens: int, arrangement: Arrangement, kind: Kind) -> tuple[Tensor, ...]:
    """Positions of each ring part."""
    lanes = arrangement.lanes if kind == "hybrid" else None
    order = context_order(tokens * arrangement.size, arrangement.size, kind, lanes)
    return tuple(order.view(arrangement.ring, -1))


def _check(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, document_ids: Tensor | None, window: int | None
) -> None:
    shapes = f"query {list(query.shape)}, key {list(key.shape)}, value {list(value.shape)}"
    if not query.ndim == key.ndim == value.ndim == 4:
        raise ValueError(f"context_attention takes [B, heads, tokens, size], and was given {shapes}.")
    same = query.shape[0] == key.shape[0] == value.shape[0] and query.shape[2] == key.shape[2] == value.shape[2]
    if not same or query.size(3) != key.size(3) or key.size(1) != value.size(1):
        raise ValueError(
            f"context_attention was given {shapes}: B and tokens must be equal, query and key have the same size, and"
            " key and value the same heads."
        )
    if not query.dtype == key.dtype == value.dtype or not query.is_floating_point():
        raise ValueError(
            f"context_attention was given dtypes {query.dtype}, {key.dtype}, {value.dtype}: give one floating type."
        )
    if sinks is not None and tuple(sinks.shape) != (query.size(1),):
        raise ValueError(f"sinks must have one logit for each of the {query.size(1)} heads, not {list(sinks.shape)}.")
    if document_ids is not None and document_ids.shape != (query.size(0), query.size(2)):
        raise ValueError(
            f"document_ids must be this rank's [{query.size(0)}, {query.size(2)}], not {list(document_ids.shape)}."
        )
    if window is not None and (isinstance(window, bool) or window < 1):
        raise ValueError(f"window={window!r} is not allowed: give a number of tokens of at least 1, or None.")
