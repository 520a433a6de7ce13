"""AdamW on the pieces of one bucket: torch's fused kernel, on lists of views, one list for each set of settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_longmoe import _compat
from lightning_longmoe.optimizer.buckets import Bucket, Piece

SETTINGS = ("lr", "betas", "eps", "weight_decay", "maximize")


@dataclass(frozen=True)
class Gradients:
    """What is done to gradients on their way into the update, without changing them unless they are float32 or wider.

    Attributes:
        scale: a scalar on the device that multiplies them; None: nothing.
        limit: the largest absolute value of an element after that; None: no limit.
    """

    scale: Tensor | None = None
    limit: float | None = None

    def apply_(self, gradients: list[Tensor]) -> None:
        if self.scale is not None:
            torch._foreach_mul_(gradients, self.scale.to(gradients[0].device))
        if self.limit is not None:
            torch._foreach_clamp_min_(gradients, -self.limit)
            torch._foreach_clamp_max_(gradients, self.limit)


@dataclass(slots=True)
class Target:
    """One parameter of a bucket's store, for one step.

    Attributes:
        weight: flat, on the device, the parameter's own memory.
        gradient: flat, in the order of ``weight``.
        settings: of its group, as `SETTINGS`; the same object for all parameters of a group.
        step: this step's number, from 1, as a float32 scalar on the device.
    """

    weight: Tensor
    gradient: Tensor
    settings: tuple[Any, ...]
    step: Tensor


@dataclass
class Memory:
    """A bucket's state where it is updated, each [bucket.numel]: in a slot on the device, or the slab itself.

    Attributes:
        exp_avg, exp_avg_sq: the moments.
        master: weights of higher precision than the parameter's; None where the parameter is the master.
    """

    exp_avg: Tensor
    exp_avg_sq: Tensor
    master: Tensor | None


def update(
    bucket: Bucket,
    memory: Memory,
    targets: dict[int, Target],
    gradients: Gradients,
    wide: Callable[[int], Tensor],
) -> None:
    """One AdamW step of all pieces whose parameter has a gradient.

    Args:
        bucket: the pieces.
        memory: their state; changed in place.
        targets: by index of the parameter; those that are missing are left alone.
        gradients: scale and limit.
        wide: uninitialised memory of n elements in the state's dtype, for gradients of lower precision.
    """
    by_settings: dict[int, list[Piece]] = {}
    for piece in bucket.pieces:
        if piece.index in targets:
            by_settings.setdefault(id(targets[piece.index].settings), []).append(piece)
    for pieces in by_settings.values():
        _update_alike(pieces, bucket.start, memory, targets, gradients, wide)


def _update_alike(
    pieces: list[Piece],
    origin: int,
    memory: Memory,
    targets: dict[int, Target],
    gradients: Gradients,
    wide: Callable[[int], Tensor],
) -> None:
    """As `update`, for pieces of one parameter group; ``origin`` is where the bucket starts in the slab."""
    of_weights = [_part(targets[piece.index].weight, piece) for piece in pieces]
    of_gradients = [_part(targets[piece.index].gradient, piece) for piece in pieces]
    spans = [slice(piece.offset - origin, piece.offset - origin + piece.numel) for piece in pieces]
    masters = of_weights
    if memory.master is not None:
        masters = [memory.master[span] for span in spans]
        narrow, of_gradients = of_gradients, list(wide(sum(p.numel for p in pieces)).split([p.numel for p in pieces]))
        torch._foreach_copy_(of_gradients, narrow)
    gradients.apply_(of_gradients)
    _compat.fused_adamw(
        masters,
        of_gradients,
        [memory.exp_avg[span] for span in spans],
        [memory.exp_avg_sq[span] for span in spans],
        [targets[piece.index].step for piece in pieces],
        **dict(zip(SETTINGS, targets[pieces[0].index].settings, strict=True)),
    )
    if memory.master is not None:
        torch._foreach_copy_(of_weights, masters)


def _part(flat: Tensor, piece: Piece) -> Tensor:
    return flat if piece.numel == flat.numel() else flat[piece.start : piece.stop]


def round_stochastically(values: Tensor, out: Tensor) -> None:
    """``out`` (bfloat16) = ``values`` (float32), up or down with the probability that keeps the mean. Values change."""
    bits = values.view(torch.int32)
    bits.add_(torch.randint_like(bits, 1 << 16))
    bits.bitwise_and_(-(1 << 16))
    out.copy_(values)
