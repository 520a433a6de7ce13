"""Expert parallelism without chunks: every token goes to the home ranks of its experts at once, and comes back.

It is dropless and exact, and the baseline of every other dispatch. Its peak grows with the most loaded rank.

Letters: N tokens of this rank - K experts a token - E experts of the group - Ep ranks of the group - H hidden size -
R rows that this rank receives. Glossary: *row*, a copy of a token for one of its K experts; *route*, the pair (token,
slot) that a row serves; *home rank*, owner of an expert's weights (expert e lives on rank e // (E / Ep));
*dispatch*, rows to home ranks; *combine*, results back.

Rows are sorted by (expert, source rank, token, slot) and summed without atomics, so runs are bitwise equal. The number
and order of collectives never depend on the routing: one exchange of counts, one dispatch, one combine, and the last
two again in the backward. Under `lightning_longmoe.runtime.replay` a recomputation reuses the ids and the counts of
the first forward, exchanges none, and does not wait for the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_longmoe._compat import reshaped
from lightning_longmoe.config import ExpertLayout
from lightning_longmoe.kernels.expert_mlp import expert_mlp
from lightning_longmoe.runtime.replay import remember


@dataclass(frozen=True)
class _RowCounts:
    """Rows between this rank and the group, known on the host."""

    sent: list[int]
    """[Ep] rows to each rank."""
    received: list[list[int]]
    """[Ep][E / Ep] rows from each rank for each of this rank's experts."""

    @property
    def received_from(self) -> list[int]:
        return [sum(row) for row in self.received]

    @property
    def per_expert(self) -> list[int]:
        return [sum(column) for column in zip(*self.received, strict=True)]


