"""How well a plan balances, per layer and forward: numbers from the plan alone, which is on the host already."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from torch import Tensor

from lightning_longmoe.dispatch.exchange import LayerPlan
from lightning_longmoe.dispatch.experts import ExpertStack

KEPT_FORWARDS = 1024


@dataclass(frozen=True)
class Balance:
    """Figures of one layer and forward, the same on every rank of the group unless said otherwise.

    Attributes:
        chunks: n.
        imbalance_before, imbalance_after: largest over mean rows of a rank, with all rows at home and as planned.
        guests: experts that visit a rank, over the group.
        guest_rows: rows that they compute there.
        guest_bytes: weights that travel in one direction, over the group.
        largest_receive: rows of the largest receive of a rank in a chunk.
        receive_bound: rows that it can have for no router.
        row_bytes: of one row.
    """

    chunks: int
    imbalance_before: float
    imbalance_after: float
    guests: int
    guest_rows: int
    guest_bytes: int
    largest_receive: int
    receive_bound: int
    row_bytes: int

    @staticmethod
    def of(layer: LayerPlan, weights: ExpertStack, x: Tensor) -> Balance:
        plan = layer.plan
        expert_bytes = sum(t[:1].numel() * t.element_size() for t in weights.tensors())
        away = plan.piece_rank != plan.piece_expert // plan.experts_per_rank
        return Balance(
            chunks=plan.chunks,
            imbalance_before=plan.imbalance_before,
            imbalance_after=plan.imbalance_after,
            guests=len(plan.guests),
            guest_rows=int(plan.piece_rows[away].sum()),
            guest_bytes=len(plan.guests) * expert_bytes,
            largest_receive=int(plan.received_rows.max()),
            receive_bound=layer.bound_rows,
            row_bytes=x.size(1) * x.element_size(),
        )


class BalanceLog:
    """The figures of a layer's forwards since they were last taken; old ones give way where nobody takes them."""

    def __init__(self) -> None:
        self._kept: deque[Balance] = deque(maxlen=KEPT_FORWARDS)

    def add(self, layer: LayerPlan, weights: ExpertStack, x: Tensor) -> None:
        self._kept.append(Balance.of(layer, weights, x))

    @property
    def last(self) -> Balance | None:
        return self._kept[-1] if self._kept else None

    def take(self) -> list[Balance]:
        """All figures, oldest first, and start again."""
        taken = list(self._kept)
        self._kept.clear()
        return taken
