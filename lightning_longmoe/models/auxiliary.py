"""Auxiliary losses on their way from the layers that made them to the loss that takes them.

A layer deep in a model cannot return its load-balancing loss through a model that only returns hidden states. So it is
put on one process-wide list, `_pending`, the single piece of global state of this room; the next loss takes them all.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_MOST_PENDING = 10_000
_pending: list[Tensor] = []


def add_aux_loss(term: Tensor) -> None:
    """Put a scalar of this process's graph on the list.

    Raises:
        RuntimeError: nobody takes the terms, whose graphs are kept alive.
    """
    if len(_pending) >= _MOST_PENDING:
        discard_aux_losses()
        raise RuntimeError(
            f"{_MOST_PENDING} auxiliary losses of MoE layers are waiting and no loss takes them. Compute the loss with"
            " CausalLMHead, or add take_aux_loss() to your own loss, or set aux_loss_coef=0."
        )
    _pending.append(term)


def take_aux_loss() -> Tensor:
    """The sum of all waiting terms, which are then no longer waiting; add it to your own loss.

    Returns:
        scalar; 0 (float32, without a graph, on the default device) where none waits.
    """
    if not _pending:
        return torch.zeros(())
    terms = list(_pending)
    _pending.clear()
    return torch.stack([term.to(terms[0].device) for term in terms]).sum()


def discard_aux_losses() -> None:
    """Forget waiting terms, such as those of a forward that failed half way."""
    _pending.clear()


def refuse_waiting_aux_losses() -> None:
    """Raise RuntimeError when terms still wait after a backward: balance was asked for and would silently not come."""
    if _pending:
        count = len(_pending)
        discard_aux_losses()
        raise RuntimeError(
            f"aux_loss_coef is set, and the auxiliary losses of {count} MoE layers were not part of the loss. Compute"
            " the loss with CausalLMHead, or add take_aux_loss() to your own loss, or set aux_loss_coef=0."
        )


def attach_aux_losses(loss: Tensor) -> Tensor:
    """``loss`` itself in value, whose backward also gives every waiting term the incoming gradient.

    Args:
        loss: scalar with a graph. Without one (evaluation) waiting terms are left alone.
    """
    if not _pending or not loss.requires_grad:
        return loss
    return _AttachTerm.apply(loss, take_aux_loss())


class _AttachTerm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, term: Tensor) -> Tensor:  # type: ignore[override]
        ctx.term = (term.dtype, term.device)
        return loss.clone()  # a view would make FSDP2 warn about in-place operations

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        dtype, device = ctx.term
        return grad, grad.to(device=device, dtype=dtype)
