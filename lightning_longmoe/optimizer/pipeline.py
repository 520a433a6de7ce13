"""Buckets through slots: while one bucket is updated, the next comes from the host and the last goes back.

    lane in        b0  b1      b2      b3
    lane compute       b0  b1      b2      b3
    lane out               b0  b1      b2      b3      with two slots: b2 comes into b0's slot once b0 is back

The update runs on the compute lane, since weights and gradients are there. A slot's memory is written by "in" only
after "out" has read it; both wait for the compute lane before they start on memory that it made or wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_longmoe.optimizer.buckets import Bucket
from lightning_longmoe.optimizer.store import Store
from lightning_longmoe.runtime.streams import Streams

Work = tuple[Store, Bucket]
Update = Callable[[Store, Bucket, dict[str, Tensor]], None]
"""(store, bucket, state by name, on the device): changes the state in place."""


@dataclass(eq=False)
class _Slot:
    memory: Tensor
    arrived: Any = None
    left: Any = None


class Pipeline:
    """One step's buckets.

    Args:
        works: in order.
        streams: of the device.
        slots: buckets on the device at one time.
    """

    def __init__(self, works: Sequence[Work], streams: Streams, slots: int) -> None:
        self._works = list(works)
        self._streams = streams
        nbytes = max((store.bytes_of(bucket.start, bucket.stop) for store, bucket in works), default=0)
        count = min(slots, len(self._works))
        self._slots = [_Slot(streams.allocate((nbytes,), (1,), torch.uint8)) for _ in range(count)]
        self.staging_bytes = count * nbytes
        for index in range(count):
            self._fetch(index)

    def _slot(self, index: int) -> _Slot:
        return self._slots[index % len(self._slots)]

    def _fetch(self, index: int) -> None:
        store, bucket = self._works[index]
        slot, streams = self._slot(index), self._streams
        if slot.left is None:
            streams.wait("in", streams.record("compute"))  # whoever had the slot's memory before is done
        else:
            streams.wait("in", slot.left)
        for name, view in store.carve(slot.memory, bucket.numel).items():
            streams.copy("in", view, store.slabs[name][bucket.start : bucket.stop])
        slot.arrived = streams.record("in")

    def run(self, update: Update) -> None:
        """Update all buckets, and let go of the slots. What is on its way back the host must wait for."""
        streams = self._streams
        for index, (store, bucket) in enumerate(self._works):
            slot = self._slot(index)
            streams.wait("compute", slot.arrived)
            views = store.carve(slot.memory, bucket.numel)
            update(store, bucket, views)
            streams.wait("out", streams.record("compute"))
            for name, view in views.items():
                streams.copy("out", store.slabs[name][bucket.start : bucket.stop], view)
            slot.left = streams.record("out")
            if index + len(self._slots) < len(self._works):
                self._fetch(index + len(self._slots))
        for slot in self._slots:
            streams.wait("compute", slot.left)  # the memory goes back to the compute lane's allocator
        self._slots = []

    def abandon(self) -> None:
        """Drop buckets that were fetched for a step that is not taken."""
        for slot in self._slots:
            self._streams.wait("compute", slot.arrived)
        self._slots = []
