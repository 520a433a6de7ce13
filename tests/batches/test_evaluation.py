"""Evaluation sees every sample once, on equally many batches of each rank; padding counts for nothing."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from lightning_longmoe import LongMoEStrategy
from lightning_longmoe.batches import EvaluationLoader, Labels
from lightning_longmoe.batches.evaluation import deal_without_repeats, rows_of, without_rows
from lightning_longmoe.config import BatchConfig
from tests.batches.threads import ThreadGroup, on_threads
from tests.pool import run_on_ranks

LABELS = Labels(BatchConfig(), active=True)


def samples(count: int) -> list[dict[str, Tensor]]:
    return [{"input_ids": torch.tensor([i, i + 1]), "labels": torch.tensor([i, i + 1])} for i in range(count)]


class Stream(IterableDataset[Any]):
    def __init__(self, data: list[Any]) -> None:
        self.data = data

    def __iter__(self) -> Iterator[Any]:
        return iter(self.data)


@pytest.mark.parametrize(("count", "size"), [(7, 2), (8, 2), (1, 2), (9, 4), (2, 4)])
def test_dealt_samples_do_not_repeat(count: int, size: int) -> None:
    data = list(range(count))
    for make in (
        lambda rank: DistributedSampler(data, size, rank, shuffle=False),
        lambda rank: DistributedSampler(data, size, rank, shuffle=True, seed=5),
        lambda rank: DistributedSamplerWrapper(SequentialSampler(data), num_replicas=size, rank=rank, shuffle=False),
    ):
        dealt: list[int] = []
        for rank in range(size):
            loader = DataLoader(data, 2, sampler=make(rank))
            deal_without_repeats(loader, rank, size)
            mine = torch.cat([torch.empty(0), *loader]).tolist()
            assert len(loader) == (len(mine) + 1) // 2
            dealt += mine
        assert sorted(dealt) == data


def test_a_batch_samplers_sampler_is_dealt_too() -> None:
    data = list(range(5))
    loaders = [
        DataLoader(data, batch_sampler=BatchSampler(DistributedSampler(data, 2, rank, shuffle=False), 2, False))
        for rank in range(2)
    ]
    for rank, loader in enumerate(loaders):
        deal_without_repeats(loader, rank, 2)
    assert [torch.cat(list(loader)).tolist() for loader in loaders] == [[0, 2, 4], [1, 3]]


def real_and_padding(batches: list[dict[str, Tensor]]) -> tuple[list[int], list[bool]]:
    """First tokens of the batches with targets; which batches have none."""
    empty = [bool((batch["labels"] == -100).all()) for batch in batches]
    real = [batch["input_ids"][:, 0].tolist() for batch, none in zip(batches, empty, strict=True) if not none]
    return sum(real, []), empty


@pytest.mark.parametrize("sized", [True, False])
@pytest.mark.parametrize("count", [1, 2, 5, 7])
def test_ranks_run_equally_many_batches_and_padding_has_no_target(sized: bool, count: int) -> None:
    def play(ranks: ThreadGroup) -> Any:
        mine = samples(count)[ranks.rank :: 2]
        data: Any = DataLoader(mine, 2) if sized else DataLoader(Stream(mine), 2)
        loader = EvaluationLoader(data, labels=LABELS, ranks=ranks)
        passes = [list(loader) for _ in range(2)]
        flags = [loader.is_padding(i) for i in range(len(passes[0]))]
        return [real_and_padding(batches) for batches in passes], flags

    (first, flags_0), (second, flags_1) = on_threads(2, play)
    for (mine, empty_0), (others, empty_1) in zip(first, second, strict=True):
        assert len(empty_0) == len(empty_1) == (count + 3) // 4
        assert mine + others == list(range(0, count, 2)) + list(range(1, count, 2))
        assert (empty_0, empty_1) == (flags_0, flags_1)


def test_loaders_without_any_batch_end_at_once() -> None:
    def play(ranks: ThreadGroup) -> Any:
        streams = [DataLoader(Stream([]), 2), DataLoader([], 2, sampler=[])]
        return [list(EvaluationLoader(data, labels=LABELS, ranks=ranks)) for data in streams]

    assert on_threads(2, play) == [[[], []]] * 2


def test_real_labels_and_the_dataset_stay_as_they_were() -> None:
    data = samples(3)

    def play(ranks: ThreadGroup) -> None:
        list(EvaluationLoader(DataLoader(data[ranks.rank :: 2], 1), labels=LABELS, ranks=ranks))

    on_threads(2, play)
    assert all(torch.equal(sample["labels"], sample["input_ids"]) for sample in data)


def test_evaluation_draws_no_random_number_of_the_training() -> None:
    loader = EvaluationLoader(
        DataLoader(Noisy(), 2, shuffle=True), labels=LABELS, ranks=on_threads(1, lambda ranks: ranks)[0]
    )
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    noise = torch.cat(list(loader))
    assert torch.equal(torch.rand(3), expected)
    assert noise.unique().numel() == 6  # its own numbers go on from batch to batch


class Noisy(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Tensor:
        return torch.rand(())


Pair = namedtuple("Pair", "logits name")


def test_outputs_of_padding_batches_lose_their_rows() -> None:
    cut = without_rows({"a": torch.ones(3, 2), "b": [torch.ones(3), 1.5], "c": Pair(torch.ones(3, 1), "x")}, 3)
    assert cut["a"].shape == (0, 2)
    assert cut["b"][0].shape == (0,)
    assert cut["b"][1] is None
    assert cut["c"].logits.shape == (0, 1)
    assert cut["c"].name is None
    assert without_rows(torch.tensor(1.0), 3) is None
    assert without_rows(["one", "two", "three"], 3) == []
    assert rows_of({"x": "text", "y": torch.ones(4, 2)}) == 4
    assert rows_of((torch.tensor(1), torch.ones(2))) == 2
    assert rows_of("text") is None


# ----------------------------------------------------------------------------------------------- under the strategy
class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Counting(pl.LightningModule):
    """Nested FSDP units, so that each forward is a collective; no labels and no head of ours."""

    def __init__(self, train: int = 4, stream: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Inner(), Inner()])
        self.train_count, self.stream = train, stream
        self.trained = 0

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.trained += 1
        return self(batch).sum()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self(batch)
        self.log("value", batch.mean(), sync_dist=True)

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return batch[:, 0] + 0 * self(batch)[:, 0]

    def train_dataloader(self) -> Any:
        import torch.distributed as dist

        count = self.train_count + dist.get_rank()
        data: Any = [torch.ones(2)] * count
        return DataLoader(Stream(data) if self.stream else data, 1)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def trainer_on(world: int, **settings: Any) -> pl.Trainer:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return pl.Trainer(
        accelerator="cpu", devices=world, strategy=LongMoEStrategy(), enable_model_summary=False, **quiet, **settings
    )


def values(count: int) -> list[Tensor]:
    return [torch.full((2,), float(10**i)) for i in range(count)]


def validate(count: int, stream: bool) -> float:
    import torch.distributed as dist

    data: Any = values(count)
    if stream:
        data = Stream(data[dist.get_rank() :: dist.get_world_size()])
    return trainer_on(dist.get_world_size()).validate(Counting(), DataLoader(data, 1), verbose=False)[0]["value"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("count", [1, 7])
def test_validation_of_uneven_samples_ends_and_weighs_only_real_ones(count: int, stream: bool) -> None:
    expected = pytest.approx(sum(10**i for i in range(count)) / count, rel=1e-6)
    assert run_on_ranks(2, validate, count, stream, timeout_s=20) == [expected, expected]


def fit_uneven(stream: bool) -> tuple[int, int]:
    module = Counting(train=3, stream=stream)
    trainer = trainer_on(2, max_epochs=2, use_distributed_sampler=False)
    trainer.fit(module, val_dataloaders=DataLoader(values(1), 1))
    return module.trained, trainer.global_step


@pytest.mark.parametrize("stream", [False, True])
def test_training_on_3_and_4_batches_ends_after_3_on_both_ranks(stream: bool) -> None:
    assert run_on_ranks(2, fit_uneven, stream, timeout_s=20) == [(6, 6), (6, 6)]


class Writer(BasePredictionWriter):
    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.seen: list[Any] = []

    def write_on_batch_end(
        self, trainer: Any, module: Any, prediction: Any, indices: Any, batch: Any, batch_idx: int, loader: int
    ) -> None:
        self.seen.append((prediction.tolist(), list(indices)))

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, indices: Any) -> None:
        self.seen.append([list(batch) for batch in indices[0]])


def predict(count: int) -> Any:
    import torch.distributed as dist

    writer = Writer()
    trainer = trainer_on(dist.get_world_size(), callbacks=[writer])
    data = [torch.full((2,), float(i)) for i in range(count)]
    predictions = trainer.predict(Counting(), DataLoader(data, 2))
    return [batch.tolist() for batch in predictions or []], writer.seen


def test_predictions_come_once_for_each_sample_and_without_padding() -> None:
    (first, _), (second, _) = run_on_ranks(2, predict, 9, timeout_s=20)
    assert first == [[0, 2], [4, 6], [8]]
    assert second == [[1, 3], [5, 7]]


def test_prediction_writers_see_padding_without_rows_and_indices() -> None:
    (first, seen_first), (second, seen_second) = run_on_ranks(2, predict, 1, timeout_s=20)
    assert first == [[0]]
    assert second == []
    assert seen_first == [([0], [0]), [[0]]]
    assert seen_second == [([], []), [[]]]
