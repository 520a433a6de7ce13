"""Trains `TinyLM` as a user's script would and writes what each rank saw; started by tests/test_launchers.py.

Arguments: launcher name, number of devices, folder for the reports.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from lightning_longmoe import LongMoEStrategy
from tests.tiny import TinyLM, make_batches


class Reporting(TinyLM):
    """Writes its losses when the fit ends, on every rank."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder

    def train_dataloader(self) -> DataLoader:
        rows = torch.arange(4).chunk(self.trainer.world_size)[self.trainer.global_rank]
        return DataLoader([{k: v[rows] for k, v in b.items()} for b in make_batches(4, 2)], batch_size=None)  # type: ignore[arg-type]

    def on_train_end(self) -> None:
        report = {"losses": self.losses, "world": self.trainer.world_size, "pid": os.getpid()}
        (Path(self.folder) / f"rank{self.trainer.global_rank}.json").write_text(json.dumps(report))


def main(launcher: str, devices: int, folder: str) -> None:
    torch.set_num_threads(1)
    pl.seed_everything(11, verbose=False)
    module = Reporting(folder).double()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=LongMoEStrategy(launcher=launcher),  # type: ignore[arg-type]
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(module)
    weights = {n: float(p.double().sum()) for n, p in module.named_parameters() if not hasattr(p, "placements")}
    if weights:  # fork and spawn hand ordinary tensors back to the parent; a script's module stays sharded
        (Path(folder) / "parent.json").write_text(json.dumps(weights))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
    sys.stdout.flush()
    os._exit(0)  # torch 2.13 with gloo may abort while the interpreter shuts down