class PlainDispatch:
    """Dropless, unchunked all-to-all to the experts' home ranks.

    Args:
        group: the expert-parallel ranks; the order of ranks in it is the order of home experts. None: this process
            holds all experts.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        require_member(group)
        self.group = group
        self.size = 1 if group is None else dist.get_world_size(group)

    def __deepcopy__(self, memo: dict[int, Any]) -> PlainDispatch:
        return self  # a process group cannot be copied, and a copied model uses the same one

    @torch.compiler.disable  # row counts follow the routing: a compiled block would be compiled anew for each
    def __call__(
        self,
        x: Tensor,
        expert_ids: Tensor,
        expert_weights: Tensor,
        gate_up_proj: Tensor,
        down_proj: Tensor,
        *,
        layout: ExpertLayout = ExpertLayout(),
        gate_up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
    ) -> Tensor:
        """Send, compute, bring back. All ranks of the group must call it, those without tokens too.

        Args:
            x: [N, H] this rank's tokens; N may differ between ranks and be 0.
            expert_ids: [N, K] int64, global ids; an id may repeat in a row.
            expert_weights: [N, K] floating point.
            gate_up_proj: [E/Ep, 2F, H], this rank's experts, laid out as ``layout`` says.
            down_proj: [E/Ep, H, F].
            gate_up_bias: [E/Ep, 2F] or None.
            down_bias: [E/Ep, H] or None.

        Returns:
            [N, H] in the dtype of x. In the backward this rank's expert gradients are the sum over all ranks' tokens.

        Raises:
            ValueError: shapes or dtypes of x, ids and weights do not fit.
        """
        _check_routes(x, expert_ids, expert_weights)
        top_k = expert_ids.size(1)
        routes = remember("routes", lambda: expert_ids.detach()).reshape(-1)
        order = torch.argsort(routes, stable=True)
        inverse = _inverse(order)
        rows = _SpreadTokens.apply(x, order, inverse, top_k)
        if self.size == 1:
            counts = remember("counts", lambda: _count(routes, gate_up_proj.size(0)).tolist())
        else:
            exchange = remember("counts", lambda: self._exchange_counts(routes, gate_up_proj.size(0)))
            counts = exchange.per_expert
            rows = _AllToAll.apply(rows, exchange.sent, exchange.received_from, self.group)
            by_expert = _sort_received(exchange, rows.device)
            rows = _Permute.apply(rows, by_expert, _inverse(by_expert))
        rows = expert_mlp(
            rows, counts, gate_up_proj, down_proj, layout=layout, gate_up_bias=gate_up_bias, down_bias=down_bias
        )
        if self.size > 1:
            rows = _Permute.apply(rows, _inverse(by_expert), by_expert)
            rows = _AllToAll.apply(rows, exchange.received_from, exchange.sent, self.group)
        rows = _Permute.apply(rows, inverse, order)
        return _weighted_sum(rows, expert_weights).to(x.dtype)

    def _exchange_counts(self, routes: Tensor, local_experts: int) -> _RowCounts:
        sent = _count(routes, local_experts * self.size)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        # the one wait for the device in this layer
        sent_list, received_list = torch.stack([sent, received]).view(2, self.size, local_experts).tolist()
        return _RowCounts([sum(row) for row in sent_list], received_list)


def require_member(group: dist.ProcessGroup | None) -> None:
    """Raise ValueError for a group that this rank is not in."""
    if group is not None and dist.get_rank(group) < 0:
        raise ValueError("The process group of the experts was made without this rank: give one that it is in.")


def _check_routes(x: Tensor, expert_ids: Tensor, expert_weights: Tensor) -> None:
    if x.dim() != 2 or expert_ids.dim() != 2 or expert_ids.size(0) != x.size(0):
        raise ValueError(
            f"x {list(x.shape)} and expert_ids {list(expert_ids.shape)} do not fit: give x [N, H] and ids [N, K]."
        )
    if expert_ids.size(1) == 0:
        raise ValueError(f"expert_ids {list(expert_ids.shape)} give no expert to a token: K must be at least 1.")
    if expert_weights.shape != expert_ids.shape:
        raise ValueError(
            f"expert_weights {list(expert_weights.shape)} must have the shape of expert_ids {list(expert_ids.shape)}."
        )
    if expert_ids.dtype != torch.int64 or not expert_weights.is_floating_point():
        raise ValueError(
            f"expert_ids ({expert_ids.dtype}) must be int64 and expert_weights ({expert_weights.dtype}) floating point."
        )


def _count(routes: Tensor, num_experts: int) -> Tensor:
    """[E] int64 rows of each expert. Not bincount: that one waits for the device."""
    return routes.new_zeros(num_experts).scatter_add_(0, routes, torch.ones_like(routes))


def _inverse(order: Tensor) -> Tensor:
    return torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))


def _sort_received(counts: _RowCounts, device: torch.device) -> Tensor:
    """[R] the permutation from (source, expert) order, in which rows arrive, to (expert, source) order."""
    lengths = torch.tensor(counts.received)
    experts = torch.arange(lengths.size(1)).repeat(lengths.size(0))
    labels = experts.repeat_interleave(lengths.reshape(-1))
    return torch.argsort(labels.to(device, non_blocking=True), stable=True)


def _weighted_sum(rows: Tensor, expert_weights: Tensor) -> Tensor:
    """rows [N·K, H] in route order, weights [N, K] -> [N, H], without a weighted copy of the rows."""
    tokens, top_k = expert_weights.shape
    weights = expert_weights.to(rows.dtype).unsqueeze(1)
    summed = torch.bmm(weights, rows.view(tokens, top_k, rows.size(-1)))
    return reshaped(summed, (tokens, rows.size(-1)))  # as a view, FSDP2 would warn of in-place changes to it


class _SpreadTokens(torch.autograd.Function):
    """x [N, H] -> [N·K, H]: a copy of a token for each of its routes, in ``order`` of the routes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, top_k: int) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(inverse)
        ctx.shape = (x.size(0), top_k, x.size(1))
        return x.index_select(0, order // top_k)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        (inverse,) = ctx.saved_tensors
        return grad.index_select(0, inverse).view(ctx.shape).sum(1), None, None, None


class _Permute(torch.autograd.Function):
    """rows[order], whose backward gathers too where indexing would scatter with atomics."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(inverse)
        return rows.index_select(0, order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (inverse,) = ctx.saved_tensors
        return grad.index_select(0, inverse), None, None


class _AllToAll(torch.autograd.Function):
    """Rows [sum(sent), H] -> [sum(received), H]; the backward is the exchange the other way round."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _exchange(rows, sent, received, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        return _exchange(grad, ctx.received, ctx.sent, ctx.group), None, None, None


def _exchange(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    output = rows.new_empty(sum(received), rows.size(1))
    dist.all_to_all_single(output, rows.contiguous(), received, sent, group=group)
    return output
