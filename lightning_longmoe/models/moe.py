"""A mixture-of-experts layer: router, experts, and an optional shared expert.

Load balance comes from an auxiliary loss (softmax router; Switch Transformer, arXiv 2101.03961, Eq. 4 to 6) or from a
correction bias that enters the choice alone (sigmoid router; DeepSeek-V3, arXiv 2412.19437, Section 2.1.2).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_longmoe.config import ExpertLayout
from lightning_longmoe.models.auxiliary import add_aux_loss
from lightning_longmoe.models.experts import Experts
from lightning_longmoe.models.layers import GatedMLP
from lightning_longmoe.runtime.reduction import TokenReduction
from lightning_longmoe.runtime.replay import remember, replaying


class Router(nn.Module):
    """Scores every expert for a token and chooses ``top_k`` of them.

    Scores are float32 whatever the dtype of the model (float64 for float64). The choice of a first forward is reused
    in its recomputation: a rounding difference must not send a token to another expert.

    Attributes:
        weight: parameter [E, H].
        expert_bias: buffer [E], float32 whatever ``.to`` says; added to sigmoid scores for the choice alone. None for
            softmax.
        reduction: the ranks whose tokens are balanced together; None: this process's.
    """

    reduction: TokenReduction | None
    expert_bias: Tensor | None

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        *,
        kind: Literal["softmax", "sigmoid"] = "softmax",
        renormalize: bool = True,
        scaling: float = 1.0,
        aux_loss_coef: float = 0.0,
        bias_update_rate: float = 0.0,
    ) -> None:
        super().__init__()
        _check_router(num_experts, top_k, kind, aux_loss_coef, bias_update_rate)
        self.num_experts, self.top_k, self.kind = num_experts, top_k, kind
        self.renormalize, self.scaling = renormalize, scaling
        self.aux_loss_coef, self.bias_update_rate = aux_loss_coef, bias_update_rate
        self.reduction = None
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size))
        bias = torch.zeros(num_experts, dtype=torch.float32) if kind == "sigmoid" else None
        self.register_buffer("expert_bias", bias)
        self._counts: Tensor | None = None  # no buffer: DDP would overwrite it with rank 0's
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.weight.size(1) ** -0.5)
        if self.expert_bias is not None:
            self.expert_bias.zero_()

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Router:
        kept = self.expert_bias
        super()._apply(fn, recurse)
        if kept is not None and self.expert_bias is not None and self.expert_bias.dtype != kept.dtype:
            self.expert_bias = kept.to(self.expert_bias.device)  # from the old values: a cast and back would round them
        return self

    @torch.compiler.disable  # a recomputation reuses the choice: compiled, it would be another graph that saves others
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Choose experts.

        Args:
            x: [N, H], this rank's tokens.

        Returns:
            expert ids [N, K] int64, and their weights [N, K] in float32 (float64 for a float64 x).
        """
        scores = self._scores(x)
        expert_ids = remember("router choice", lambda: self._choose(scores.detach()))
        weights = scores.gather(1, expert_ids)
        if self.renormalize:
            weights = weights / weights.sum(-1, keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)
        if self.training:
            self._count(expert_ids)
            if self.aux_loss_coef and torch.is_grad_enabled():
                self._add_aux_loss(scores, expert_ids)
        return expert_ids, weights * self.scaling

    def _scores(self, x: Tensor) -> Tensor:
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        with torch.autocast(x.device.type, enabled=False):
            logits = F.linear(x.to(dtype), self.weight.to(dtype))
            return torch.softmax(logits, -1) if self.kind == "softmax" else torch.sigmoid(logits)

    def _choose(self, scores: Tensor) -> Tensor:
        choice = scores if self.expert_bias is None else scores + self.expert_bias
        return torch.topk(choice, self.top_k, dim=-1).indices

    @torch.no_grad()
    def _count(self, expert_ids: Tensor) -> None:
        if replaying():
            return
        counts = _tokens_per_expert(expert_ids, self.num_experts)
        if self._counts is not None:
            counts += self._counts.to(counts.device)
        self._counts = counts

    def _add_aux_loss(self, scores: Tensor, expert_ids: Tensor) -> None:
        """coef · E · Σ_e f_e·P_e over all ranks: f the share of routes, P the mean score.

        A recomputation builds the same graph and throws it away: the first forward's term unpacks from it what the
        checkpoint did not keep.
        """
        summed = scores.sum(0)
        totals = remember("router totals", lambda: self._totals(summed.detach(), expert_ids))
        routes, score_sums = totals
        tokens = (routes.sum() / self.top_k).clamp(min=1)
        slope = self.aux_loss_coef * self.num_experts * routes / (tokens.square() * self.top_k)
        world_size = 1 if self.reduction is None else self.reduction.world_size
        local = (summed * (slope * world_size).to(summed.dtype)).sum()  # its gradients are averaged over the ranks
        term = local + ((slope * score_sums).sum() - local.detach())
        if not replaying():
            add_aux_loss(term)

    def _totals(self, score_sums: Tensor, expert_ids: Tensor) -> Tensor:
        """[2, E] float64 over all ranks: routes to each expert, and summed scores."""
        routes = _tokens_per_expert(expert_ids, self.num_experts)
        totals = torch.stack([routes.double(), score_sums.double()])
        return totals if self.reduction is None else self.reduction.sum(totals)

    def take_counts(self) -> Tensor | None:
        """[E] int64 routes of this rank since the last call, and start again at zero; None: no training forward."""
        counts, self._counts = self._counts, None
        return counts


