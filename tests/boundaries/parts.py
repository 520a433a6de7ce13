"""A small stack of parts to checkpoint, and what its training gives: inputs' and weights' gradients, in order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def residual(hidden: Tensor, mask: Tensor, weight: Tensor, *, scale: float = 1.0) -> Tensor:
    return hidden + scale * torch.relu(hidden @ weight) * mask


def make_weights(depth: int, width: int = 8, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(width, width, generator=generator, dtype=dtype).requires_grad_() for _ in range(depth)]


def forward(checkpoint: Callable[..., Any], weights: list[Tensor], x: Tensor) -> Tensor:
    """The loss; ``mask`` is one tensor that all parts share."""
    hidden = x * 1.0
    mask = torch.linspace(0.5, 1.5, x.size(-1), dtype=x.dtype)
    for weight in weights:
        hidden = checkpoint(residual, hidden, mask, weight, scale=0.5)
    return hidden.square().mean()


def train(
    checkpoint: Callable[..., Any], depth: int = 8, steps: int = 3, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """Gradients of all steps' inputs, and the accumulated ones of the weights."""
    weights = make_weights(depth, dtype=dtype)
    generator = torch.Generator().manual_seed(2)
    gradients = []
    for _ in range(steps):
        x = torch.randn(4, 8, generator=generator, dtype=dtype).requires_grad_()
        forward(checkpoint, weights, x).backward()
        gradients.append(x.grad)
    return [*gradients, *(weight.grad for weight in weights)]


def equal(actual: list[Tensor], expected: list[Tensor]) -> bool:
    return len(actual) == len(expected) and all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
