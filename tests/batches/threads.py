"""Ranks as threads of this process: what a collective among loaders does, without processes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from lightning_longmoe.batches import HostGroup


class ThreadGroup(HostGroup):
    """One rank of a group of threads."""

    def __init__(self, rank: int, size: int, meeting: threading.Barrier, table: dict[int, Any]) -> None:
        self.rank, self.size = rank, size
        self._meeting, self._table = meeting, table
        self.calls = 0

    def _exchange(self, value: Any) -> list[Any]:
        self.calls += 1
        self._table[self.rank] = value
        self._meeting.wait(10)
        values = [self._table[rank] for rank in range(self.size)]
        self._meeting.wait(10)
        return values

    def sum(self, values: Sequence[int]) -> list[int]:
        return [sum(column) for column in zip(*self._exchange(list(values)), strict=True)]

    def first_of(self, value: Any) -> Any:
        return next(other for other in self._exchange(value) if other is not None)


def on_threads(size: int, function: Callable[[ThreadGroup], Any]) -> list[Any]:
    """``function(group)`` on each rank; one result per rank. A rank that fails breaks the others' collectives."""
    meeting, table = threading.Barrier(size), {}
    results: dict[int, Any] = {}
    errors: dict[int, BaseException] = {}

    def play(rank: int) -> None:
        try:
            results[rank] = function(ThreadGroup(rank, size, meeting, table))
        except BaseException as error:  # noqa: BLE001
            errors[rank] = error
            meeting.abort()

    threads = [threading.Thread(target=play, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    if errors:
        broken = threading.BrokenBarrierError
        raise next((e for e in errors.values() if not isinstance(e, broken)), next(iter(errors.values())))
    return [results[rank] for rank in range(size)]
