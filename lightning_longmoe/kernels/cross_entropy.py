"""Vocabulary projection and cross-entropy over chunks of tokens.

With softcap `cap` (y = cap·tanh(u/cap), else y = u), z-loss λ, label smoothing ε and the incoming gradient g:

    u    = logit_scale · (x·Wᵀ + bias)
    loss = (1-ε)(lse - y_t) + ε(lse - mean(y)) + λ·lse²                       lse = log Σ exp(y)
    d u  = g · [p(1 + 2λ·lse) - (1-ε)·1[t] - ε/V] · (1 - (y/cap)²)            p = exp(y - lse)

Letters: N tokens of this process - H hidden size - V vocabulary - C tokens of a chunk. The logits of at most one chunk
[C, V] are alive: the forward keeps lse [N], the backward computes a chunk's logits again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

DEFAULT_CHUNK_TOKENS = 2048


@dataclass(frozen=True, kw_only=True)
class CrossEntropyOptions:
    """The terms of the formula; see the module's docstring."""

    ignore_index: int = -100
    logit_softcap: float | None = None
    logit_scale: float = 1.0
    z_loss: float = 0.0
    label_smoothing: float = 0.0


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    options: CrossEntropyOptions = CrossEntropyOptions(),
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS,
) -> Tensor:
    """The summed loss of this process's tokens.

    Args:
        hidden: [N, H] floating point.
        weight: [V, H] in the dtype of ``hidden``.
        targets: [N] int64, class ids or ``options.ignore_index``; others raise an IndexError (on CUDA, an assertion).
        bias: [V] in the dtype of ``hidden``, or None.
        chunk_tokens: C.

    Returns:
        float64 scalar, 0 where nothing is valid. Softmax and sums are float32 (float64 for float64 inputs), and so is
        the gradient of the weight while it accumulates.
    """
    return _ChunkedCrossEntropy.apply(hidden, weight, bias, targets, options, chunk_tokens)


def reference_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    options: CrossEntropyOptions = CrossEntropyOptions(),
) -> Tensor:
    """`chunked_cross_entropy` from torch's own functions, all logits at once; scalar in the compute dtype."""
    y = project(hidden, weight, bias, options)
    valid = targets != options.ignore_index
    ce = F.cross_entropy(
        y, targets, ignore_index=options.ignore_index, label_smoothing=options.label_smoothing, reduction="sum"
    )
    return ce + options.z_loss * (torch.logsumexp(y, -1).square() * valid).sum()


def project(hidden: Tensor, weight: Tensor, bias: Tensor | None, options: CrossEntropyOptions) -> Tensor:
    """The logits y [N, V] in the compute dtype, differentiable and all at once."""
    u = F.linear(hidden, weight, bias).to(_compute_dtype(hidden)) * options.logit_scale
    return u if options.logit_softcap is None else options.logit_softcap * torch.tanh(u / options.logit_softcap)


def _compute_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in the compute dtype, accumulated in it where the device can."""
    dtype = _compute_dtype(a)
    if a.dtype == dtype:
        return a @ b
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=dtype)
    return (a @ b).to(dtype)


def _logits(x: Tensor, weight: Tensor, bias: Tensor | None, options: CrossEntropyOptions) -> Tensor:
    """[C, V] in a buffer of its own, everything after the product in place."""
    y = _matmul(x, weight.t())
    if bias is not None:
        y += bias
    if options.logit_scale != 1.0:
        y *= options.logit_scale
    if options.logit_softcap is not None:
        y.div_(options.logit_softcap).tanh_().mul_(options.logit_softcap)
    return y


def _chunks(tokens: int, chunk_tokens: int) -> Iterator[slice]:
    for start in range(0, tokens, chunk_tokens):
        yield slice(start, min(start + chunk_tokens, tokens))


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        options: CrossEntropyOptions,
        chunk_tokens: int,
    ) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        lse = torch.empty(hidden.size(0), dtype=_compute_dtype(hidden), device=hidden.device)
        with torch.autocast(hidden.device.type, enabled=False):
            for part in _chunks(hidden.size(0), chunk_tokens):
                y = _logits(hidden[part], weight, bias, options)
                lse[part] = torch.logsumexp(y, dim=-1)
                total += _summed_loss(y, lse[part], targets[part], options)
        ctx.save_for_backward(hidden, weight, bias, targets, lse)
        ctx.options, ctx.chunk_tokens = options, chunk_tokens
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden, weight, bias, targets, lse = ctx.saved_tensors
        dtype = _compute_dtype(hidden)
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        grad_weight = torch.zeros(weight.shape, dtype=dtype, device=weight.device) if wants_weight else None
        grad_bias = torch.zeros(bias.shape, dtype=dtype, device=bias.device) if wants_bias else None
        with torch.autocast(hidden.device.type, enabled=False):
            for part in _chunks(hidden.size(0), ctx.chunk_tokens):
                x = hidden[part]
                d_product = _gradient_of_product(x, weight, bias, targets[part], lse[part], ctx.options)
                d_product *= grad.to(dtype)
                if grad_bias is not None:
                    grad_bias += d_product.sum(0)
                d_product = d_product.to(hidden.dtype)
                if grad_weight is not None:
                    _add_product(grad_weight, d_product.t(), x)
                if grad_hidden is not None:
                    grad_hidden[part] = d_product @ weight
        grad_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        grad_bias = None if grad_bias is None else grad_bias.to(bias.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None


def _summed_loss(y: Tensor, lse: Tensor, targets: Tensor, options: CrossEntropyOptions) -> Tensor:
    """float64 scalar from the logits [C, V] and lse [C] of a chunk."""
    valid = targets != options.ignore_index
    target_logit = y.gather(1, targets.where(valid, 0).unsqueeze(1)).squeeze(1)
    eps = options.label_smoothing
    loss = lse - target_logit
    if eps:
        loss = (1 - eps) * loss + eps * (lse - y.mean(-1))
    if options.z_loss:
        loss = loss + options.z_loss * lse.square()
    return loss.masked_fill(~valid, 0).sum(dtype=torch.float64)


def _gradient_of_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, lse: Tensor, options: CrossEntropyOptions
) -> Tensor:
    """d loss / d(x·Wᵀ + bias) [C, V] in the compute dtype for an incoming gradient of 1."""
    y = _logits(x, weight, bias, options)
    slope = None if options.logit_softcap is None else 1 - (y / options.logit_softcap).square_()
    valid = targets != options.ignore_index
    d_y = y.sub_(lse.unsqueeze(1)).exp_()
    if options.z_loss:
        d_y *= (1 + 2 * options.z_loss * lse).unsqueeze(1)
    eps = options.label_smoothing
    if eps:
        d_y -= eps / weight.size(0)
    hit = torch.full_like(lse, eps - 1).unsqueeze(1)
    d_y.scatter_add_(1, targets.where(valid, 0).unsqueeze(1), hit)  # one index a row: no two additions meet
    if slope is not None:
        d_y *= slope
    if options.logit_scale != 1.0:
        d_y *= options.logit_scale
    return d_y.masked_fill_(~valid.unsqueeze(1), 0)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, in the dtype of ``total``."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        total += _matmul(a, b)
