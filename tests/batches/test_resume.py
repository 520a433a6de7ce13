"""A run that is continued within an epoch sees the data and the random numbers of the unbroken run."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from tests.batches.alone import AloneStrategy, Recorder, trainer_for


class Numbers(Dataset[Any]):
    """Sample i is (i, noise): the noise comes from all three generators."""

    def __init__(self, count: int = 20) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return index, torch.rand(()).item() + random.random() + float(np.random.rand())


class NumberStream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        numbers = Numbers()
        return iter([numbers[i] for i in torch.randperm(20).tolist()])


class StatefulLoader:
    """Keeps its own position, as torchdata's StatefulDataLoader does."""

    def __init__(self) -> None:
        self.position = 0
        self.loads: list[int] = []

    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Iterator[Any]:
        while self.position < 10:
            self.position += 1
            yield torch.tensor([self.position - 1]), torch.rand(1)
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.loads.append(state["position"])
        self.position = state["position"]


def run(
    folder: Path, loader: Any, save_at: int, resume: bool, kind: type[Recorder] = Recorder, **settings: Any
) -> Recorder:
    """Train; keep a checkpoint after step ``save_at``; or continue from it."""
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    module = kind()
    keep = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=save_at, save_top_k=-1)
    settings = {"max_epochs": 2, **settings}
    trainer = trainer_for(AloneStrategy(), callbacks=[keep], enable_checkpointing=True, **settings)
    path = folder / f"step={save_at}.ckpt"
    if resume:
        torch.manual_seed(99)  # must not matter
        random.seed(99)
    trainer.fit(module, loader, **({"ckpt_path": path} if resume else {}))
    return module


def assert_continues(unbroken: Recorder, resumed: Recorder, done: int) -> None:
    assert resumed.ids == unbroken.ids[done:]
    assert resumed.masks == unbroken.masks[done:]
    assert resumed.noise == unbroken.noise[done:]
    for name, value in unbroken.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name


LOADERS = {
    "shuffled": lambda: DataLoader(Numbers(), batch_size=2, shuffle=True),
    "in order": lambda: DataLoader(Numbers(), batch_size=2),
    "without a length": lambda: DataLoader(NumberStream(), batch_size=2),
    "distributed sampler": lambda: DataLoader(
        Numbers(), 2, sampler=DistributedSampler(Numbers(), 1, 0, shuffle=True, seed=3)
    ),
}


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("save_at", [5, 10, 13])
@pytest.mark.parametrize("limit", [{"max_epochs": 2}, {"max_epochs": -1, "max_steps": 20}])
def test_resumed_run_continues_data_and_dropout_bit_equal(
    tmp_path: Path, kind: str, save_at: int, limit: dict[str, int]
) -> None:
    unbroken = run(tmp_path, LOADERS[kind](), save_at, resume=False, **limit)
    resumed = run(tmp_path, LOADERS[kind](), save_at, resume=True, **limit)
    assert len(unbroken.ids) == 20
    assert sorted(sum(unbroken.ids[:10], [])) == list(range(20))
    assert_continues(unbroken, resumed, save_at)


def test_resumed_run_continues_with_worker_processes(tmp_path: Path) -> None:
    def loader() -> Any:
        return DataLoader(Numbers(), batch_size=2, shuffle=True, num_workers=2)

    unbroken = run(tmp_path, loader(), 5, resume=False, max_epochs=1)
    assert_continues(unbroken, run(tmp_path, loader(), 5, resume=True, max_epochs=1), 5)


def test_resumed_run_continues_within_accumulation(tmp_path: Path) -> None:
    def loader() -> Any:
        return DataLoader(Numbers(), batch_size=2, shuffle=True)

    unbroken = run(tmp_path, loader(), 2, resume=False, accumulate_grad_batches=3)
    resumed = run(tmp_path, loader(), 2, resume=True, accumulate_grad_batches=3)
    assert_continues(unbroken, resumed, 6)


def test_validation_between_does_not_change_training(tmp_path: Path) -> None:
    def data() -> Any:
        return DataLoader(Numbers(), batch_size=2, shuffle=True)

    class Validated(Recorder):
        def val_dataloader(self) -> Any:
            return DataLoader(Numbers(), batch_size=2)

    without = run(tmp_path / "a", data(), 5, resume=False)
    unbroken = run(tmp_path / "b", data(), 5, resume=False, kind=Validated, val_check_interval=5)
    assert unbroken.ids == without.ids
    assert unbroken.masks == without.masks
    resumed = run(tmp_path / "b", data(), 5, resume=True, kind=Validated, val_check_interval=5)
    assert_continues(unbroken, resumed, 5)


@pytest.mark.parametrize("name", ["shuffled", "without a length"])
@pytest.mark.parametrize("at", [5, 10])
def test_checkpoint_written_after_a_validation_continues(tmp_path: Path, name: str, at: int) -> None:
    class Validated(Recorder):
        def val_dataloader(self) -> Any:
            return DataLoader(Numbers(), batch_size=2)

        def on_validation_end(self) -> None:
            path = tmp_path / f"step={self.trainer.global_step}.ckpt"
            if not self.trainer.sanity_checking and not path.exists():
                self.trainer.save_checkpoint(path)

    unbroken = run(tmp_path, LOADERS[name](), 50, resume=False, kind=Validated, val_check_interval=5)
    resumed = Validated()
    trainer = trainer_for(AloneStrategy(), max_epochs=2, val_check_interval=5)
    trainer.fit(resumed, LOADERS[name](), ckpt_path=tmp_path / f"step={at}.ckpt")
    assert_continues(unbroken, resumed, at)


