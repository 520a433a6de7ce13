"""Attention of queries to the keys of one visit, by pairs of runs: torch's flash kernels where they fit, else tiles.

A *run* is a stretch of consecutive positions; a ring part has two, its chunks. Between a run of queries and a run of
keys a causal rule allows everything, nothing, or exactly the lower triangle, and for all of these torch has kernels
with a log-sum-exp, on the CPU and, for float16 and bfloat16, on CUDA. Windows that cut through a pair, and documents,
go through `tiles`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_longmoe import _compat
from lightning_longmoe.context.tiles import Block, Rule, Upstream, block_backward, block_forward, merge_, wide


def runs_of(block: Block) -> list[slice]:
    """The stretches of consecutive positions."""
    breaks = (block.positions.diff() != 1).nonzero().flatten() + 1
    edges = [0, *breaks.tolist(), len(block)]
    return [slice(a, b) for a, b in zip(edges, edges[1:], strict=False) if b > a]


def _triangle(queries: Block, keys: Block, rule: Rule) -> bool | None:
    """Whether a pair is exactly the lower triangle (True), all visible (False), or neither (None)."""
    if queries.documents is not None:
        return None
    seen, shown = queries.range, keys.range
    if rule.sees_all(seen, shown):
        return False
    return True if rule.causal and seen == shown and (rule.window is None or rule.window >= len(queries)) else None


def forward_runs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    queries: Block,
    keys: Block,
    rule: Rule,
    scale: float,
    so_far: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """As `tiles.block_forward`, merged in place into the result of other keys where there is one."""
    if so_far is None:
        dtype = wide(query.dtype)
        out = query.new_zeros((*query.shape[:3], value.size(-1)), dtype=dtype)
        so_far = out, query.new_full(query.shape[:3], -torch.inf, dtype=dtype)
    out, lse = so_far
    for rows, columns, triangle in _pairs(queries, keys, rule):
        q, k, v = query[:, :, rows], key[:, :, columns], value[:, :, columns]
        if triangle is not None and _compat.flash_attention_fits(q):
            part, part_lse = _flash_forward(q, k, v, triangle, scale)
        else:
            part, part_lse = block_forward(q, k, v, queries[rows], keys[columns], rule, scale)
        merge_(out[:, :, rows], lse[:, :, rows], part, part_lse)
    return out, lse


def _pairs(queries: Block, keys: Block, rule: Rule) -> list[tuple[slice, slice, bool | None]]:
    of_keys = [(part, keys[part]) for part in runs_of(keys)]
    pairs = []
    for rows in runs_of(queries):
        seen = queries[rows]
        for columns, shown in of_keys:
            if rule.can_see(seen.range, shown.range):
                pairs.append((rows, columns, _triangle(seen, shown, rule)))
    return pairs


def backward_runs(
    upstream: Upstream,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    queries: Block,
    keys: Block,
    rule: Rule,
    scale: float,
    grad_query: Tensor,
) -> tuple[Tensor, Tensor]:
    """As `tiles.block_backward`."""
    dtype = wide(query.dtype)
    grad_key, grad_value = torch.zeros_like(key, dtype=dtype), torch.zeros_like(value, dtype=dtype)
    for rows, columns, triangle in _pairs(queries, keys, rule):
        q, k, v, of_query = query[:, :, rows], key[:, :, columns], value[:, :, columns], grad_query[:, :, rows]
        if triangle is not None and _compat.flash_attention_fits(q):
            of_key, of_value = _flash_backward(upstream[rows], q, k, v, triangle, scale, of_query)
        else:
            places = queries[rows], keys[columns]
            of_key, of_value = block_backward(upstream[rows], q, k, v, *places, rule, scale, of_query)
        grad_key[:, :, columns] += of_key
        grad_value[:, :, columns] += of_value
    return grad_key, grad_value


def _even(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
    """The three with one head for each query head and one size; zeros behind sizes that are smaller change nothing."""
    groups, size = query.size(1) // key.size(1), max(query.size(-1), value.size(-1))
    size += -size % 8
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    query, key, value = (F.pad(tensor, (0, size - tensor.size(-1))) for tensor in (query, key, value))
    return query, key, value, size


def _flash_forward(query: Tensor, key: Tensor, value: Tensor, triangle: bool, scale: float) -> tuple[Tensor, Tensor]:
    q, k, v, _ = _even(query, key, value)
    out, lse = _compat.flash_attention_forward(q, k, v, triangle, scale)
    return out[..., : value.size(-1)], lse


def _flash_backward(
    upstream: Upstream, query: Tensor, key: Tensor, value: Tensor, triangle: bool, scale: float, grad_query: Tensor
) -> tuple[Tensor, Tensor]:
    q, k, v, size = _even(query, key, value)
    g, o = (F.pad(tensor, (0, size - tensor.size(-1))) for tensor in (upstream.grad, upstream.out))
    lse = upstream.lse.contiguous()
    of_query, of_key, of_value = _compat.flash_attention_backward(g, q, k, v, o, lse, triangle, scale)
    grad_query += of_query[..., : query.size(-1)]
    batch, heads, tokens, _ = key.shape
    dtype = wide(query.dtype)
    of_key, of_value = (t.to(dtype).view(batch, heads, -1, tokens, size).sum(2) for t in (of_key, of_value))
    return of_key[..., : key.size(-1)], of_value[..., : value.size(-1)]
