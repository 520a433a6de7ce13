"""Continuing an interrupted epoch: at the same batch, with the same random state.

A checkpoint keeps, for each rank, the random state at three kinds of moments: before the pass over the data was opened
(samplers and workers draw their seeds then), before each batch that was loaded but not trained yet, and now. A resumed
run opens the pass under the first, skips what was trained, loads what was loaded under the second, and goes on under
the third.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from lightning_longmoe._compat import move_batch_index, next_indices, skip_batch
from lightning_longmoe.runtime.rng import RngState, set_rng_state

if TYPE_CHECKING:
    import lightning.pytorch as pl

LIGHTNINGS_WARNING = "You're resuming from a checkpoint that ended before the epoch ended"


class Resume:
    """What a run knows of the checkpoint that it continues; empty for a run from the start.

    Args:
        trainer: whose loops Lightning has restored, or not.
        data_size: in how many parts the data is dealt now.
    """

    def __init__(self, trainer: pl.Trainer, data_size: int) -> None:
        self._trainer = trainer
        self._data_size = data_size
        self._state: dict[str, Any] | None = None
        self._same_deal = True
        self._continuing = False
        self.skip_samples = 0

    @property
    def loaded(self) -> bool:
        """Whether there is a checkpoint to continue, and nothing was trained yet."""
        return self._state is not None

    def load(self, state: dict[str, Any]) -> None:
        """Take over one rank's state from a checkpoint, before the training data is set up."""
        self._state = state
        self._same_deal = state["data_size"] == self._data_size
        # Lightning cannot know that a loader without state of its own is put back to its position.
        warnings.filterwarnings("ignore", message=LIGHTNINGS_WARNING)

    def start(self) -> None:
        """Training starts, before Lightning's epoch loop looks at its restored progress."""
        self._leave_finished_epoch()
        self._continuing = self._trainer.fit_loop.epoch_loop.restarting

    def finish(self) -> None:
        """The first batch is trained: what follows is an ordinary run."""
        self._state = None
        self._continuing = False

    def first_batch(self) -> int:
        """Index, in the epoch, of the batch that Lightning trains next when a pass is opened now."""
        loop = self._trainer.fit_loop.epoch_loop
        if not loop.restarting and not self._continuing:
            return 0
        done: Any = loop.batch_progress.current
        if loop.restarting:
            # Saved in `on_train_batch_end`, a batch is processed but not completed; Lightning takes it for completed.
            return done.completed + int(done.ready == done.started == done.processed == done.completed + 1)
        # A checkpoint of the end of a validation costs Lightning one round without training, which ends "restarting".
        return done.ready

    def loader_state(self, index: int, first: int) -> dict[str, Any] | None:
        """What training loader ``index`` had left, where its pass continues at batch ``first``; else None."""
        restarting = self._trainer.fit_loop.epoch_loop.restarting or (self._continuing and first > 0)
        if self._state is None or not self._same_deal or not restarting:
            return None
        states = self._state["loaders"]
        state = states[index] if index < len(states) else None
        # Saved while a batch was trained: Lightning trains that batch again.
        return state if state and first in (state["next"], state["next"] - 1) else None

    def _leave_finished_epoch(self) -> None:
        """Start the next epoch at batch 0, where the checkpoint was written after the last batch of data without a
        length: Lightning begins that epoch, but keeps the finished one's batch index, which the data has not."""
        fit, loop = self._trainer.fit_loop, self._trainer.fit_loop.epoch_loop
        finished = fit.restarted_mid_epoch and loop.restarted_on_train_batch_end and loop.batch_progress.is_last_batch
        if finished and self._trainer.num_training_batches == float("inf"):
            done: Any = loop.batch_progress.current
            done.ready = done.started = done.processed = 0
            done.completed = -1  # Lightning adds the batch that it takes for uncompleted
            loop.batch_progress.is_last_batch = False

    def restore_rng(self, again: RngState | None = None) -> None:
        """Put the random state back to that of the checkpoint, or to ``again``."""
        if self._state is not None:
            set_rng_state(self._state["rng"] if again is None else again)

    # ---------------------------------------------------------------------------------------- another data size
    def redeal(self, loader: Any) -> None:
        """Where the data is dealt in other parts than before, go on after the samples that were trained.

        Before Lightning's epoch loop starts, which reads the index that this sets.

        s batches of B samples on D data ranks are the first s·B·D samples of an epoch's order, however it is dealt. So
        Lightning's batch index becomes s·B·D / (B'·D'); a rest that all ranks share evenly is cut off the first batch.
        """
        loop = self._trainer.fit_loop.epoch_loop
        if self._state is None or not loop.restarting:
            return
        before, now = self._state["samples"], batch_samples(loader, self._data_size)
        first = self.first_batch()
        if before == now and self._same_deal or first == 0:
            return
        self._same_deal = False
        if before is None or now is None or not same_order_for_any_size(loader):
            rank_zero_warn(
                f"The checkpoint was written with {self._state['data_size']} data ranks, and there are"
                f" {self._data_size} now. The sampler of this loader does not promise the same order of samples for"
                " another number of ranks: in the rest of this epoch samples may repeat or be left out. A"
                " DistributedSampler, or a sampler with an attribute `same_order_for_any_size = True`, continues"
                " exactly."
            )
        if before is None or now is None:
            return
        index, rest = divmod(first * before, now)
        if rest and rest % self._data_size == 0 and can_skip_samples(loader):
            self.skip_samples = rest // self._data_size
        elif rest:
            index += 1
            rank_zero_warn(
                f"The checkpoint ends {rest} samples into a global batch of {now} samples: the other {now - rest} of it"
                " are left out of this epoch."
            )
        move_batch_index(self._trainer, index - first)


def open_at(loader: Any, first: int, skip_samples: int = 0) -> Iterator[Any]:
    """An iterator over ``loader`` that has left out its first ``first`` batches, and samples of the next one.

    Without worker processes only indices are skipped. With them the batches are loaded and thrown away, so that the
    workers' random states are those of the unbroken run.
    """
    source = iter(loader)
    try:
        for _ in range(first):
            skip_batch(source)
        if skip_samples:
            rest = [loader.dataset[index] for index in next_indices(source)[skip_samples:]]
            return chain([loader.collate_fn(rest)], source)
    except StopIteration:
        return iter(())
    return source


def can_skip_samples(loader: Any) -> bool:
    """Whether the first samples of a batch can be left out: plain batches of a map-style dataset, no workers."""
    return type(loader) is DataLoader and loader.num_workers == 0 and loader.batch_sampler is not None


def batch_samples(loader: Any, data_size: int) -> int | None:
    """Samples of one batch over all data ranks; None where the loader does not say."""
    size = getattr(loader, "batch_size", None)
    if size is None:
        size = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    return size * data_size if isinstance(size, int) else None


def same_order_for_any_size(loader: Any) -> bool:
    """Whether rank r of R reads samples r, r + R, ... of one order that does not depend on R."""
    samplers = [getattr(loader, "sampler", None), getattr(getattr(loader, "batch_sampler", None), "sampler", None)]
    return any(
        type(sampler) is DistributedSampler or getattr(sampler, "same_order_for_any_size", False)
        for sampler in samplers
    )


def is_plain(value: Any) -> bool:
    """Whether ``torch.load(weights_only=True)`` would accept the value."""
    if isinstance(value, dict):
        return all(is_plain(key) and is_plain(item) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return all(is_plain(item) for item in value)
    return value is None or type(value) in (bool, int, float, str, bytes, torch.Tensor)
