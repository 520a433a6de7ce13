"""Sums over the ranks that share one loss.

Every rank reads other tokens (data ranks) or another part of the same sequences (context ranks); the loss is the mean
over the valid tokens of all of them. `TokenReduction` is what a layer needs to know of that: who the ranks are, and how
large the current accumulation window is. Modules carry ``reduction = None`` until a strategy sets it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class WindowScale:
    """One accumulation window: the micro-batches of one optimizer step.

    Attributes:
        accumulate: the number A that Lightning divides every micro-batch's loss by (also in a short, last window).
        valid_tokens: valid targets of the whole window, over all ranks.
    """

    accumulate: int
    valid_tokens: int


class TokenReduction:
    """Sums over all data x context ranks, and the gradient scale that makes their average the gradient of the mean.

    Args:
        group: process group of the ranks that share the loss. None: this process alone.
        world_size: number of those ranks; gradients are averaged over them.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, world_size: int = 1) -> None:
        self.group = group
        self.world_size = world_size
        self.window: WindowScale | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> TokenReduction:
        return self  # a process group cannot be copied, and a copied model uses the same one

    def sum(self, tensor: Tensor) -> Tensor:
        """A copy of ``tensor`` (any shape and dtype, per rank) summed over the ranks; without autograd."""
        total = tensor.detach().clone()
        if self.group is not None and self.world_size > 1:
            dist.all_reduce(total, group=self.group)
        return total

    def gradient_scale(self, valid_tokens: Tensor) -> Tensor:
        """What a rank's summed loss is multiplied by in the backward.

        With W ranks whose gradients are averaged and n valid targets in this micro-batch (global), W / n. With a window
        of N valid targets in micro-batches whose losses Lightning divides by A, W·A / N.

        Args:
            valid_tokens: scalar, global count of this micro-batch, on the device of the loss.

        Returns:
            float64 scalar on the same device; 0 where nothing is valid.
        """
        count = valid_tokens.double()
        if self.window is None:
            scale = self.world_size / count.clamp(min=1)
            return torch.where(count > 0, scale, torch.zeros_like(scale))
        if self.window.valid_tokens == 0:
            return torch.zeros_like(count)
        return torch.full_like(count, self.world_size * self.window.accumulate / self.window.valid_tokens)
