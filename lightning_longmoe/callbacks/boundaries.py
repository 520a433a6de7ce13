"""`BoundaryOffloadCallback`: checkpoint offload where `LongMoEStrategy` is not used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from lightning_longmoe.boundaries import BoundaryOffloader
from lightning_longmoe.config import BoundaryOffload, RecomputeConfig, as_config
from lightning_longmoe.recompute import recompute_blocks, restore_block

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from torch import nn


class BoundaryOffloadCallback(Callback):
    """Recomputes decoder blocks and keeps their inputs in host memory, under other strategies than ours.

    One line: ``Trainer(callbacks=[BoundaryOffloadCallback()])``, on a single device, with DDP or with Lightning's
    ModelParallelStrategy. Blocks are changed when a fit starts and get their own
    methods back when it ends; names of parameters stay as they are.

    Args:
        config: budget, and how many boundaries stay on the device.
        blocks: class names of the modules that are recomputed. None: every submodule's ``_no_split_modules``, else the
            elements of the outermost ``nn.ModuleList``.
        boundaries_per_layer: see `RecomputeConfig`.

    Attributes:
        offloader: of the current fit; ``offloader.stats()`` tells counts and bytes.

    Raises:
        ValueError: at the start of the fit, where there are no blocks, the blocks are checkpointed already, or the
            strategy is LongMoEStrategy, which has an argument for it.
    """

    def __init__(
        self,
        config: BoundaryOffload = BoundaryOffload(),
        blocks: list[str] | None = None,
        boundaries_per_layer: int = 1,
    ) -> None:
        self.config = as_config(config, BoundaryOffload, "config")
        self.recompute = RecomputeConfig(blocks=blocks, boundaries_per_layer=boundaries_per_layer)
        self.offloader: BoundaryOffloader | None = None
        self._blocks: dict[str, nn.Module] = {}

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        from lightning_longmoe.parallelize import find_blocks
        from lightning_longmoe.strategy import LongMoEStrategy

        if isinstance(trainer.strategy, LongMoEStrategy):
            raise ValueError(
                "BoundaryOffloadCallback is for other strategies: pass"
                " LongMoEStrategy(boundaries=BoundaryOffload(...)) instead."
            )
        self._blocks = find_blocks(pl_module, self.recompute.blocks)
        _refuse_checkpointed(self._blocks)
        device_type = trainer.strategy.root_device.type
        self.offloader, _ = recompute_blocks(self._blocks, self.recompute, self.config, device_type, None)

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._restore()

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._restore()

    def _restore(self) -> None:
        for block in self._blocks.values():
            restore_block(block)
        self._blocks = {}
        if self.offloader is not None:
            self.offloader.reset()
            self.offloader.close()

    @override
    def state_dict(self) -> dict[str, Any]:
        return {}


def _refuse_checkpointed(blocks: dict[str, nn.Module]) -> None:
    for name, block in blocks.items():
        if getattr(block, "gradient_checkpointing", False):
            raise ValueError(
                f"{name!r} checkpoints its activations already (gradient_checkpointing=True). Leave out"
                " `gradient_checkpointing_enable()`: BoundaryOffloadCallback recomputes the blocks itself."
            )