def test_scheduler_that_asks_for_the_number_of_steps_does_not_disturb_the_resume(tmp_path: Path) -> None:
    """`estimated_stepping_batches` sets the loaders up before the checkpoint is read."""

    class Asking(Recorder):
        def configure_optimizers(self) -> Any:
            assert self.trainer.estimated_stepping_batches == 20 or self.trainer.max_steps == 20
            return super().configure_optimizers()

    for name in ("shuffled", "without a length"):
        settings = {"max_steps": 20} if name == "without a length" else {}
        unbroken = run(tmp_path / name, LOADERS[name](), 5, resume=False, kind=Asking, **settings)
        resumed = run(tmp_path / name, LOADERS[name](), 5, resume=True, kind=Asking, **settings)
        assert_continues(unbroken, resumed, 5)


def test_no_warning_that_the_loader_cannot_resume(tmp_path: Path) -> None:
    run(tmp_path, LOADERS["shuffled"](), 5, resume=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(tmp_path, LOADERS["shuffled"](), 5, resume=True)
    assert not [str(w.message) for w in caught if "not resumable" in str(w.message)]


def test_skipped_batches_are_not_loaded(tmp_path: Path) -> None:
    class Counting(Numbers):
        loaded = 0

        def __getitem__(self, index: int) -> Any:
            Counting.loaded += 1
            return super().__getitem__(index)

    def loader() -> Any:
        return DataLoader(Counting(), batch_size=2, shuffle=True)

    run(tmp_path, loader(), 5, resume=False, max_epochs=1)
    Counting.loaded = 0
    run(tmp_path, loader(), 5, resume=True, max_epochs=1)
    assert Counting.loaded == 10  # the samples of batches 5 to 9


def test_loader_with_its_own_state_is_not_skipped(tmp_path: Path) -> None:
    unbroken = run(tmp_path, StatefulLoader(), 4, resume=False)
    loader = StatefulLoader()
    resumed = run(tmp_path, loader, 4, resume=True)
    assert loader.loads == [4]
    assert_continues(unbroken, resumed, 4)


def test_batch_that_was_interrupted_is_trained_again(tmp_path: Path) -> None:
    class Stopping(Recorder):
        stop = True

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.stop and self.trainer.global_step == 6:
                self.trainer.save_checkpoint(tmp_path / "step=6.ckpt")
            return super().training_step(batch, batch_idx)

    unbroken = run(tmp_path, LOADERS["shuffled"](), 50, resume=False, kind=Stopping)
    resumed = Recorder()
    torch.manual_seed(5)
    trainer_for(AloneStrategy(), max_epochs=2).fit(resumed, LOADERS["shuffled"](), ckpt_path=tmp_path / "step=6.ckpt")
    assert_continues(unbroken, resumed, 6)


# ----------------------------------------------------------------------------------------- another number of data ranks
def dealt(size: int, rank: int, batch: int) -> Any:
    sampler = DistributedSampler(Numbers(24), size, rank, shuffle=True, seed=3)
    return DataLoader(Numbers(24), batch, sampler=sampler)


def train_as(folder: Path, size: int, rank: int, batch: int, resume_from: Path | None = None) -> list[list[int]]:
    module = Recorder()
    keep = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=3, save_top_k=-1)
    strategy = AloneStrategy(data_size=size, data_rank=rank)
    trainer = trainer_for(strategy, max_epochs=1, callbacks=[keep], enable_checkpointing=True)
    trainer.fit(module, dealt(size, rank, batch), ckpt_path=resume_from)
    return module.ids


@pytest.mark.parametrize(("old", "new", "batch"), [(2, 1, 2), (1, 2, 2), (4, 2, 2), (2, 4, 2), (1, 3, 4), (3, 2, 2)])
def test_other_number_of_data_ranks_continues_after_the_trained_samples(
    tmp_path: Path, old: int, new: int, batch: int
) -> None:
    order = sum(train_as(tmp_path / "one", 1, 0, 1), [])
    parts = [train_as(tmp_path / f"old{rank}", old, rank, batch) for rank in range(old)]
    trained = {number for part in parts for ids in part[:3] for number in ids}
    assert trained == set(order[: 3 * old * batch])
    continued = [
        train_as(tmp_path / f"new{rank}", new, rank, batch, tmp_path / "old0" / "step=3.ckpt") for rank in range(new)
    ]
    rest = [number for part in continued for ids in part for number in ids]
    assert sorted(rest) == sorted(order[3 * old * batch :])  # nothing repeats, nothing is left out
    steps = {len(part) for part in continued}
    assert len(steps) == 1


def test_samples_that_no_batch_can_hold_are_left_out_with_a_warning(tmp_path: Path) -> None:
    train_as(tmp_path / "old", 1, 0, 1)
    with pytest.warns(UserWarning, match="ends 3 samples into a global batch of 4 samples: the other 1"):
        ids = train_as(tmp_path / "new", 2, 0, 2, tmp_path / "old" / "step=3.ckpt")
    assert len(ids) == 5