class MoELayer(nn.Module):
    """Router, experts and optional shared expert; works in any training loop, and is what the strategy takes over.

    Args:
        hidden_size: H.
        ffn_size: F of one expert.
        num_experts: E.
        top_k: K experts of a token.
        router: "softmax" scores over the experts, or "sigmoid" scores with a correction bias for the choice.
        renormalize: divide a token's K weights by their sum.
        scaling: factor on the weights, after that.
        aux_loss_coef: strength of the load-balancing loss (softmax router). `CausalLMHead` adds its gradient by itself;
            with a loss of your own add `take_aux_loss()`.
        bias_update_rate: step of the correction bias (sigmoid router); call `update_router_biases` before each
            optimizer step.
        shared_ffn_size: F of the shared expert; 0: none.

    Raises:
        ValueError: top_k does not fit num_experts, or an option does not fit the router.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_size: int,
        num_experts: int,
        top_k: int,
        *,
        router: Literal["softmax", "sigmoid"] = "softmax",
        renormalize: bool = True,
        scaling: float = 1.0,
        aux_loss_coef: float = 0.0,
        bias_update_rate: float = 0.0,
        shared_ffn_size: int = 0,
        layout: ExpertLayout = ExpertLayout(),
    ) -> None:
        super().__init__()
        self.router = Router(
            hidden_size,
            num_experts,
            top_k,
            kind=router,
            renormalize=renormalize,
            scaling=scaling,
            aux_loss_coef=aux_loss_coef,
            bias_update_rate=bias_update_rate,
        )
        self.experts = Experts(num_experts, hidden_size, ffn_size, layout)
        self.shared = GatedMLP(hidden_size, shared_ffn_size) if shared_ffn_size else None

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [B, S, H] (any leading dimensions) -> the same shape and dtype."""
        x = hidden.reshape(-1, hidden.size(-1))
        # before the experts: a recomputation may stop once nothing after their region saves a tensor
        shared = None if self.shared is None else self.shared(x)
        expert_ids, weights = self.router(x)
        out = self.experts(x, expert_ids, weights)
        if shared is not None:
            out = out + shared
        return out.view(hidden.shape)


@torch.no_grad()
def update_router_biases(module: nn.Module, reduction: TokenReduction | None = None) -> None:
    """Move every correction bias of ``module`` towards balance: bias += rate · sign(mean count - count).

    Counts are the routes of all training forwards since the last call, summed over ranks with one all-reduce. All ranks
    must call it together, once before each optimizer step. Experts with no counts at all leave their bias unchanged.

    Args:
        reduction: the ranks to sum over. None: those that the strategy gave the routers, else all of the default
            process group, if there is one (DDP).
    """
    routers = [child for child in module.modules() if isinstance(child, Router) and child.bias_update_rate]
    if not routers:
        return
    counts = [_counts_or_zeros(router) for router in routers]
    totals = (reduction or routers[0].reduction or _default_reduction()).sum(torch.cat(counts))
    for router, total in zip(routers, totals.split([c.numel() for c in counts]), strict=True):
        assert router.expert_bias is not None
        gap = total.double().mean() - total
        router.expert_bias += router.bias_update_rate * gap.sign().to(router.expert_bias.dtype)


def _counts_or_zeros(router: Router) -> Tensor:
    counts, bias = router.take_counts(), router.expert_bias
    assert bias is not None
    return torch.zeros(bias.shape, dtype=torch.int64, device=bias.device) if counts is None else counts.to(bias.device)


def _default_reduction() -> TokenReduction:
    if dist.is_available() and dist.is_initialized():
        return TokenReduction(dist.group.WORLD, dist.get_world_size())
    return TokenReduction()


def _tokens_per_expert(expert_ids: Tensor, num_experts: int) -> Tensor:
    """[E] int64, without waiting for the device (bincount does)."""
    routes = expert_ids.reshape(-1)
    return routes.new_zeros(num_experts).scatter_add_(0, routes, torch.ones_like(routes))


def _check_router(num_experts: int, top_k: int, kind: str, aux_loss_coef: float, bias_update_rate: float) -> None:
    if kind not in ("softmax", "sigmoid"):
        raise ValueError(f"router={kind!r} is not allowed. Choose 'softmax' or 'sigmoid'.")
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"top_k={top_k} is not allowed with num_experts={num_experts}: give 1 to {num_experts}.")
    if aux_loss_coef and kind == "sigmoid":
        raise ValueError(
            f"aux_loss_coef={aux_loss_coef} is for router='softmax'. With router='sigmoid' balance through"
            " bias_update_rate, and set aux_loss_coef=0."
        )
    if bias_update_rate and kind == "softmax":
        raise ValueError(
            f"bias_update_rate={bias_update_rate} is for router='sigmoid'. With router='softmax' balance through"
            " aux_loss_coef, and set bias_update_rate=0."
        )
