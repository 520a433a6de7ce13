"""W virtual ranks in one process and one thread: every rank's memory and arithmetic on one device, without links.

They run outside autograd: threads would deadlock there, since autograd has one thread a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lightning_longmoe.config import ExpertLayout, PipelinedLLEP
from lightning_longmoe.dispatch.exchange import ChunkBound, LayerPlan, Needs, plan_layer
from lightning_longmoe.dispatch.experts import ProductPaths
from lightning_longmoe.dispatch.region import ACCUMULATORS, GRADIENTS, PARAMETERS, RegionForward, RegionInputs
from lightning_longmoe.dispatch.region_backward import RegionBackward, RegionGradients
from lightning_longmoe.dispatch.transport import Steps, run_virtual
from lightning_longmoe.dispatch.unchunked import (
    SavedActivations,
    UnchunkedBackward,
    UnchunkedForward,
    _close,
    unchunked,
)
from lightning_longmoe.runtime.ledger import Arena, Ledger


class VirtualRanks:
    """PipelinedLLEP over virtual ranks.

    Args:
        ranks: what each rank brings; all on one device.
        expert_ids: [N, K] int64 of each rank.
        config: of the operator.
        layout: of the weights.
        needs: gradients wanted.
        late: move data when it is waited for, not when it is sent.
        fill: a value for every new buffer.
        paths: which code multiplies; None: what the device allows.

    Attributes:
        ledgers: of each rank.
        logs: signatures of each rank's steps.
        plans: of each rank, once planned.
    """

    def __init__(
        self,
        ranks: Sequence[RegionInputs],
        expert_ids: Sequence[Tensor],
        config: PipelinedLLEP,
        layout: ExpertLayout = ExpertLayout(),
        *,
        needs: Needs = Needs(True, True, True, True, True, True),
        late: bool = False,
        fill: float | None = None,
        paths: ProductPaths | None = None,
    ) -> None:
        self.ranks, self.expert_ids, self.config, self.layout = list(ranks), list(expert_ids), config, layout
        self.needs, self.late, self.fill, self.paths = needs, late, fill, paths
        self.ledgers = [Ledger(aside=(PARAMETERS, GRADIENTS, ACCUMULATORS)) for _ in ranks]
        self.logs: list[list[tuple[Any, ...]]] = [[] for _ in ranks]
        self.plans: list[LayerPlan] = []

    def make_plans(self) -> None:
        """Exchange counts and plan on every rank."""
        arenas, bounds = self._arenas(), [ChunkBound() for _ in self.ranks]
        first = self.ranks[0].weights.gate_up_proj
        assert first is not None
        size, experts = len(self.ranks), len(self.ranks) * first.size(0)
        self.plans = self._run(
            [
                plan_layer(arena, rank, size, ids, experts, self.needs, config=self.config, bound=bound)
                for rank, (arena, ids, bound) in enumerate(zip(arenas, self.expert_ids, bounds, strict=True))
            ]
        )

    def forward(self) -> list[Tensor]:
        """y [N, H] of each rank."""
        self.make_plans()
        arenas = self._arenas()
        outputs = self._run([RegionForward(*self._arguments(i, arena)).run() for i, arena in enumerate(arenas)])
        _close_all(arenas)
        return outputs

    def backward(self, grads: Sequence[Tensor]) -> list[RegionGradients]:
        """Gradients of each rank, from those of y."""
        arenas = self._arenas()
        regions = [RegionBackward(*self._arguments(i, arena)) for i, arena in enumerate(arenas)]
        results = self._run([region.run(grad) for region, grad in zip(regions, grads, strict=True)])
        del regions
        _close_all(arenas)
        return results

    def _arguments(self, rank: int, arena: Arena) -> tuple[Any, ...]:
        return self.ranks[rank], self.plans[rank], rank, arena, self.layout, self.config.depth, self.paths

    def _arenas(self) -> list[Arena]:
        device = self.ranks[0].x.device
        return [Arena(device, ledger, self.fill) for ledger in self.ledgers]

    def _run(self, regions: Sequence[Steps[Any]]) -> list[Any]:
        return run_virtual(regions, late=self.late, logs=self.logs)


class UnchunkedVirtualRanks(VirtualRanks):
    """Unchunked LLEP with saved activations over virtual ranks."""

    def __init__(
        self,
        ranks: Sequence[RegionInputs],
        expert_ids: Sequence[Tensor],
        config: PipelinedLLEP,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(ranks, expert_ids, unchunked(config), *args, **kwargs)
        self.saved: list[SavedActivations] = []

    def forward(self) -> list[Tensor]:
        """y [N, H] of each rank; keeps the activations."""
        self.make_plans()
        arenas = self._arenas()
        results = self._run([UnchunkedForward(*self._arguments(i, arena)).run() for i, arena in enumerate(arenas)])
        self.saved = [saved for _, saved in results]
        for arena, saved in zip(arenas, self.saved, strict=True):
            _close(arena, saved, self.layout)
        return [y for y, _ in results]

    def backward(self, grads: Sequence[Tensor]) -> list[RegionGradients]:
        """Gradients of each rank; frees the activations."""
        arenas, saved = self._arenas(), self.saved
        self.saved = []
        regions = [UnchunkedBackward(*self._arguments(i, arena)) for i, arena in enumerate(arenas)]
        results = self._run([r.run(grad, kept) for r, grad, kept in zip(regions, grads, saved, strict=True)])
        _close_all(arenas)
        return results


def _close_all(arenas: Sequence[Arena]) -> None:
    for arena in arenas:
        arena.close()
