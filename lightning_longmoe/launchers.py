"""Launching processes by fork or spawn, for notebooks; scripts use Lightning's own launcher."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher
from typing_extensions import override

from lightning_longmoe._compat import full_tensors

if TYPE_CHECKING:
    import lightning.pytorch as pl


class NotebookLauncher(_MultiProcessingLauncher):
    """Lightning's launcher, which hands the trained weights back to the parent as ordinary tensors.

    Gathering is a collective, so every rank does it; rank 0's result travels to the parent.
    """

    @override
    def _collect_rank_zero_results(self, trainer: pl.Trainer, results: Any) -> Any:
        module = trainer.lightning_module
        weights = full_tensors(module.state_dict())
        module.state_dict = lambda *_, **__: weights  # type: ignore[assignment]  # what the parent will load
        try:
            return super()._collect_rank_zero_results(trainer, results)
        finally:
            del module.state_dict
