"""The ring as autograd sees it: four numbers of each token's logits, which can be differentiated once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_longmoe.runtime.ledger import Arena
from lightning_longmoe.runtime.once import only_once
from lightning_longmoe.vocabulary.call import Arguments, Call
from lightning_longmoe.vocabulary.passes import (
    GRADIENTS,
    INPUTS,
    SHARD,
    SHARD_COPY,
    STATES,
    BackwardPass,
    ForwardPass,
    Inputs,
    Problem,
    Wanted,
)
from lightning_longmoe.vocabulary.ring import Ring
from lightning_longmoe.vocabulary.tiles import G_LSE, G_TARGET, LSE, TARGET, Logits, M, Z

Statistics = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
"""lse, logit of the target, mean logit, entropy: each [N] wide."""


def statistics(call: Call, arguments: Arguments) -> Statistics:
    """Everything that a loss may want of the logits, differentiable once. All ranks must call it, and its backward."""
    wanted = call.wanted
    anchor = None
    if torch.is_grad_enabled() and (wanted.x or wanted.weight or wanted.bias):
        # a rank with nothing of its own to differentiate still has to take part in the backward
        anchor = torch.zeros((), device=arguments.hidden.device, requires_grad=True)
    bias = None if arguments.bias is None else arguments.bias.contiguous()
    return _RingStatistics.apply(
        arguments.hidden.contiguous(), arguments.weight.contiguous(), bias, anchor, arguments.targets.contiguous(), call
    )


class _RingStatistics(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        anchor: Tensor | None,
        targets: Tensor,
        call: Call,
    ) -> Statistics:
        call.record.modes.append(call.problem.mode)
        ring = Ring(call.ring.group, call.ring.size, call.ring.rank, call.record.forward)
        inputs = Inputs(hidden, weight, bias, targets)
        with torch.autocast(hidden.device.type, enabled=False):
            statistics, ybar = run_forward(call.problem, inputs, ring, Arena(hidden.device, call.record.ledger))
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, bias, targets, statistics[0], ybar)
        return statistics

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden, weight, bias, targets, lse, ybar = ctx.saved_tensors
        call: Call = ctx.call
        ring = Ring(call.ring.group, call.ring.size, call.ring.rank, call.record.backward)
        saved = Saved(Inputs(hidden, weight, bias, targets), lse, ybar)
        with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
            arena = Arena(hidden.device, call.record.ledger)
            grads = run_backward(call.problem, saved, ring, arena, incoming, call.wanted)
        grads = [grad if need else None for grad, need in zip(grads, ctx.needs_input_grad, strict=False)]
        grads = only_once(grads, (hidden, weight, *incoming), "ring_cross_entropy and ring_log_probs")
        return (*grads, None, None, None)


@dataclass(frozen=True, eq=False)
class Saved:
    """What a backward needs of its forward.

    Attributes:
        inputs: of the forward.
        lse: [N] wide.
        ybar: [N] wide, where the entropy was wanted.
    """

    inputs: Inputs
    lse: Tensor
    ybar: Tensor | None


def run_forward(problem: Problem, given: Inputs, ring: Ring, arena: Arena) -> tuple[Statistics, Tensor | None]:
    """The statistics of this rank's tokens, and ybar [N] where the entropy is wanted."""
    inputs = _opened(given, arena)
    states = ForwardPass(problem, inputs, ring, arena).run()
    logits, z = problem.logits, states[:, Z]
    lse = arena.adopt(STATES, z.log().add_(states[:, M]))
    target = arena.adopt(STATES, states[:, TARGET].clone())
    mean = entropy = ybar = None
    if logits.mean:
        mean = arena.adopt(STATES, states[:, TARGET + 1] / logits.vocab_size)
    if logits.entropy:
        ybar = arena.adopt(STATES, states[:, logits.entropy_column] / z)
        entropy = arena.adopt(STATES, (lse - ybar).clamp_(min=0.0))  # the difference of two large numbers
    arena.close()
    return (lse, target, mean, entropy), ybar


