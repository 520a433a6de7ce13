"""What both wrapped loaders share: they look like the loader they wrap."""

from __future__ import annotations

from functools import partial
from typing import Any

from lightning.fabric.utilities.data import has_iterable_dataset, sized_len
from lightning.fabric.utilities.seed import pl_worker_init_function
from torch.utils.data import DataLoader

from lightning_longmoe.batches.host_group import HostGroup

NO_LENGTH = -1


class WrappedLoader:
    """A loader around another one. What is not defined here is read from the inner loader.

    Attributes:
        loader: the inner loader, of any type with ``__iter__``.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # not set yet, while this object is copied or unpickled
            raise AttributeError(name)
        return getattr(self.loader, name)

    @property
    def _iterator(self) -> Any:
        """Where a DataLoader keeps its persistent workers; Lightning shuts them down through it."""
        return self.loader._iterator

    @_iterator.setter
    def _iterator(self, value: Any) -> None:
        self.loader._iterator = value
        self.release()

    def release(self) -> None:
        """Let go of the pass in progress, and so of its workers."""


def seed_workers(dataloader: object, data_rank: int) -> None:
    """Let the worker processes of ranks that share data draw alike, and those of other ranks differ.

    Lightning would seed them by global rank, and only after ``seed_everything(workers=True)``. A ``worker_init_fn`` of
    the user's stays.
    """
    if isinstance(dataloader, DataLoader) and dataloader.worker_init_fn is None:
        dataloader.worker_init_fn = partial(pl_worker_init_function, rank=data_rank)


def common_lengths(loader: object, ranks: HostGroup) -> list[int] | None:
    """The number of batches of each rank; None when one of them cannot tell. A collective."""
    length = sized_len(loader)
    lengths = ranks.every(NO_LENGTH if length is None else length)
    return None if NO_LENGTH in lengths else lengths


def may_end_early(loader: object) -> bool:
    """Whether the loader may hand out fewer batches than its length says (a length of iterable data is a guess)."""
    return not isinstance(loader, DataLoader) or has_iterable_dataset(loader)
