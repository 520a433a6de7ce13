"""The keys are the same in every logger."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger, WandbLogger

from lightning_longmoe.callbacks import PeakMemoryMonitor, ThroughputMonitor, UnigramBaseline
from tests.callbacks.small import TOKENS, Small, SmallData, trainer

KEYS = {
    "longmoe/tokens_per_s",
    "longmoe/step_s",
    "longmoe/tokens",
    "longmoe/peak_tracked_gib",
    "longmoe/peak_tracked_rank0_gib",
    "longmoe/unigram_entropy",
}


def fit(folder: Path, logger: Any) -> None:
    callbacks = [ThroughputMonitor(), PeakMemoryMonitor(), UnigramBaseline()]
    trainer(folder, logger=logger, callbacks=callbacks).fit(Small(), datamodule=SmallData(batches=3))


def test_csv(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    fit(tmp_path, logger)
    rows = list(csv.DictReader(Path(logger.log_dir, "metrics.csv").read_text().splitlines()))
    assert set(rows[0]) >= KEYS
    assert [float(row["longmoe/tokens"]) for row in rows if row["longmoe/tokens"]] == [TOKENS, 2 * TOKENS, 3 * TOKENS]
    assert "tokens/s" not in rows[0]


def test_tensorboard(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    logger = TensorBoardLogger(tmp_path)
    fit(tmp_path, logger)
    events = accumulator.EventAccumulator(logger.log_dir).Reload()
    assert set(events.Tags()["scalars"]) >= KEYS
    assert [event.value for event in events.Scalars("longmoe/tokens")] == [TOKENS, 2 * TOKENS, 3 * TOKENS]


def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    logger = WandbLogger(save_dir=tmp_path, offline=True)
    sent: list[dict[str, float]] = []
    monkeypatch.setattr(logger.experiment, "log", lambda data, *_, **__: sent.append(data))
    fit(tmp_path, logger)
    wandb.finish()
    assert set().union(*sent) >= KEYS
    assert [row["longmoe/tokens"] for row in sent if "longmoe/tokens" in row] == [TOKENS, 2 * TOKENS, 3 * TOKENS]
