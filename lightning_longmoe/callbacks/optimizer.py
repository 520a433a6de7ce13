"""`OptimizerOffloadCallback`: streamed optimizer state where `LongMoEStrategy` is not used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from typing_extensions import override

from lightning_longmoe.config import OptimizerOffload, as_config
from lightning_longmoe.optimizer.swap import offload_optimizers
from lightning_longmoe.runtime.host_memory import local_ranks, node_bytes, parse_share

if TYPE_CHECKING:
    import lightning.pytorch as pl


class OptimizerOffloadCallback(Callback):
    """Keeps AdamW's state in host memory and updates on the device, under other strategies than ours.

    One line: ``Trainer(callbacks=[OptimizerOffloadCallback()])``, on a single device, with DDP or with Lightning's
    ModelParallelStrategy. The optimizer that ``configure_optimizers`` returned stays the same object. Gradients are
    clipped by whatever the strategy clips with, before the step.

    Args:
        config: buckets, slots, moments.
        host_memory: of a node's memory, what all its ranks may fill: a fraction such as "0.8", or like "900GiB".

    Raises:
        ValueError: at the start of the fit, where there is no AdamW, too little host memory, or the strategy is
            LongMoEStrategy, which has an argument for it.
    """

    def __init__(self, config: OptimizerOffload = OptimizerOffload(), host_memory: str | float | int = "0.8") -> None:
        self.config = as_config(config, OptimizerOffload, "config")
        self._limit_bytes = parse_share(host_memory, node_bytes())

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        from lightning_longmoe.strategy import LongMoEStrategy

        strategy = trainer.strategy
        if isinstance(strategy, LongMoEStrategy):
            raise ValueError(
                "OptimizerOffloadCallback is for other strategies: pass"
                " LongMoEStrategy(optimizer_state=OptimizerOffload(...)) instead."
            )
        limit = self._limit_bytes // local_ranks()
        _, _, lines = offload_optimizers(strategy.optimizers, self.config, strategy.root_device, limit)
        strategy.optimizers = strategy.optimizers  # Lightning wraps them anew, as what they now are
        for line in lines:
            rank_zero_info(line)
