"""Attention of one block of queries to one block of keys, in tiles, with the log-sum-exp that lets blocks be merged.

Queries and keys come as runs of consecutive positions.

Letters: B sequences - Hq query heads - Hk key/value heads (G = Hq / Hk queries share one) - Q queries - S keys of the
block - D size of a query and key, Dv of a value. Scores exist only for a tile of queries and keys. All sums are in
float32, or float64 for float64 inputs.

Forward of a block: out = softmax(scores) v over its keys alone, and lse. Two blocks merge into

    lse = log(exp(lse_1) + exp(lse_2)),   out = exp(lse_1 - lse) out_1 + exp(lse_2 - lse) out_2

The backward of each block needs only the final lse and delta = sum(d_out · out): p = exp(scores - lse), d_scores =
p (d_out · v - delta). (FlashAttention-2, arXiv 2307.08691, Section 3; over ranks: arXiv 2310.01889.)
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

TILE_ELEMENTS = 1 << 22
"""Most scores of one tile."""


@dataclass(frozen=True)
class Rule:
    """Which keys a query may see.

    Attributes:
        causal: keys at its own and earlier positions.
        window: of those the last ``window``; None: all.
    """

    causal: bool = True
    window: int | None = None

    def can_see(self, queries: tuple[int, int], keys: tuple[int, int]) -> bool:
        """Whether any query of a range of positions may see any key of another; ranges are (first, last)."""
        if self.causal and keys[0] > queries[1]:
            return False
        return self.window is None or queries[0] - keys[1] < self.window

    def sees_all(self, queries: tuple[int, int], keys: tuple[int, int]) -> bool:
        """Whether every query of a range sees every key of another."""
        if self.causal and keys[1] > queries[0]:
            return False
        return self.window is None or queries[1] - keys[0] < self.window


@dataclass(frozen=True)
class Block:
    """Where queries or keys are.

    Attributes:
        positions: [n] int64 in the sequence, on the host: what is seen is decided there, without waiting for a device.
        documents: [B, n] int64 on the device, or None where every sequence is one document.
    """

    positions: Tensor
    documents: Tensor | None

    def __getitem__(self, part: slice) -> Block:
        return Block(self.positions[part], None if self.documents is None else self.documents[:, part])

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def range(self) -> tuple[int, int]:
        """The first and the last position of a run."""
        return int(self.positions[0]), int(self.positions[-1])


def wide(dtype: torch.dtype) -> torch.dtype:
    """In which scores and sums are computed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _visible(queries: Block, keys: Block, rule: Rule, device: torch.device) -> Tensor | None:
    """[1 or B, 1, 1, Q, S] bool of a tile; None where all of it is."""
    mask = None
    if not rule.sees_all(queries.range, keys.range):
        # Both are runs, made anew on the device from where they begin: nothing is copied there.
        q = torch.arange(len(queries), device=device).unsqueeze(-1) + (queries.range[0] - keys.range[0])
        distance = q - torch.arange(len(keys), device=device)
        mask = distance >= 0
        if rule.window is not None:
            mask = mask & (distance < rule.window)
        mask = mask.view(1, 1, 1, *mask.shape)
    if queries.documents is not None and keys.documents is not None:
        same = queries.documents.unsqueeze(-1) == keys.documents.unsqueeze(-2)
        same = same.view(same.size(0), 1, 1, *same.shape[1:])
        mask = same if mask is None else mask & same
    return mask


