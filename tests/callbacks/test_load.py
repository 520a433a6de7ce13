"""`ExpertLoadMonitor` and the booked peak of the dispatch, in a real run."""

from __future__ import annotations

import csv
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch.distributed as dist
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from lightning_longmoe import LongMoEStrategy
from lightning_longmoe.callbacks import ExpertLoadMonitor, PeakMemoryMonitor
from lightning_longmoe.config import ParallelConfig
from tests.pool import RemoteError, run_on_ranks
from tests.test_dispatch_in_training import MOVING
from tests.test_parity import all_to_experts_of_one_rank
from tests.tiny import TinyLM, make_batches


def _fit(folder: str, size: int) -> None:
    module = TinyLM(lr=0.0)
    all_to_experts_of_one_rank(module)
    strategy = LongMoEStrategy(parallel=ParallelConfig(expert_parallel_size=size), dispatch=MOVING)  # type: ignore[arg-type]
    if size == 1:
        strategy.dispatch = None
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=strategy,
        max_steps=2,
        log_every_n_steps=1,
        logger=CSVLogger(folder, flush_logs_every_n_steps=1),
        callbacks=[ExpertLoadMonitor(), PeakMemoryMonitor()],
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(module, DataLoader(make_batches(2, 2), batch_size=None))  # type: ignore[arg-type]


def test_load_before_and_after_the_plan_reaches_the_logger(tmp_path: Path) -> None:
    run_on_ranks(2, _fit, str(tmp_path), 2)
    with next(tmp_path.rglob("metrics.csv")).open() as file:
        rows = [row for row in csv.DictReader(file) if row["longmoe/load_before"]]
    assert len(rows) == 2
    for row in rows:
        assert float(row["longmoe/load_before"]) == 2.0  # all rows on one of two ranks
        assert float(row["longmoe/load_after"]) == pytest.approx(1.0, abs=0.05)
        assert float(row["longmoe/guest_experts"]) >= 1
        assert 0 < float(row["longmoe/receive_of_bound"]) <= 1
        assert float(row["longmoe/chunks"]) == 5  # 24 tokens of each rank in chunks of 5
        assert float(row["longmoe/peak_dispatch_gib"]) > 0


def test_nothing_to_watch_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RemoteError, match="ExpertLoadMonitor found no experts"):
        run_on_ranks(1, _fit, str(tmp_path), 1)
