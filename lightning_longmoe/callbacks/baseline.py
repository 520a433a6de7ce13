"""`UnigramBaseline`: the validation loss beside the entropy that a model without context could reach at best."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from lightning.pytorch.callbacks import Callback
from typing_extensions import override

if TYPE_CHECKING:
    import lightning.pytorch as pl


class UnigramBaseline(Callback):
    """At each validation's end, prints the loss and the text's unigram entropy, both in nats per token.

    The entropy is that of the token frequencies alone: a model that is not well below it has learned nothing about
    order. Logged as ``longmoe/unigram_entropy``. The data module offers it as ``unigram_entropy() -> float``.

    Args:
        monitor: the logged metric that is the validation loss.

    Raises:
        ValueError: the Trainer's data module has no ``unigram_entropy``.
    """

    def __init__(self, monitor: str = "val_loss") -> None:
        self.monitor = monitor

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        data: Any = getattr(trainer, "datamodule", None)
        if not callable(getattr(data, "unigram_entropy", None)):
            raise ValueError(
                f"UnigramBaseline asks the data module for `unigram_entropy()` in nats, and {type(data).__name__} has"
                " no such method. Use LongTextDataModule, add the method, or leave this callback out."
            )

    @override
    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.sanity_checking:
            pl_module.log("longmoe/unigram_entropy", entropy_of(trainer), sync_dist=True, batch_size=1)

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.sanity_checking or self.monitor not in trainer.callback_metrics:
            return
        loss, entropy = float(trainer.callback_metrics[self.monitor]), entropy_of(trainer)
        trainer.print(
            f"{self.monitor} {loss:.3f} nats per token (perplexity {math.exp(loss):.2f}); unigram entropy of the text"
            f" {entropy:.3f} (perplexity {math.exp(entropy):.2f})"
        )


def entropy_of(trainer: pl.Trainer) -> float:
    """Unigram entropy of the data module's text, in nats."""
    return float(trainer.datamodule.unigram_entropy())  # type: ignore[attr-defined]
