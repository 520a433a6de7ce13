"""Wrapped loaders look like the loader inside; workers draw by data rank; ranks exchange host values."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from lightning_longmoe.batches import HostGroup, seed_workers
from lightning_longmoe.batches.loader import WrappedLoader
from tests.pool import run_on_ranks


class Draws(Dataset[Any]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return torch.rand(()), np.random.rand()


def drawn(data_rank: int) -> list[float]:
    torch.manual_seed(7)  # all ranks start alike
    loader = DataLoader(Draws(), 2, num_workers=2)
    seed_workers(loader, data_rank)
    return [float(value) for pair in loader for column in pair for value in column]


def test_workers_of_ranks_that_share_data_draw_alike_and_others_differ() -> None:
    first, second, other = drawn(0), drawn(0), drawn(1)
    assert first == second
    assert not set(first) & set(other)
    assert len(set(first)) == len(first)


def test_a_users_worker_init_stays() -> None:
    loader = DataLoader(Draws(), worker_init_fn=print)
    seed_workers(loader, 1)
    assert loader.worker_init_fn is print
    seed_workers([1, 2], 1)  # other loaders have no workers of torch's


def test_attributes_come_from_the_loader_inside() -> None:
    inner = DataLoader(Draws(), 2)
    wrapped = WrappedLoader(inner)
    assert wrapped.dataset is inner.dataset
    assert wrapped.batch_sampler is inner.batch_sampler
    with pytest.raises(AttributeError, match="nothing_like_it"):
        _ = wrapped.nothing_like_it
    assert not hasattr(WrappedLoader([1]), "_iterator")
    assert copy.copy(wrapped).loader is inner
    assert pickle.loads(pickle.dumps(WrappedLoader([1, 2]))).loader == [1, 2]


def test_persistent_workers_are_let_go_through_the_wrapper() -> None:
    inner = DataLoader(Draws(), 2, num_workers=1, persistent_workers=True)
    next(iter(inner))
    wrapped = WrappedLoader(inner)
    assert wrapped._iterator is inner._iterator is not None
    wrapped._iterator = None
    assert inner._iterator is None


def exchange() -> Any:
    group = HostGroup(dist.group.WORLD)
    rank = dist.get_rank()
    value = {"tensor": torch.tensor([rank])} if rank > 0 else None
    return group.sum([1, rank]), group.every(10 + rank), group.first_of(value)["tensor"].tolist()


def test_ranks_exchange_host_values() -> None:
    assert run_on_ranks(3, exchange) == [([3, 3], [10, 11, 12], [1])] * 3
    alone = HostGroup()
    assert (alone.size, alone.rank, alone.sum([4]), alone.every(5), alone.first_of("x")) == (1, 0, [4], [5], "x")
