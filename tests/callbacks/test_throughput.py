"""`ThroughputMonitor` against a clock that the test moves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_longmoe.callbacks import ThroughputMonitor, throughput
from tests.callbacks.small import TOKENS, Small, SmallData, loader, trainer
from tests.pool import run_on_ranks


class Clock:
    """Stands for the module ``time``: moves only when told."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s

    def spend(self, stage: str) -> None:
        self.now_s += 2.0 if stage == "train" else 100.0


class Recorder(pl.Callback):
    """What the progress bar and the loggers would get after each step."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        logged = {key: float(value) for key, value in trainer.callback_metrics.items()}
        self.rows.append({**logged, "bar": trainer.progress_bar_metrics.get("tokens/s")})


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(throughput, "time", clock)
    return clock


def test_rates_are_those_of_the_steps_and_validation_does_not_count(tmp_path: Path, clock: Clock) -> None:
    recorder = Recorder()
    fitting = trainer(tmp_path, callbacks=[ThroughputMonitor(), recorder], val_check_interval=2)
    fitting.fit(Small(clock.spend), datamodule=SmallData(batches=4))
    last = recorder.rows[-1]
    assert last["longmoe/step_s"] == 2.0
    assert last["longmoe/tokens_per_s"] == TOKENS / 2.0
    assert last["longmoe/tokens"] == 4 * TOKENS
    assert last["bar"] == TOKENS / 2


def test_a_step_holds_all_micro_batches_of_its_window(tmp_path: Path, clock: Clock) -> None:
    recorder = Recorder()
    fitting = trainer(tmp_path, callbacks=[ThroughputMonitor(), recorder], accumulate_grad_batches=2)
    fitting.fit(Small(clock.spend), loader(4))
    assert recorder.rows[-1]["longmoe/step_s"] == 4.0
    assert recorder.rows[-1]["longmoe/tokens_per_s"] == TOKENS / 2.0


def test_the_rate_forgets_steps_before_the_window(tmp_path: Path, clock: Clock) -> None:
    def first_is_slow(stage: str) -> None:
        clock.now_s += 50.0 if clock.now_s == 0 else 1.0

    recorder = Recorder()
    fitting = trainer(tmp_path, callbacks=[ThroughputMonitor(window=2), recorder])
    fitting.fit(Small(first_is_slow), loader(4))
    assert [row["longmoe/step_s"] for row in recorder.rows] == [50.0, 25.5, 1.0, 1.0]


def test_tokens_continue_from_a_checkpoint(tmp_path: Path, clock: Clock) -> None:
    first = trainer(tmp_path, callbacks=[ThroughputMonitor()])
    first.fit(Small(clock.spend), loader(3))
    first.save_checkpoint(tmp_path / "three.ckpt")
    recorder = Recorder()
    second = trainer(tmp_path, callbacks=[ThroughputMonitor(), recorder], max_epochs=2)
    second.fit(Small(clock.spend), loader(3), ckpt_path=tmp_path / "three.ckpt")
    assert recorder.rows[-1]["longmoe/tokens"] == 6 * TOKENS


def test_more_tokens_than_a_float32_can_count_are_counted_exactly(tmp_path: Path, clock: Clock) -> None:
    monitor, recorder = ThroughputMonitor(tokens=lambda batch: 2**24 + 1), Recorder()
    trainer(tmp_path, callbacks=[monitor, recorder]).fit(Small(clock.spend), loader(3))
    assert recorder.rows[-1]["longmoe/tokens"] == 3 * (2**24 + 1)


def test_a_batch_without_input_ids_needs_a_tokens_function() -> None:
    with pytest.raises(ValueError, match=r"\['image'\].*ThroughputMonitor\(tokens=function\)"):
        throughput.count_input_ids({"image": torch.zeros(1)})
    with pytest.raises(ValueError, match="window=0"):
        ThroughputMonitor(window=0)


def fit_with_unequal_tokens(folder: str, strategy: str) -> list[dict[str, float]]:
    rank = torch.distributed.get_rank()
    recorder = Recorder()
    fitting = trainer(folder, devices=2, strategy=strategy, callbacks=[ThroughputMonitor(), recorder])
    fitting.fit(Small(), loader(3, tokens=10 + 20 * rank))
    return recorder.rows


@pytest.mark.parametrize("strategy", ["longmoe", "ddp"])
def test_tokens_of_all_ranks_are_summed_and_every_rank_logs_the_same(tmp_path: Path, strategy: str) -> None:
    rows = run_on_ranks(2, fit_with_unequal_tokens, str(tmp_path), strategy)
    assert rows[0] == rows[1]
    assert rows[0][-1]["longmoe/tokens"] == 3 * (10 + 30)
    last = rows[0][-1]
    assert last["longmoe/tokens_per_s"] == pytest.approx((10 + 30) / last["longmoe/step_s"])


def test_ranks_that_a_stock_strategy_hands_the_same_batch_count_it_once() -> None:
    class TensorParallel:
        world_size = 8
        distributed_sampler_kwargs = {"num_replicas": 2, "rank": 0}

    assert throughput.times_counted(TensorParallel()) == 4
    assert throughput.times_counted(object()) == 1
