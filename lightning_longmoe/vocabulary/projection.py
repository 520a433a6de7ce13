"""What a strategy plugs into a head and an embedding, so that they work on vocabulary shards.

A head calls ``projection(hidden, weight, targets, bias=..., options=...)`` for its summed loss: `RingProjection`. An
``nn.Embedding`` gets another ``forward``: `take_over_embedding`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_longmoe.config import RingDTP
from lightning_longmoe.kernels.cross_entropy import CrossEntropyOptions
from lightning_longmoe.runtime.owned import owned_part
from lightning_longmoe.vocabulary.embedding import vocabulary_embedding
from lightning_longmoe.vocabulary.gather import gather_rows
from lightning_longmoe.vocabulary.operator import ring_cross_entropy


class RingProjection:
    """`ring_cross_entropy` as a head calls it.

    Args:
        group: the ranks that share the vocabulary, in the order of their shards.
        vocab_size: V.
        config: of the ring.
    """

    def __init__(self, group: dist.ProcessGroup | None, vocab_size: int, config: RingDTP = RingDTP()) -> None:
        self.group, self.vocab_size, self.config = group, vocab_size, config

    def __deepcopy__(self, memo: dict[int, Any]) -> RingProjection:
        return self  # a process group cannot be copied, and a copied model uses the same one

    def __call__(
        self, hidden: Tensor, weight: Tensor, targets: Tensor, *, bias: Tensor | None, options: CrossEntropyOptions
    ) -> Tensor:
        """The summed loss of this rank's tokens. All ranks of the group must call it, and its backward.

        Args:
            hidden: [N, H].
            weight: [Vp, H] this rank's rows, in any floating-point dtype.
            targets: [N] int64.
            bias: [Vp] this rank's rows, or None.
            options: of the loss.

        Returns:
            float64 scalar.
        """
        losses = ring_cross_entropy(
            hidden,
            weight,
            targets,
            group=self.group,
            vocab_size=self.vocab_size,
            config=self.config,
            bias_shard=bias,
            ignore_index=options.ignore_index,
            logit_softcap=options.logit_softcap,
            logit_scale=options.logit_scale,
            z_loss=options.z_loss,
            label_smoothing=options.label_smoothing,
            reduction="none",
        )
        return losses.sum(dtype=torch.float64)

    def gather(self, rows: Tensor) -> Tensor:
        """[V, ...] from this rank's rows [Vp, ...], differentiable. All ranks of the group must call it."""
        return gather_rows(rows, self.vocab_size, self.group)


def why_not_taken_over(embedding: nn.Embedding) -> str | None:
    """What an embedding uses that a lookup over ranks does not do; None if nothing."""
    if embedding.max_norm is not None:
        return "max_norm renormalises rows in place"
    if embedding.sparse:
        return "its gradients are sparse"
    if embedding.scale_grad_by_freq:
        return "scale_grad_by_freq counts ids"
    return None


def take_over_embedding(
    embedding: nn.Embedding,
    group: dist.ProcessGroup | None,
    *,
    gradient_scale: float = 1.0,
    dtype: torch.dtype | None = None,
) -> None:
    """Let an embedding look its rows up on the ranks that own them.

    Its weight must be, or become before the next forward, this rank's rows of the vocabulary or a DTensor of them.

    Args:
        embedding: of ``num_embeddings`` = V rows.
        group: the ranks that share the vocabulary, in the order of their shards.
        gradient_scale: what the weight's gradient is multiplied by.
        dtype: of the rows that come back. None: that of the weight.

    Raises:
        ValueError: the embedding has an option that would be ignored.
    """
    reason = why_not_taken_over(embedding)
    if reason is not None:
        raise ValueError(f"An nn.Embedding cannot look its rows up on other ranks: {reason}. Leave that option out.")
    embedding.forward = _Lookup(embedding, group, gradient_scale, dtype)  # type: ignore[method-assign, assignment]


def is_taken_over(embedding: nn.Embedding) -> bool:
    """Whether `take_over_embedding` was called with it."""
    return isinstance(embedding.forward, _Lookup)


class _Lookup:
    """The forward of an embedding that was taken over."""

    def __init__(
        self, embedding: nn.Embedding, group: dist.ProcessGroup | None, scale: float, dtype: torch.dtype | None
    ) -> None:
        self.embedding, self.group, self.scale, self.dtype = embedding, group, scale, dtype

    def __deepcopy__(self, memo: dict[int, Any]) -> _Lookup:
        # the copied embedding is in the memo: this is one of its attributes
        return _Lookup(memo.get(id(self.embedding), self.embedding), self.group, self.scale, self.dtype)

    def __call__(self, input: Tensor) -> Tensor:
        rows = vocabulary_embedding(
            input,
            owned_part(self.embedding.weight, self.scale),
            group=self.group,
            vocab_size=self.embedding.num_embeddings,
            padding_idx=self.embedding.padding_idx,
        )
        return rows if self.dtype is None else rows.to(self.dtype)
