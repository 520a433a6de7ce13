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

from lightning_longmoe._compat import inside_backward


@dataclass(frozen=True)
class WindowScale:
    """One accumulation window: the micro-batches of one optimizer step.

    Attributes:
        accumulate: the number A that Lightning divides every micro-batch's loss by (also in a short, last window).
        valid_tokens: valid targets of the whole window, over all ranks.
    """

    accumulate: int
    valid_tokens: int


class HostCount:
    """A scalar on its way to the host; on a GPU nobody waits for it until it is read, and then for nothing after it."""

    def __init__(self, value: Tensor) -> None:
        self._value = value.detach().clone()
        self._event: torch.cuda.Event | None = None
        if value.is_cuda:
            self._value = torch.empty((), dtype=value.dtype, pin_memory=True)
            self._value.copy_(value.detach(), non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def read(self) -> int:
        if self._event is not None:
            self._event.synchronize()
        return int(self._value)


class TokenReduction:
    """Sums over all data x context ranks, and the gradient scale that makes their average the gradient of the mean.

    A window's valid targets are counted before the module sees its batches, so `check_window` compares what was counted
    with what the heads then got. A *loss* of a window is a head's k-th call in each of the micro-batches; each loss has
    the one count of its window as its divisor, so each must hold exactly that many targets.

    Args:
        group: process group of the ranks that share the loss. None: this process alone.
        world_size: number of those ranks; gradients are averaged over them.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, world_size: int = 1) -> None:
        self.group = group
        self.world_size = world_size
        self.window: WindowScale | None = None
        self._heads: list[int] = []  # of the micro-batch in training: which head each of its losses came from
        self._counts: list[HostCount] = []
        self._losses: dict[tuple[int, int], list[HostCount]] = {}  # by head and number of the call

    def __deepcopy__(self, memo: dict[int, Any]) -> TokenReduction:
        return self  # a process group cannot be copied, and a copied model uses the same one

    def sum(self, tensor: Tensor) -> Tensor:
        """A copy of ``tensor`` (any shape and dtype, per rank) summed over the ranks; without autograd."""
        total = tensor.detach().clone()
        if self.group is not None and self.world_size > 1:
            dist.all_reduce(total, group=self.group)
        return total

    def begin_microbatch(self, window: WindowScale | None) -> None:
        """The next micro-batch is trained, of this window; the same object for all micro-batches of a window."""
        if window is not self.window:
            self._losses.clear()
        self.window = window
        self._heads.clear()
        self._counts.clear()

    def note_loss(self, head: object, valid_tokens: Tensor) -> None:
        """A head took a loss that a backward may follow; a recomputation takes none.

        Args:
            head: which one.
            valid_tokens: scalar, global count of this loss.
        """
        if self.window is not None and not inside_backward():
            self._heads.append(id(head))
            self._counts.append(HostCount(valid_tokens))

    def end_microbatch(self) -> None:
        """The micro-batch had its backward; without one (a step that returned None) its losses count for nothing."""
        for position, (head, count) in enumerate(zip(self._heads, self._counts, strict=True)):
            self._losses.setdefault((head, self._heads[:position].count(head)), []).append(count)
        self._heads.clear()
        self._counts.clear()

    def check_window(self) -> None:
        """Before the optimizer steps: every loss of the window held the targets that were counted ahead.

        No collective: all counts are global, so that all ranks raise together.

        Raises:
            ValueError: a loss held more or fewer, and its gradients are scaled wrongly.
        """
        if self.window is None:
            return
        counted = self.window.valid_tokens
        losses = [sum(count.read() for count in counts) for counts in self._losses.values()]
        wrong = [(number, actual) for number, actual in enumerate(losses, 1) if actual != counted]
        if not wrong:
            return
        number, actual = wrong[0]
        which = f" in loss {number} of the {len(losses)} of each micro-batch" if len(losses) > 1 else ""
        raise ValueError(
            f"This accumulation window of up to {self.window.accumulate} micro-batches has {counted} valid labels, as"
            f" its batches show them ahead, and CausalLMHead got {actual} valid targets{which}: their gradients would"
            f" be {actual / max(counted, 1):.3g} times as large as those of the mean. With"
            " BatchConfig(normalize='window') every loss of a head must be taken of exactly the labels that are"
            " counted. If training_step masks further targets, skips batches, or gives a head only some of them, give"
            " the LightningModule a method `count_valid_targets(batch) -> int` that counts what the head will get, or"
            " set BatchConfig(normalize='microbatch'), Lightning's mean of the micro-batches' means (the way for"
            " several losses with different targets), or accumulate_grad_batches=1."
        )

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
