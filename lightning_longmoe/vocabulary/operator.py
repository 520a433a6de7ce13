"""Ring-DTP: cross-entropy, log-probabilities and entropy over a vocabulary that is spread over the ranks of a group.

DTP, data-tensor parallelism: the vocabulary is sharded as in tensor parallelism, while every rank keeps tokens of its
own as in data parallelism. No rank ever holds the projection [V, H], its gradient, or logits [N, V] or [N, V / P].
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_longmoe.config import RingDTP
from lightning_longmoe.vocabulary.autograd import group_mean, statistics
from lightning_longmoe.vocabulary.call import Arguments, prepare
from lightning_longmoe.vocabulary.tiles import Logits

Reduction = Literal["mean", "sum", "none"]


def ring_cross_entropy(
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
    """Cross-entropy of this rank's tokens over the vocabulary of all ranks (arXiv 2609.14306, Eq. 2-3, Algorithm 2).

    With softcap `cap`, z-loss λ and label smoothing ε

        u = logit_scale · (x·Wᵀ + bias),  y = cap·tanh(u / cap) or u
        loss = (1-ε)(lse - y_t) + ε(lse - mean(y)) + λ·lse²        lse = log Σ exp(y)

    Every rank of the group must call it, with as many tokens as it has, and run the backward if any rank does. The
    ranks exchange a few numbers first, which waits for the device once. The backward computes logits again tile by
    tile.

    Args:
        hidden: [N, H] this rank's tokens, bfloat16, float16, float32 or float64; N may be 0 and differ between ranks.
        weight_shard: this rank's rows [r·Vp, (r+1)·Vp) of the projection, Vp = ceil(V / P) for rank r of P; the last
            shards may be padded to Vp rows, or short, or empty. Best in the dtype of ``hidden``, in which products are
            computed: else a converted copy of the shard is made for each pass.
        targets: [N] int64, this rank's, global ids or ``ignore_index``.
        group: the P ranks, in the order of their shards; best one that nothing else uses. None: one process.
        vocab_size: V.
        config: what travels, and the sizes of tiles.
        bias_shard: [Vp], or as short as the weight may be; None: no bias.
        ignore_index: tokens with this target count 0.
        logit_softcap: above 0, or None.
        logit_scale: a finite number.
        z_loss: at least 0.
        label_smoothing: in [0, 1).
        reduction: "mean" over the valid targets of the *group* (0 where there are none), the same scalar on every rank,
            whose backward on all ranks gives each its own part of the gradient of that one scalar; "sum" of this rank's
            tokens; "none": one loss a token [N].

    Returns:
        float32 (float64 for a float64 hidden). In the backward a rank's weight and bias gradients are sums over the
        tokens of all ranks, accumulated in that dtype; rows of padding get 0.

    Raises:
        ValueError: shapes, dtypes or options do not fit, or differ between ranks; ids are outside the vocabulary; no
            group where several processes run. What one rank finds, all ranks raise.
        RuntimeError: a gradient is to be differentiated again.
    """
    arguments = Arguments(hidden, weight_shard, bias_shard, targets, ignore_index)
    logits = Logits(vocab_size=vocab_size, softcap=logit_softcap, scale=logit_scale, mean=label_smoothing != 0)
    loss_options = {"z_loss": z_loss, "label_smoothing": label_smoothing, "reduction": reduction}
    call = prepare("ring_cross_entropy", group, arguments, logits, config, loss_options)
    lse, target, mean, _ = statistics(call, arguments)
    loss = lse - target
    if mean is not None:
        loss = (1 - label_smoothing) * loss + label_smoothing * (lse - mean)
    if z_loss:
        loss = loss + z_loss * lse.square()
    loss = loss.masked_fill(targets == ignore_index, 0)
    if reduction == "none":
        return loss
    total = loss.sum(dtype=torch.float64)
    return (total if reduction == "sum" else group_mean(total, call)).to(loss.dtype)


class LogProbs(NamedTuple):
    """What `ring_log_probs` returns.

    Attributes:
        log_probs: [N] of each target, 0 where it is ignored.
        entropy: [N] of each token's distribution, 0 where its target is ignored; None if not asked for.
    """

    log_probs: Tensor
    entropy: Tensor | None


def ring_log_probs(
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
    """Log-probability of each target, and on request the entropy of each token's distribution, in the same pass.

    Both are differentiable. For evaluation and reinforcement learning; a temperature T is ``logit_scale=1/T``.
    Arguments, collectives and errors are those of `ring_cross_entropy`.

    Returns:
        float32 (float64 for a float64 hidden), of this rank's tokens.
    """
    arguments = Arguments(hidden, weight_shard, bias_shard, targets, ignore_index)
    logits = Logits(vocab_size=vocab_size, softcap=logit_softcap, scale=logit_scale, entropy=entropy)
    call = prepare("ring_log_probs", group, arguments, logits, config, {})
    lse, target, _, of_distribution = statistics(call, arguments)
    ignored = targets == ignore_index
    log_probs = (target - lse).masked_fill(ignored, 0)
    return LogProbs(log_probs, None if of_distribution is None else of_distribution.masked_fill(ignored, 0))
