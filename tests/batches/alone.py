"""A strategy for one process that does with its batches what LongMoEStrategy does, and a module that records them."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn

from lightning_longmoe.batches import Batches, HostGroup
from lightning_longmoe.config import BatchConfig

KEY = "resume"


class AloneStrategy(SingleDeviceStrategy):
    """Single device, with `Batches` in the places where LongMoEStrategy calls it."""

    restore_checkpoint_after_setup = True  # type: ignore[assignment]

    def __init__(
        self, config: BatchConfig | None = None, head: bool = False, data_size: int = 1, data_rank: int = 0
    ) -> None:
        super().__init__("cpu")
        self.config = config or BatchConfig()
        self.head, self.data_size, self.data_rank = head, data_size, data_rank
        self.ranks = HostGroup()
        self.windows: list[Any] = []

    def setup(self, trainer: pl.Trainer) -> None:
        sizes = {"data_rank": self.data_rank, "data_size": self.data_size}
        self.batches = Batches(self.config, trainer, head=self.head, ranks=self.ranks, **sizes)
        super().setup(trainer)

    def process_dataloader(self, dataloader: object) -> object:
        return self.batches.wrap(dataloader)

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        return self.batches.prepare(super().batch_to_device(batch, device, dataloader_idx), dataloader_idx)

    def on_train_start(self) -> None:
        self.batches.on_train_start()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.windows.append(self.batches.next_window(batch_idx))

    def on_validation_start(self) -> None:
        self.batches.on_evaluation_start()

    on_test_start = on_predict_start = on_validation_start

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        self.batches.begin_step()
        output = super().validation_step(*args, **kwargs)
        self.batches.end_step(output)
        return output

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self.batches.prediction(super().predict_step(*args, **kwargs), args[0])

    def on_predict_end(self) -> None:
        self.batches.on_predict_end()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        super().save_checkpoint({**checkpoint, KEY: self.batches.resume_state()}, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(checkpoint_path, True)  # also proves that the state is plain
        self.batches.load_resume_state(checkpoint.pop(KEY))
        return checkpoint


class Recorder(pl.LightningModule):
    """Trains on batches of sample numbers; records them, and what the dropout drew."""

    def __init__(self, validate: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.dropout = nn.Dropout(0.5)
        self.ids: list[list[int]] = []
        self.noise: list[float] = []
        self.masks: list[list[float]] = []
        self.validate = validate

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        numbers, noise = batch
        self.ids.append(numbers.tolist())
        self.noise.append(float(noise.sum()))
        mask = self.dropout(torch.ones(8))
        self.masks.append(mask.tolist())
        return (self.layer(numbers.float().unsqueeze(1)) * mask.sum()).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 1e-4)


def trainer_for(strategy: AloneStrategy, **settings: Any) -> pl.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return pl.Trainer(strategy=strategy, **{"enable_checkpointing": False, **quiet, **settings})