def _tiles(queries: Block, keys: Block, rule: Rule, heads: int) -> Iterator[tuple[slice, list[slice]]]:
    """Slices of queries, each with the slices of keys that any of them may see. Keys are one run of positions."""
    side = max(16, math.isqrt(TILE_ELEMENTS // max(1, heads)))
    if rule.window is not None:
        side = min(side, max(64, rule.window))  # larger tiles would be mostly unseen
    origin = int(keys.positions[0])
    for start in range(0, len(queries), side):
        rows = slice(start, min(start + side, len(queries)))
        first, last = queries[rows].range
        begin = 0 if rule.window is None else max(0, first - rule.window + 1 - origin)
        end = min(len(keys), last + 1 - origin) if rule.causal else len(keys)
        yield rows, [slice(a, min(a + side, end)) for a in range(begin, end, side)]


def _grouped(query: Tensor, kv_heads: int) -> Tensor:
    """[B, Hq, Q, D] -> [B, Hk, G, Q, D]."""
    batch, heads, length, size = query.shape
    return query.view(batch, kv_heads, heads // kv_heads, length, size)


def _scores(q: Tensor, k: Tensor, visible: Tensor | None, scale: float) -> Tensor:
    """[B, Hk, G, q, s] of a tile, minus infinity where a key is not seen."""
    scores = torch.matmul(q.flatten(2, 3), k.transpose(-1, -2)).view(*q.shape[:4], k.size(-2)).mul_(scale)
    return scores if visible is None else scores.masked_fill_(~visible, -math.inf)


def block_forward(
    query: Tensor, key: Tensor, value: Tensor, queries: Block, keys: Block, rule: Rule, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention to the keys of one block.

    Args:
        query: [B, Hq, Q, D].
        key, value: [B, Hk, S, D] and [B, Hk, S, Dv].
        queries, keys: where they are.
        rule: what is seen.
        scale: of the scores.

    Returns:
        out [B, Hq, Q, Dv] and lse [B, Hq, Q], wide; a query that sees nothing has 0 and minus infinity.
    """
    dtype = wide(query.dtype)
    kv_heads = key.size(1)
    grouped = _grouped(query, kv_heads)
    out = query.new_zeros((*grouped.shape[:4], value.size(-1)), dtype=dtype)
    lse = query.new_full(grouped.shape[:4], -math.inf, dtype=dtype)
    for rows, columns in _tiles(queries, keys, rule, query.size(0) * query.size(1)):
        q = grouped[..., rows, :].to(dtype)
        for part in columns:
            scores = _scores(q, key[:, :, part].to(dtype), _visible(queries[rows], keys[part], rule, q.device), scale)
            tile_lse = scores.logsumexp(-1)
            weights = scores.sub_(finite(tile_lse).unsqueeze(-1)).exp_()
            tile_out = torch.matmul(weights.flatten(2, 3), value[:, :, part].to(dtype)).view(*q.shape[:4], -1)
            merge_(out[..., rows, :], lse[..., rows], tile_out, tile_lse)
    return out.flatten(1, 2), lse.flatten(1, 2)


def finite(lse: Tensor) -> Tensor:
    """Zero where nothing was seen, so that minus infinity minus it stays minus infinity."""
    return torch.where(lse == -math.inf, torch.zeros_like(lse), lse)


def merge_(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> None:
    """Merge another block's result into ``out`` and ``lse``, in place."""
    total = torch.logaddexp(lse, other_lse)
    base = finite(total)
    out.mul_((lse - base).exp().unsqueeze(-1)).add_(other_out * (other_lse - base).exp().unsqueeze(-1))
    lse.copy_(total)


@dataclass(frozen=True, eq=False)
class Upstream:
    """What a backward gets, and what it needs of its forward.

    Attributes:
        grad: [B, Hq, Q, Dv] of the final output.
        out: [B, Hq, Q, Dv] the final output, in the dtype of the query.
        delta: [B, Hq, Q] wide, sum(grad · out).
        lse: [B, Hq, Q] wide, final, the sink included.
    """

    grad: Tensor
    out: Tensor
    delta: Tensor
    lse: Tensor

    def __getitem__(self, rows: slice) -> Upstream:
        return Upstream(*(tensor[:, :, rows] for tensor in (self.grad, self.out, self.delta, self.lse)))


def block_backward(
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
    """Gradients of one block.

    Args:
        upstream: of these queries.
        query, key, value, queries, keys, rule, scale: as in the forward.
        grad_query: [B, Hq, Q, D] wide; added to.

    Returns:
        gradients of key and value, wide.
    """
    dtype = wide(query.dtype)
    kv_heads = key.size(1)
    grouped, grads = _grouped(query, kv_heads), _grouped(upstream.grad, kv_heads)
    deltas, lses = (t.reshape(*grouped.shape[:4]) for t in (upstream.delta, upstream.lse))
    grad_q = _grouped(grad_query, kv_heads)
    grad_key, grad_value = torch.zeros_like(key, dtype=dtype), torch.zeros_like(value, dtype=dtype)
    for rows, columns in _tiles(queries, keys, rule, query.size(0) * query.size(1)):
        q, g = grouped[..., rows, :].to(dtype), grads[..., rows, :].to(dtype)
        base = finite(lses[..., rows]).unsqueeze(-1)
        for part in columns:
            k, v = key[:, :, part].to(dtype), value[:, :, part].to(dtype)
            visible = _visible(queries[rows], keys[part], rule, q.device)
            weights = _scores(q, k, visible, scale).sub_(base).exp_()
            grad_value[:, :, part] += torch.matmul(weights.flatten(2, 3).transpose(-1, -2), g.flatten(2, 3))
            slope = torch.matmul(g.flatten(2, 3), v.transpose(-1, -2)).view_as(weights)
            slope.sub_(deltas[..., rows].unsqueeze(-1)).mul_(weights).mul_(scale)
            grad_q[..., rows, :] += torch.matmul(slope.flatten(2, 3), k).view_as(q)
            grad_key[:, :, part] += torch.matmul(slope.flatten(2, 3).transpose(-1, -2), q.flatten(2, 3))
    return grad_key, grad_value