def run_backward(
    problem: Problem, saved: Saved, ring: Ring, arena: Arena, incoming: tuple[Tensor | None, ...], wanted: Wanted
) -> list[Tensor | None]:
    """Gradients of x, the weight and the bias, where they are wanted, in the shapes and dtypes of what was given.

    Args:
        incoming: gradients of lse, target logit, mean logit and entropy, each [N] wide; None: 0.
        wanted: the same on all ranks.
    """
    given = saved.inputs
    inputs = _opened(given, arena)
    arena.hold(STATES, saved.lse, saved.ybar, *incoming)
    slopes = _slopes(problem.logits, arena, saved, incoming)
    wide = list(BackwardPass(problem, inputs, ring, arena).run(slopes, wanted))
    arena.release(slopes)
    for own, callers in ((inputs.weight, given.weight), (inputs.bias, given.bias)):
        arena.release(own if own is not callers else None)
    del slopes, inputs
    narrow = [_narrowed(arena, wide, i, like) for i, like in enumerate((given.x, given.weight, given.bias))]
    arena.close()
    return narrow


def _opened(given: Inputs, arena: Arena) -> Inputs:
    """Book what the caller holds, and bring the shard to the dtype of x."""
    arena.hold(INPUTS, given.x, given.targets)
    arena.hold(SHARD, given.weight, given.bias)

    def converted(tensor: Tensor) -> Tensor:
        return tensor if tensor.dtype == given.x.dtype else arena.adopt(SHARD_COPY, tensor.to(given.x.dtype))

    bias = None if given.bias is None else converted(given.bias)
    return Inputs(given.x, converted(given.weight), bias, given.targets)


def _slopes(logits: Logits, arena: Arena, saved: Saved, incoming: tuple[Tensor | None, ...]) -> Tensor:
    """[N, j] lse and the incoming gradients, times logit_scale, as the tiles want them."""
    g_lse, g_target, g_mean, g_entropy = incoming
    slopes = arena.zeros(STATES, (saved.lse.size(0), logits.slope_columns), saved.lse.dtype)
    slopes[:, LSE] = saved.lse
    columns = {G_LSE: g_lse, G_TARGET: g_target}
    if logits.mean:
        columns[G_TARGET + 1] = None if g_mean is None else g_mean / logits.vocab_size
    if logits.entropy:
        assert saved.ybar is not None
        columns[logits.entropy_column] = g_entropy
        slopes[:, logits.entropy_column + 1] = saved.ybar
    for column, grad in columns.items():
        if grad is not None:
            torch.mul(grad, logits.scale, out=slopes[:, column])
    return slopes


def _narrowed(arena: Arena, grads: list[Tensor | None], index: int, like: Tensor | None) -> Tensor | None:
    """A gradient in the dtype of ``like`` and with as many rows; taken out of ``grads``, so that it can be freed."""
    grad, grads[index] = grads[index], None
    if grad is None or like is None:
        return None
    rows = grad[: like.size(0)]
    if grad.dtype == like.dtype:
        return rows
    narrow = arena.adopt(GRADIENTS, rows.to(like.dtype))
    arena.release(grad)
    return narrow


def group_mean(total: Tensor, call: Call) -> Tensor:
    """The sum of ``total`` over the ranks divided by all their valid tokens, or 0; the same scalar on every rank."""
    return _GroupMean.apply(total, max(call.valid_tokens, 1), call.ring.group if call.ring.size > 1 else None)


class _GroupMean(torch.autograd.Function):
    """The sum of all ranks divided by ``count``; in the backward each rank's own part of it."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, count: int, group: dist.ProcessGroup | None) -> Tensor:  # type: ignore[override]
        ctx.count = count
        total = total.clone()
        if group is not None:
            dist.all_reduce(total, group=group)
        return total.div_(count)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return grad / ctx.count, None, None
