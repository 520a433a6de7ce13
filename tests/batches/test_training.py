"""Windows are counted ahead and aligned with Lightning's optimizer steps; all ranks train equally many batches."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_longmoe.batches import Batches, HostGroup, Labels, WindowedLoader
from lightning_longmoe.batches.resume import Resume
from lightning_longmoe.config import BatchConfig
from tests.batches.alone import AloneStrategy, trainer_for
from tests.batches.threads import ThreadGroup, on_threads

VALID = [3, 11, 1, 5, 0, 7, 2, 4]
"""Valid targets of each batch of `rows`."""


def rows(valid: list[int] | None = None) -> list[dict[str, Tensor]]:
    """Batches of one sequence of 13 tokens; batch i has ``valid[i]`` labels that count, and an uncounted first one."""
    made = []
    for count in VALID if valid is None else valid:
        labels = torch.full((1, 13), -100)
        labels[0, 0] = 1
        labels[0, 1 : 1 + count] = torch.arange(count)
        made.append({"input_ids": torch.zeros(1, 13, dtype=torch.int64), "labels": labels})
    return made


class Given:
    """A loader of another kind than torch's, with a length."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


class Stream(IterableDataset[Any]):
    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


class Plain(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.steps_at: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.layer(torch.ones(1)).sum()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.steps_at.append(self.trainer.fit_loop.batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def windows_of(
    loader: Any, module: Plain | None = None, config: BatchConfig | None = None, **settings: Any
) -> list[Any]:
    """(A, valid targets) that each training batch saw."""
    strategy = AloneStrategy(config, head=True)
    trainer_for(strategy, **{"max_epochs": 1, **settings}).fit(module or Plain(), loader)
    return [None if w is None else (w.accumulate, w.valid_tokens) for w in strategy.windows]


LOADERS = {
    "another kind": lambda: Given(rows()),
    "dataset": lambda: DataLoader(rows(), batch_size=None, shuffle=False),
    "without a length": lambda: DataLoader(Stream(rows()), batch_size=None),
}


@pytest.mark.parametrize("kind", LOADERS)
def test_windows_hold_the_valid_targets_of_their_batches_and_the_last_is_short(kind: str) -> None:
    module = Plain()
    expected = [(3, 15)] * 3 + [(3, 12)] * 3 + [(3, 6)] * 2
    assert windows_of(LOADERS[kind](), module, accumulate_grad_batches=3, max_epochs=2) == expected * 2
    assert module.steps_at == [2, 5, 7] * 2


@pytest.mark.parametrize("kind", LOADERS)
def test_a_window_ends_where_the_trainer_ends_the_epoch(kind: str) -> None:
    module = Plain()
    seen = windows_of(LOADERS[kind](), module, accumulate_grad_batches=2, limit_train_batches=5)
    assert seen == [(2, 14)] * 2 + [(2, 6)] * 2 + [(2, 0)]
    assert module.steps_at == [1, 3, 4]


@pytest.mark.parametrize("kind", LOADERS)
def test_the_number_of_micro_batches_may_change_between_epochs(kind: str) -> None:
    schedule = GradientAccumulationScheduler({0: 4, 1: 1, 2: 2})
    seen = windows_of(LOADERS[kind](), max_epochs=3, callbacks=[schedule])
    fours, twos = [(4, 20)] * 4 + [(4, 13)] * 4, [(2, 14)] * 2 + [(2, 6)] * 2 + [(2, 7)] * 2 + [(2, 6)] * 2
    assert seen == fours + [None] * 8 + twos


def test_labels_are_counted_unshifted_where_they_are_shifted_already() -> None:
    seen = windows_of(Given(rows()), config=BatchConfig(labels_shifted=True), accumulate_grad_batches=8)
    assert seen == [(8, sum(VALID) + 8)] * 8


def test_no_window_where_none_is_needed() -> None:
    assert windows_of(Given(rows())) == [None] * 8
    microbatch = BatchConfig(normalize="microbatch")
    assert windows_of(Given(rows()), config=microbatch, accumulate_grad_batches=2) == [None] * 8
    strategy = AloneStrategy(head=False)
    trainer_for(strategy, max_epochs=1, accumulate_grad_batches=2).fit(Plain(), Given(rows()))
    assert strategy.windows == [None] * 8


def test_a_resumed_epoch_begins_with_the_rest_of_a_window(tmp_path: Path) -> None:
    class Saving(Plain):
        def on_train_batch_end(self, *_: Any) -> None:
            if self.trainer.fit_loop.batch_idx == 3:
                self.trainer.save_checkpoint(tmp_path / "x.ckpt")

    windows_of(Given(rows()), Saving(), accumulate_grad_batches=3)
    strategy = AloneStrategy(head=True)
    trainer = trainer_for(strategy, max_epochs=1, accumulate_grad_batches=3)
    trainer.fit(Plain(), Given(rows()), ckpt_path=tmp_path / "x.ckpt")
    assert [(w.accumulate, w.valid_tokens) for w in strategy.windows] == [(3, 7)] * 2 + [(3, 6)] * 2


def test_an_empty_window_is_told_once() -> None:
    with pytest.warns(UserWarning, match="no valid label on any rank") as caught:
        seen = windows_of(Given(rows([0, 0, 0, 0, 2, 1])), accumulate_grad_batches=2)
    assert seen == [(2, 0)] * 4 + [(2, 3)] * 2
    assert len([w for w in caught if "no valid label" in str(w.message)]) == 1


def test_a_look_into_the_loader_does_not_disturb_the_training() -> None:
    class Peeking(Plain):
        def on_train_start(self) -> None:
            next(iter(self.trainer.train_dataloader))

    seen = windows_of(DataLoader(rows(), batch_size=None), Peeking(), accumulate_grad_batches=4)
    assert seen == [(4, 20)] * 4 + [(4, 13)] * 4


# -------------------------------------------------------------------------------------------------------------- errors
def test_batches_without_labels_are_refused_with_three_ways_out() -> None:
    unlabelled = [{"input_ids": batch["input_ids"]} for batch in rows()]
    with pytest.raises(ValueError, match="show no labels to count") as error:
        windows_of(Given(unlabelled), accumulate_grad_batches=2)
    for way in ("`labels`", "count_valid_targets", "normalize='microbatch'", "accumulate_grad_batches=1"):
        assert way in str(error.value)


def test_the_modules_hook_counts_batches_without_labels() -> None:
    class Counting(Plain):
        def count_valid_targets(self, batch: Any) -> int:
            return int(batch[0].numel())

    batches = [(torch.zeros(1, count),) for count in (3, 5, 7)]
    assert windows_of(Given(batches), Counting(), accumulate_grad_batches=2) == [(2, 8)] * 2 + [(2, 7)]


def test_several_training_dataloaders_are_refused() -> None:
    class Two(Plain):
        def train_dataloader(self) -> Any:
            return {"a": Given(rows()), "b": Given(rows())}

    with pytest.raises(ValueError, match="there are 2 of them"):
        windows_of(None, Two(), accumulate_grad_batches=2)
    assert windows_of(None, Two()) == [None] * 8


def test_a_step_that_takes_the_iterator_is_refused() -> None:
    class ByIterator(Plain):
        def training_step(self, dataloader_iter: Any) -> Tensor:
            next(dataloader_iter)
            return self.layer(torch.ones(1)).sum()

    with pytest.raises(ValueError, match="takes a dataloader_iter"):
        windows_of(Given(rows()), ByIterator(), accumulate_grad_batches=2)


# -------------------------------------------------------------------------------------------------------------- ranks
def loader_on(ranks: HostGroup, data: Any) -> WindowedLoader:
    trainer: Any = SimpleNamespace(fit_loop=SimpleNamespace(epoch_loop=SimpleNamespace(restarting=False)))
    labels = Labels(BatchConfig(), active=True)
    return WindowedLoader(data, labels=labels, ranks=ranks, resume=Resume(trainer, ranks.size))


def test_every_rank_has_the_length_of_the_shortest() -> None:
    def play(ranks: ThreadGroup) -> Any:
        loader = loader_on(ranks, DataLoader(range(3 + 2 * ranks.rank), batch_size=None))
        return len(loader), list(loader), list(loader)

    with pytest.warns(UserWarning, match=r"between 3 and 7 training batches.* 6 batches over all ranks are not used"):
        results = on_threads(3, play)
    assert results == [(3, [0, 1, 2], [0, 1, 2])] * 3


def test_loaders_without_a_length_stop_together_after_a_vote() -> None:
    def play(ranks: ThreadGroup) -> Any:
        loader = loader_on(ranks, DataLoader(Stream(rows([1] * (3 + ranks.rank))), batch_size=None))
        with pytest.raises(TypeError, match="no length"):
            len(loader)
        return len(list(loader)), len(list(loader))

    with pytest.warns(UserWarning, match="because 1 of 2 ranks have no further training batch") as caught:
        assert on_threads(2, play) == [(3, 3)] * 2
    assert len([w for w in caught if "no further" in str(w.message)]) <= 2  # once on each rank


def test_one_rank_without_a_length_makes_all_vote() -> None:
    def play(ranks: ThreadGroup) -> Any:
        data: Any = rows([1] * 4) if ranks.rank == 0 else DataLoader(Stream(rows([1] * 3)), batch_size=None)
        return len(list(loader_on(ranks, data)))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert on_threads(2, play) == [3, 3]


def test_a_rank_without_any_batch_is_an_error_on_all_ranks() -> None:
    def play(ranks: ThreadGroup) -> str:
        with pytest.raises(ValueError, match="no batch on rank") as error:
            loader_on(ranks, DataLoader(range(2 - 2 * ranks.rank), batch_size=None))
        return str(error.value)

    first, second = on_threads(2, play)
    assert first == second
    assert "rank(s) [1] (batches of each rank: [2, 0])" in first


class Strategyless:
    """As much of a Trainer as a window needs."""

    def __init__(self, accumulate: int) -> None:
        self.accumulate_grad_batches = accumulate
        self.num_training_batches = float("inf")
        self.lightning_module = Plain()
        self.state = SimpleNamespace(stage="train")
        self.fit_loop = SimpleNamespace(epoch_loop=SimpleNamespace(restarting=False))
        self.train_dataloader: Any = None


@pytest.mark.parametrize("context", [1, 2])
def test_valid_targets_are_summed_over_data_ranks(context: int) -> None:
    """Counts (3, 1) and (11, 5); ranks that share data count the same labels once."""
    counts = [[3, 1], [11, 5]]

    def play(ranks: ThreadGroup) -> list[int]:
        trainer: Any = Strategyless(2)
        data_rank = ranks.rank // context
        batches = Batches(BatchConfig(), trainer, head=True, data_rank=data_rank, data_size=2, ranks=ranks)
        trainer.train_dataloader = batches.wrap(rows(counts[data_rank]))
        seen = []
        for index, _ in enumerate(trainer.train_dataloader):
            window = batches.next_window(index)
            assert window is not None
            seen.append(window.valid_tokens)
        return seen

    assert on_threads(2 * context, play) == [[20, 20]] * (2 * context)


def test_uncountable_batches_on_one_rank_are_an_error_on_all() -> None:
    def play(ranks: ThreadGroup) -> None:
        trainer: Any = Strategyless(2)
        batches = Batches(BatchConfig(), trainer, head=True, data_rank=ranks.rank, data_size=2, ranks=ranks)
        data = rows([1, 1]) if ranks.rank == 0 else [{}, {}]
        trainer.train_dataloader = batches.wrap(data)
        next(iter(trainer.train_dataloader))
        with pytest.raises(ValueError, match="show no labels"):
            batches.next_window(0)

    on_threads(2, play)


def test_a_copied_head_belongs_to_the_same_run() -> None:
    trainer: Any = Strategyless(1)
    batches = Batches(BatchConfig(), trainer, head=True)
    assert copy.deepcopy([batches.check_targets])[0].__self__ is batches
