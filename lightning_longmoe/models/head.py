"""Vocabulary projection and loss in one module, so that a strategy can take both over together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lightning_longmoe.kernels.cross_entropy import CrossEntropyOptions, chunked_cross_entropy, project
from lightning_longmoe.models.auxiliary import attach_aux_losses
from lightning_longmoe.runtime.owned import owned_part
from lightning_longmoe.runtime.reduction import TokenReduction


class SpreadProjection(Protocol):
    """A projection whose vocabulary rows are spread over ranks."""

    def __call__(
        self, hidden: Tensor, weight: Tensor, targets: Tensor, *, bias: Tensor | None, options: CrossEntropyOptions
    ) -> Tensor:
        """The summed loss of this rank's tokens, float64 scalar; hidden [N, H], weight and bias this rank's rows."""

    def gather(self, rows: Tensor) -> Tensor:
        """All rows of a tensor [Vp, ...] of which each rank has its own."""


class CausalLMHead(nn.Module):
    """Logits, or the mean cross-entropy over the valid targets without ever holding all logits.

    Args:
        hidden_size: H.
        vocab_size: V.
        bias: add a bias to the projection.
        tied_to: an embedding [V, H] whose weight this head uses, as the same parameter.
        ignore_index: targets of this value are not counted.
        logit_softcap: y = cap·tanh(u/cap); None: y = u.
        logit_scale: u = logit_scale·(x·Wᵀ + bias).
        z_loss: weight of lse².
        label_smoothing: share of the uniform distribution in the target.

    Attributes:
        projection: computes the summed loss where the vocabulary is spread over ranks; the strategy sets it. Called
            with the rows of weight and bias that live on this rank. None: all of them live here.
        gradient_scale: what gradients of weight and bias are multiplied by; the strategy sets 1/P, since the P ranks
            that own a row already sum over each other's tokens.
        reduction: the ranks that share the loss; the strategy sets it. None: the mean over this process's tokens.
        check_targets: called with the targets of every loss, and with None where logits are asked for; the strategy
            verifies there that they were shifted once.

    Raises:
        ValueError: a size or an option is out of range, or ``tied_to`` has another shape.
    """

    projection: SpreadProjection | None
    reduction: TokenReduction | None
    check_targets: Callable[[Tensor | None], Any] | None

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        *,
        bias: bool = False,
        tied_to: nn.Embedding | None = None,
        ignore_index: int = -100,
        logit_softcap: float | None = None,
        logit_scale: float = 1.0,
        z_loss: float = 0.0,
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__()
        _check_head(hidden_size, vocab_size, tied_to, logit_softcap, label_smoothing)
        self.hidden_size, self.vocab_size = hidden_size, vocab_size
        self.options = CrossEntropyOptions(
            ignore_index=ignore_index,
            logit_softcap=logit_softcap,
            logit_scale=logit_scale,
            z_loss=z_loss,
            label_smoothing=label_smoothing,
        )
        self.projection = None
        self.gradient_scale = 1.0
        self.reduction = None
        self.check_targets = None
        # in a tuple, so that the embedding does not become a submodule of the head
        self._tied_to = () if tied_to is None else (tied_to,)
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size)) if tied_to is None else tied_to.weight
        self.bias = nn.Parameter(torch.empty(vocab_size)) if bias else None
        self.reset_parameters()

    @property
    def tied_to(self) -> nn.Embedding | None:
        """The embedding whose weight this head uses."""
        return self._tied_to[0] if self._tied_to else None

    def extra_repr(self) -> str:
        tied = ", tied" if self._tied_to else ""
        return f"hidden_size={self.hidden_size}, vocab_size={self.vocab_size}{tied}"

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise what this head owns; a tied weight is the embedding's to initialise."""
        if not self._tied_to:
            nn.init.normal_(self.weight, std=0.02)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def tie_weights(self) -> None:
        """Make the weight the embedding's parameter again, after something replaced that."""
        if self.tied_to is not None and self.weight is not self.tied_to.weight:
            self.weight = self.tied_to.weight

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> CausalLMHead:
        super()._apply(fn, recurse)
        self.tie_weights()  # leaving the meta device makes a new parameter for each module that holds the old one
        return self

    def forward(self, hidden: Tensor, targets: Tensor | None = None, *, as_sums: bool = False) -> Any:
        """The loss of ``targets``, or without them the logits.

        Args:
            hidden: [B, S, H] (any leading dimensions), this rank's.
            targets: [B, S] int64, already shifted: ``targets[i]`` is the token that follows position i.
            as_sums: return what `loss_sum_and_count` does (a call through the module, so that its hooks run).

        Returns:
            float32 scalar (float64 for a float64 hidden): the mean over valid targets, 0 where there are none. With a
            ``reduction`` it is the mean over all its ranks, the same on each, and the backward gives each rank its part
            of that mean's gradient, such that the average over ranks is the whole. Waiting auxiliary losses are taken:
            they add to the gradient, not to the value. Without targets: logits [B, S, V], in the same dtypes.
            In an accumulation window that is counted ahead, every loss of a head (its k-th call in each micro-batch)
            must hold all targets that were counted; anything else is an error before the optimizer steps.

        Raises:
            ValueError: targets and hidden have different leading shapes.
        """
        hidden = hidden.to(self._compute_dtype(hidden))
        if targets is None:
            if self.check_targets is not None:
                self.check_targets(None)
            return self._logits(hidden)
        if targets.shape != hidden.shape[:-1]:
            raise ValueError(
                f"targets {list(targets.shape)} do not fit hidden {list(hidden.shape)}: give one target a position."
            )
        if self.check_targets is not None:
            self.check_targets(targets)
        options = self.options
        if as_sums:
            options = CrossEntropyOptions(
                ignore_index=options.ignore_index,
                logit_softcap=options.logit_softcap,
                logit_scale=options.logit_scale,
            )
        total = self._summed_loss(hidden.reshape(-1, self.hidden_size), targets.reshape(-1), options)
        count = (targets != options.ignore_index).sum()
        if as_sums:
            return total, count
        loss = self._mean(total, count)
        return attach_aux_losses(loss if hidden.dtype == torch.float64 else loss.float())

    def loss_sum_and_count(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Summed cross-entropy and valid targets of this rank, for evaluation that is exact over uneven ranks.

        z-loss and label smoothing are left out, so that exp(sum / count) is the perplexity. No communication but what a
        ``projection`` needs.

        Args:
            hidden: [B, S, H], this rank's.
            targets: [B, S] int64, already shifted.

        Returns:
            float64 scalar and int64 scalar.
        """
        return self(hidden, targets, as_sums=True)

    def _mean(self, total: Tensor, count: Tensor) -> Tensor:
        if self.reduction is None:
            return total / count.clamp(min=1)
        global_total, global_count = self.reduction.sum(torch.stack([total.detach(), count.to(total.dtype)]))
        mean = global_total / global_count.clamp(min=1)
        if total.requires_grad:
            self.reduction.note_loss(self, global_count)
        return _SharedMean.apply(total, mean, self.reduction.gradient_scale(global_count))

    def _summed_loss(self, hidden: Tensor, targets: Tensor, options: CrossEntropyOptions) -> Tensor:
        """float64 scalar from hidden [N, H] in the dtype of the computation and targets [N]."""
        if self.projection is not None:
            # in their own dtype, so that gradients come back in it without having been rounded
            weight, bias = self._own_rows()
            return self.projection(hidden, weight, targets, bias=bias, options=options)
        bias = None if self.bias is None else self.bias.to(hidden.dtype)
        return chunked_cross_entropy(hidden, self.weight.to(hidden.dtype), targets, bias=bias, options=options)

    def _logits(self, hidden: Tensor) -> Tensor:
        weight, bias = self._own_rows()
        if self.projection is not None:
            weight = self.projection.gather(weight.to(hidden.dtype))
            bias = None if bias is None else self.projection.gather(bias.to(hidden.dtype))
        return project(hidden, weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype), self.options)

    def _own_rows(self) -> tuple[Tensor, Tensor | None]:
        """The rows of weight and bias that live on this rank."""
        bias = None if self.bias is None else owned_part(self.bias, self.gradient_scale)
        return owned_part(self.weight, self.gradient_scale), bias

    def _compute_dtype(self, hidden: Tensor) -> torch.dtype:
        """Of the projection: autocast's, else that of ``hidden``; float64 stays."""
        device_type = hidden.device.type
        if hidden.dtype == torch.float64 or not torch.is_autocast_enabled(device_type):
            return hidden.dtype
        return torch.get_autocast_dtype(device_type)


class _SharedMean(torch.autograd.Function):
    """The mean of all ranks in value; in the backward this rank's sum times ``scale``."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, mean: Tensor, scale: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(scale)
        return mean.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (scale,) = ctx.saved_tensors
        return grad * scale, None, None


def _check_head(
    hidden_size: int, vocab_size: int, tied_to: nn.Embedding | None, softcap: float | None, smoothing: float
) -> None:
    if hidden_size < 1 or vocab_size < 1:
        raise ValueError(f"CausalLMHead({hidden_size}, {vocab_size}) is not allowed: sizes must be at least 1.")
    if softcap is not None and softcap <= 0:
        raise ValueError(f"CausalLMHead(logit_softcap={softcap}) is not allowed: give a number above 0, or None.")
    if not 0 <= smoothing < 1:
        raise ValueError(f"CausalLMHead(label_smoothing={smoothing}) is not allowed: give 0 <= label_smoothing < 1.")
    if tied_to is not None and tuple(tied_to.weight.shape) != (vocab_size, hidden_size):
        raise ValueError(
            f"CausalLMHead(tied_to=...) got an embedding of shape {list(tied_to.weight.shape)}; tying needs"
            f" [vocab_size, hidden_size] = [{vocab_size}, {hidden_size}]."
        )
