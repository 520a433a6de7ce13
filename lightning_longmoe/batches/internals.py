"""Private names of Lightning's loops and of torch's loader iterators that this room touches.

Each has a test in ``tests/batches/test_internals.py`` that fails when it moves.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch.utils.data import IterableDataset

if TYPE_CHECKING:
    import lightning.pytorch as pl


def evaluation_loaders(trainer: pl.Trainer) -> tuple[list[Any], bool]:
    """The loaders of the evaluation that runs, and whether they come one after the other (else a step gets a batch of
    each)."""
    if trainer.testing:
        loop: Any = trainer.test_loop
    elif trainer.predicting:
        loop = trainer.predict_loop
    else:
        loop = trainer.fit_loop.epoch_loop.val_loop if trainer.state.fn == "fit" else trainer.validate_loop
    combined = loop._combined_loader
    return ([], True) if combined is None else (combined.flattened, combined._mode == "sequential")


def weigh_nothing(trainer: pl.Trainer) -> None:
    """Give what the current step logs the weight 0 in the mean over batches (unless it names a batch size)."""
    if trainer._results is not None:
        trainer._results.batch_size = 0


def predictions(trainer: pl.Trainer) -> list[list[Any]]:
    """What ``trainer.predict`` has collected so far, for each loader; lists that may be changed."""
    return trainer.predict_loop._predictions


def restore_loaders_again(trainer: pl.Trainer) -> None:
    """Give training loaders with a state of their own the state that the checkpoint holds, if that has not happened."""
    trainer.fit_loop._load_combined_loader_states()


def fetch_again(trainer: pl.Trainer) -> None:
    """Let the training loop open its data anew, and forget what it has fetched."""
    if trainer.fit_loop._data_fetcher is not None:
        iter(trainer.fit_loop._data_fetcher)


def move_batch_index(trainer: pl.Trainer, by: int) -> None:
    """Let the interrupted epoch continue ``by`` batches later than it would."""
    progress: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    for name in ("ready", "started", "processed", "completed"):
        setattr(progress, name, getattr(progress, name) + by)


def skip_batch(source: Iterator[Any]) -> None:
    """Leave out one batch of a loader's iterator, without loading it where that changes nothing else."""
    in_process = getattr(source, "_num_workers", None) == 0
    if in_process and not isinstance(source._dataset, IterableDataset):  # type: ignore[attr-defined]
        next_indices(source)
    else:
        next(source)


def next_indices(source: Any) -> Any:
    """Take the indices of the next batch off an iterator of a DataLoader over a map-style dataset."""
    return source._next_index()
