"""A module whose every cost is known, and a Trainer around it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader

TOKENS = 8
"""Tokens of a batch of `loader`, unless told otherwise."""


class Small(pl.LightningModule):
    """One weight. ``spend(stage)`` is called in each step: tests let it move a clock or hold memory."""

    def __init__(self, spend: Any = None) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.spend = spend or (lambda stage: None)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        held = self.spend("train")
        loss = self.layer(batch["input_ids"].float().mean().view(1, 1)).square().mean()
        del held
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.spend("validate")
        self.log("val_loss", torch.tensor(1.5), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class SmallData(pl.LightningDataModule):
    """Batches for `Small`, and the entropy of a fair coin."""

    def __init__(self, batches: int = 4, tokens: int = TOKENS) -> None:
        super().__init__()
        self.batches, self.tokens = batches, tokens

    def train_dataloader(self) -> DataLoader:
        return loader(self.batches, self.tokens)

    def val_dataloader(self) -> DataLoader:
        return loader(1, self.tokens)

    def unigram_entropy(self) -> float:
        return 0.6931471805599453


def loader(batches: int, tokens: int = TOKENS) -> DataLoader:
    """``batches`` batches {"input_ids": [1, tokens]}."""
    return DataLoader([{"input_ids": torch.arange(tokens).view(1, -1)} for _ in range(batches)], batch_size=None)


def trainer(folder: Path | str, **settings: Any) -> pl.Trainer:
    """A quiet Trainer on one CPU process that logs every step."""
    return pl.Trainer(
        **{
            "accelerator": "cpu",
            "devices": 1,
            "max_epochs": 1,
            "logger": False,
            "log_every_n_steps": 1,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "num_sanity_val_steps": 0,
            "use_distributed_sampler": False,
            "default_root_dir": str(folder),
            **settings,
        }
    )
