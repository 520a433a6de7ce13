"""Gradients that cannot be differentiated again, and say so.

torch's ``once_differentiable`` marks them only where the incoming gradient needs a gradient itself. With a constant
one, as of ``y.sum()``, a second derivative would silently count them as constants.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def only_once(grads: Sequence[Tensor | None], attached: Sequence[Tensor | None], operator: str) -> list[Tensor | None]:
    """The gradients of a backward; where it runs to be differentiated itself, marked so that this raises.

    Args:
        grads: what the backward computed, without a graph.
        attached: what they depend on: inputs and incoming gradients.
        operator: its name, for the error.
    """
    if not torch.is_grad_enabled():
        return list(grads)
    return [None if grad is None else _OnlyOnce.apply(operator, grad, *attached) for grad in grads]


class _OnlyOnce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, operator: str, grad: Tensor, *attached: Tensor | None) -> Tensor:  # type: ignore[override]
        ctx.operator = operator
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        raise RuntimeError(
            f"Gradients of {ctx.operator} cannot be differentiated again (double backward): what it computes on the way"
            " is never kept. Use the plain reference in the same folder for second derivatives."
        )
