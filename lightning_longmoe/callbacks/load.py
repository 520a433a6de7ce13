"""`ExpertLoadMonitor`: how evenly the routers load the ranks, and what the dispatch made of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from lightning_longmoe.dispatch import PipelinedDispatch
from lightning_longmoe.models.experts import Experts

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightning_longmoe.dispatch.balance import Balance

GIB = 2**30


class ExpertLoadMonitor(Callback):
    """Logs figures of PipelinedLLEP's plans since the last logged step: the worst layer and forward of all ranks.

    =================================  ===============================================================================
    ``longmoe/load_before``            largest over mean rows of a rank, with every row at its expert's home
    ``longmoe/load_after``             the same, as planned; 1 is even
    ``longmoe/guest_experts``          experts that visited another rank in one forward
    ``longmoe/guest_gib``              weights that travelled for them, one way
    ``longmoe/chunks``                 chunks of a forward
    ``longmoe/receive_of_bound``       largest receive of a chunk as a share of what the cap allows for any router
    =================================  ===============================================================================

    The figures come from plans that are on the host already: no layer waits for the device because of them. Ranks
    exchange them only at the steps that Lightning logs.

    Raises:
        ValueError: no experts of the module are dispatched by PipelinedLLEP, so there is nothing to watch.
    """

    def __init__(self) -> None:
        self._worst: dict[str, float] = {}
        self._last_step = 0

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not _dispatches(pl_module):
            raise ValueError(
                "ExpertLoadMonitor found no experts that PipelinedLLEP dispatches. Use LongMoEStrategy with an expert"
                " parallel size above 1 and dispatch='auto' or PipelinedLLEP(...), or leave the callback out."
            )
        self._worst = {}
        self._last_step = trainer.global_step

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        for dispatch in _dispatches(pl_module):
            for balance in dispatch.balance.take():
                for key, value in figures(balance).items():
                    self._worst[key] = max(value, self._worst.get(key, 0.0))
        step, every = trainer.global_step, trainer.log_every_n_steps  # type: ignore[attr-defined]
        if every and step // every != self._last_step // every and self._worst:
            self._log(trainer, pl_module)
        self._last_step = step

    def _log(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        own = torch.tensor(list(self._worst.values()), dtype=torch.float64, device=trainer.strategy.root_device)
        largest = trainer.strategy.reduce(own, reduce_op="max").tolist()
        for key, value in zip(self._worst, largest, strict=True):
            module.log(key, value, on_step=True, on_epoch=False, batch_size=1)
        self._worst = {}


def figures(balance: Balance) -> dict[str, float]:
    """The logged figures of one layer and forward, by key."""
    return {
        "longmoe/load_before": balance.imbalance_before,
        "longmoe/load_after": balance.imbalance_after,
        "longmoe/guest_experts": float(balance.guests),
        "longmoe/guest_gib": balance.guest_bytes / GIB,
        "longmoe/chunks": float(balance.chunks),
        "longmoe/receive_of_bound": balance.largest_receive / max(balance.receive_bound, 1),
    }


def _dispatches(module: pl.LightningModule) -> list[PipelinedDispatch]:
    stacks = [child for child in module.modules() if isinstance(child, Experts)]
    return [stack.dispatch for stack in stacks if isinstance(stack.dispatch, PipelinedDispatch)]
