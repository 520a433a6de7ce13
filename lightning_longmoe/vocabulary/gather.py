"""The whole weight from its shards, for the few calls that need all of it: true logits, and the reference."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_longmoe.kernels.expert_grad import wide_dtype
from lightning_longmoe.vocabulary.agreement import all_gather
from lightning_longmoe.vocabulary.spans import VocabularySplit

_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)  # its name from torch 2.13 on


def gather_rows(shard: Tensor, vocab_size: int, group: dist.ProcessGroup | None) -> Tensor:
    """All rows of a tensor whose rows are spread over a group as the vocabulary is. All ranks must call it.

    Args:
        shard: [Vp, ...] this rank's rows, padded, short or empty.
        vocab_size: V.
        group: the ranks in the order of their shards; None: one process.

    Returns:
        [V, ...] on every rank. In the backward, which all ranks must run, a rank gets the sum of the gradients that the
        ranks have for its rows.
    """
    if group is None or dist.get_world_size(group) == 1:
        return shard[:vocab_size]
    return _GatherRows.apply(shard, VocabularySplit(vocab_size, dist.get_world_size(group)), group)


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shard: Tensor, split: VocabularySplit, group: dist.ProcessGroup) -> Tensor:  # type: ignore[override]
        ctx.split, ctx.group, ctx.rows = split, group, shard.size(0)
        padded = shard.contiguous()
        if shard.size(0) < split.padded_rows:
            padded = shard.new_zeros(split.padded_rows, *shard.shape[1:])
            padded[: shard.size(0)] = shard
        full = shard.new_empty(split.padded_rows * split.ranks, *shard.shape[1:])
        all_gather(full, padded, group=group)
        return full[: split.vocab_size]  # padding rows are all at the end

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        split: VocabularySplit = ctx.split
        wide = wide_dtype(grad.dtype)
        padded = grad.new_zeros((split.padded_rows * split.ranks, *grad.shape[1:]), dtype=wide)
        padded[: split.vocab_size] = grad
        own = grad.new_empty((split.padded_rows, *grad.shape[1:]), dtype=wide)
        _reduce_scatter(own, padded, group=ctx.group)
        return own[: ctx.rows].to(grad.dtype), None, None
