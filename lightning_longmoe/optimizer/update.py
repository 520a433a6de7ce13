"""AdamW on the pieces of one bucket: torch's fused kernel, on lists of views, one list for each set of settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_longmoe import _compat
from lightning_longmoe.optimizer.buckets import Bucket

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


@dataclass
class Target:
    """One parameter of a bucket's store, for one step.

    Attributes:
        weight: flat, on the device, the parameter's own memory.
        gradient: flat, in the order of ``weight``.
        settings: of its group, as `SETTINGS`.
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
    pieces = [piece for piece in bucket.pieces if piece.index in targets]
    if not pieces:
        return
    of_weights = [targets[piece.index].weight[piece.start : piece.stop] for piece in pieces]
    of_gradients = [targets[piece.index].gradient[piece.start : piece.stop] for piece in pieces]
    spans = [(piece.offset - bucket.start, piece.offset - bucket.start + piece.numel) for piece in pieces]
    masters = of_weights
    if memory.master is not None:
        masters = [memory.master[a:b] for a, b in spans]
        staged = wide(bucket.numel)
        narrow, of_gradients = of_gradients, [staged[a:b] for a, b in spans]
        torch._foreach_copy_(of_gradients, narrow)
    gradients.apply_(of_gradients)
    for settings, chosen in _alike([targets[piece.index].settings for piece in pieces]):
        _compat.fused_adamw(
            [masters[i] for i in chosen],
            [of_gradients[i] for i in chosen],
            [memory.exp_avg[slice(*spans[i])] for i in chosen],
            [memory.exp_avg_sq[slice(*spans[i])] for i in chosen],
            [targets[pieces[i].index].step for i in chosen],
            **settings,
        )
    if memory.master is not None:
        torch._foreach_copy_(of_weights, masters)


def _alike(settings: Sequence[tuple[Any, ...]]) -> list[tuple[dict[str, Any], list[int]]]:
    """Positions of equal settings, in the order in which each first appears. Tensors are compared by identity."""
    groups: dict[Any, tuple[dict[str, Any], list[int]]] = {}
    for index, values in enumerate(settings):
        key = tuple(id(v) if isinstance(v, Tensor) else v for v in values)
        groups.setdefault(key, (dict(zip(SETTINGS, values, strict=True)), []))[1].append(index)
    return list(groups.values())


def round_stochastically(values: Tensor, out: Tensor) -> None:
    """``out`` (bfloat16) = ``values`` (float32), up or down with the probability that keeps the mean. Values change."""
    bits = values.view(torch.int32)
    bits.add_(torch.randint_like(bits, 1 << 16))
    bits.bitwise_and_(-(1 << 16))
    out.copy_(values)
