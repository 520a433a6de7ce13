"""Parameters that a group of ranks owns together, each rank a part: experts, the vocabulary projection.

The gradient that reaches an owned part already is the sum over the tokens of its group, while everything else averages
over all ranks. So it is multiplied by 1 / (ranks of the group) on its way to the parameter.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor


def owned_part(parameter: Tensor, gradient_scale: float) -> Tensor:
    """This rank's part of a parameter, in its own dtype, whose gradient is scaled on its way back.

    Args:
        parameter: a DTensor, or a plain tensor as it is.
        gradient_scale: what the gradient is multiplied by.
    """
    part = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return part if gradient_scale == 1.0 else _ScaleGradient.apply(part, gradient_scale)


class _ScaleGradient(torch.autograd.Function):
    """The identity, whose backward multiplies by a constant."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, scale: float) -> Tensor:  # type: ignore[override]
        ctx.scale = scale
        return tensor.view_as(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad * ctx.scale, None
