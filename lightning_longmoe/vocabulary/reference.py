"""The reference of the ring: the whole weight gathered on every rank, all logits of a rank's tokens at once.

Same signatures, same meaning, plain torch throughout; differentiable any number of times in one process.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lightning_longmoe.config import RingDTP
from lightning_longmoe.kernels.expert_grad import wide_dtype
from lightning_longmoe.vocabulary.agreement import ring_of
from lightning_longmoe.vocabulary.gather import gather_rows
from lightning_longmoe.vocabulary.operator import LogProbs, Reduction


def reference_ring_cross_entropy(
    hidden: Tensor,
    weight_shard: Tensor,
    targets: Tensor,
    *,
    group: dist.ProcessGroup | None,
    vocab_size: int,
    config: RingDTP = RingDTP(),
    bias_shard: Tensor | None = None,
    ignore_index: int = -100,
    logit_softcap: float | None = None,
    logit_scale: float = 1.0,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
) -> Tensor:
    """`ring_cross_entropy` from torch's own functions; ``config`` has no meaning here."""
    y = _all_logits(hidden, weight_shard, bias_shard, group, vocab_size, logit_softcap, logit_scale)
    valid = targets != ignore_index
    loss = F.cross_entropy(y, targets, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction="none")
    loss = loss + z_loss * torch.logsumexp(y, -1).square() * valid
    if reduction == "none":
        return loss
    if reduction == "sum":
        return loss.sum()
    return _AllSum.apply(loss.sum(), group) / _AllSum.apply(valid.sum(), group).clamp(min=1)


def reference_ring_log_probs(
    hidden: Tensor,
    weight_shard: Tensor,
    targets: Tensor,
    *,
    group: dist.ProcessGroup | None,
    vocab_size: int,
    config: RingDTP = RingDTP(),
    bias_shard: Tensor | None = None,
    ignore_index: int = -100,
    logit_softcap: float | None = None,
    logit_scale: float = 1.0,
    entropy: bool = False,
) -> LogProbs:
    """`ring_log_probs` from torch's own functions; ``config`` has no meaning here."""
    y = _all_logits(hidden, weight_shard, bias_shard, group, vocab_size, logit_softcap, logit_scale)
    valid = targets != ignore_index
    log_p = torch.log_softmax(y, -1)
    chosen = log_p.gather(1, targets.where(valid, 0).unsqueeze(1)).squeeze(1).masked_fill(~valid, 0)
    if not entropy:
        return LogProbs(chosen, None)
    return LogProbs(chosen, -(log_p.exp() * log_p).sum(-1).masked_fill(~valid, 0))


def _all_logits(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    group: dist.ProcessGroup | None,
    vocab_size: int,
    softcap: float | None,
    scale: float,
) -> Tensor:
    """[N, V] wide."""
    ring_of(group, "reference")
    full_bias = None if bias is None else gather_rows(bias, vocab_size, group)
    u = F.linear(hidden, gather_rows(weight, vocab_size, group), full_bias).to(wide_dtype(hidden.dtype)) * scale
    return u if softcap is None else softcap * torch.tanh(u / softcap)


class _AllSum(torch.autograd.Function):
    """The sum over the group; in the backward each rank's own part of it."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: dist.ProcessGroup | None) -> Tensor:  # type: ignore[override]
        total = value.clone()
        if group is not None:
            dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None
