"""The plain reference of `context_attention`: one process, whole sequences, all scores at once."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def reference_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool = True,
    window: int | None = None,
    sinks: Tensor | None = None,
    document_ids: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """As `context_attention`, for whole sequences in their own order: [B, Hq, S, D] -> [B, Hq, S, Dv]."""
    length, groups = query.size(2), query.size(1) // key.size(1)
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = torch.matmul(query, key.transpose(-1, -2)) * (query.size(-1) ** -0.5 if scale is None else scale)
    positions = torch.arange(length, device=query.device)
    distance = positions.unsqueeze(1) - positions.unsqueeze(0)
    visible = torch.ones_like(distance, dtype=torch.bool)
    if causal or window is not None:
        visible = visible & (distance >= 0)
    if window is not None:
        visible = visible & (distance < window)
    if document_ids is not None:
        visible = visible & (document_ids.unsqueeze(-1) == document_ids.unsqueeze(-2)).unsqueeze(1)
    scores = scores.masked_fill(~visible, -math.inf)
    if sinks is not None:
        column = sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1).to(scores.dtype)
        return torch.matmul(torch.cat([scores, column], -1).softmax(-1)[..., :-1], value)
    return torch.matmul(scores.softmax(-1), value)
