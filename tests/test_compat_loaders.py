"""The private names of Lightning's loops and torch's loaders exist and do what `_compat` takes them for."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch.overrides.distributed import UnrepeatedDistributedSamplerWrapper, _IndexBatchSamplerWrapper
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from lightning_longmoe import _compat
from tests.batches.test_evaluation import Stream


def test_an_index_is_skipped_without_loading() -> None:
    class Loading(list):  # type: ignore[type-arg]
        loaded: list[int] = []

        def __getitem__(self, index: Any) -> Any:
            self.loaded.append(index)
            return super().__getitem__(index)

    source = iter(DataLoader(Loading(range(6)), 2))
    _compat.skip_batch(source)
    assert _compat.next_indices(source) == [2, 3]
    assert next(source).tolist() == [4, 5]
    assert Loading.loaded == [4, 5]


def test_a_batch_of_a_stream_or_of_workers_is_loaded_to_be_skipped() -> None:
    for loader in (DataLoader(Stream(list(range(6))), 2), DataLoader(range(6), 2, num_workers=1)):
        source = iter(loader)
        _compat.skip_batch(source)
        assert next(source).tolist() == [2, 3]
    plain = iter([1, 2])
    _compat.skip_batch(plain)
    assert next(plain) == 2


class Module(pl.LightningModule):
    """Looks at the loops from inside."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.fetched: list[int] = []
        self.seen: list[Any] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.fetched += batch.tolist()
        return self.layer(torch.ones(1)).sum()

    def on_train_start(self) -> None:
        _compat.restore_loaders_again(self.trainer)
        _compat.fetch_again(self.trainer)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        if batch_idx == 2:
            _compat.weigh_nothing(self.trainer)
        self.log("value", batch.float().mean())
        loaders, one_after_the_other = _compat.evaluation_loaders(self.trainer)
        self.seen.append((len(loaders), one_after_the_other))

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen.append([len(batches) for batches in _compat.predictions(self.trainer)])
        return batch

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def trainer() -> pl.Trainer:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return pl.Trainer(max_epochs=1, num_sanity_val_steps=0, enable_model_summary=False, **quiet)


def test_training_data_can_be_fetched_again_from_the_start() -> None:
    module = Module()
    trainer().fit(module, DataLoader(Stream(list(range(4))), 1))
    assert module.fetched == [0, 1, 2, 3]


def test_a_step_can_weigh_nothing_in_what_is_logged() -> None:
    module = Module()
    results = trainer().validate(module, DataLoader([1, 3, 100], 1), verbose=False)
    assert results == [{"value": 2.0}]
    assert module.seen == [(1, True)] * 3


def test_the_evaluation_loaders_are_those_of_the_running_loop() -> None:
    module = Module()
    running = trainer()
    running.fit(module, DataLoader([1, 2], 1), DataLoader([1, 3, 5], 1))
    assert module.seen == [(1, True)] * 3
    both: Any = pl.utilities.CombinedLoader([DataLoader([1], 1), DataLoader([2], 1)], "max_size")
    module.seen.clear()
    module.validation_step = lambda batch, batch_idx: module.seen.append(  # type: ignore[method-assign]
        _compat.evaluation_loaders(running)[1]
    )
    running.validate(module, both, verbose=False)
    assert module.seen == [False]


def test_collected_predictions_can_be_changed() -> None:
    module = Module()
    made = trainer().predict(module, DataLoader([1, 2], 1))
    assert module.seen == [[0], [1]]
    assert made is not None
    assert [batch.tolist() for batch in made] == [[1], [2]]


def test_a_batch_index_moves() -> None:
    running = trainer()
    progress = running.fit_loop.epoch_loop.batch_progress.current
    progress.completed = 4
    _compat.move_batch_index(running, 3)
    assert (progress.ready, progress.started, progress.processed, progress.completed) == (3, 3, 3, 7)  # type: ignore[attr-defined]


def test_the_loops_tell_how_they_restart() -> None:
    running = trainer()
    assert running.fit_loop.restarted_mid_epoch is False
    assert running.fit_loop.epoch_loop.restarted_on_train_batch_end is False
    assert running.fit_loop.epoch_loop.restarting is False
    assert running.fit_loop.epoch_loop.batch_progress.is_last_batch is False


def test_lightnings_samplers_deal_by_the_attributes_that_are_changed() -> None:
    for kind in (DistributedSamplerWrapper, UnrepeatedDistributedSamplerWrapper):
        sampler: Any = kind(SequentialSampler(range(5)), num_replicas=1, rank=0, shuffle=False)
        sampler.rank, sampler.num_replicas, sampler.total_size, sampler.num_samples = 1, 2, 5, 2
        assert list(sampler) == [1, 3]
    plain = DistributedSampler(range(5), 2, 1, shuffle=False)  # type: ignore[arg-type]
    plain.total_size, plain.num_samples = 5, 2
    assert list(plain) == [1, 3]
    watched = _IndexBatchSamplerWrapper(BatchSampler(plain, 2, False))  # type: ignore[arg-type]
    assert watched.sampler is plain  # type: ignore[attr-defined]
    assert [*watched][0] == watched.seen_batch_indices[0] == [1, 3]
