"""Evaluation metrics that are exact over ranks and batches with different numbers of valid tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric


class MeanTokenLoss(Metric):
    """Summed loss over all valid tokens of all batches and ranks, divided by their number.

    States are float64 and int64 whatever dtype the model around it is cast to; they move to the device of what they
    are updated with. With no valid token at all the result is NaN.
    """

    is_differentiable = False
    higher_is_better = False
    full_state_update = False
    loss_sum: Tensor
    token_count: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("loss_sum", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("token_count", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, loss_sum: Tensor, token_count: Tensor) -> None:
        """Add one batch: its summed loss and its number of valid tokens (scalars, this rank's)."""
        if self.loss_sum.device != loss_sum.device:
            self.to(loss_sum.device)
        self.loss_sum += loss_sum.detach().double()
        self.token_count += token_count

    def compute(self) -> Tensor:
        """float64 scalar: the mean loss of a token."""
        return self.loss_sum / self.token_count

    def _apply(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> MeanTokenLoss:
        kept = {name: (getattr(self, name), self._defaults[name]) for name in ("loss_sum", "token_count")}
        super()._apply(fn, *args, **kwargs)
        for name, (state, default) in kept.items():  # a device may change, the dtype may not
            device = getattr(self, name).device
            setattr(self, name, state.to(device))
            self._defaults[name] = default.to(device)  # type: ignore[union-attr]
        return self


class TokenPerplexity(MeanTokenLoss):
    """exp of the mean cross-entropy of a token."""

    def compute(self) -> Tensor:
        """float64 scalar."""
        return torch.exp(super().compute())
