"""A scheduler without a device that shows missing waits: `Streams` whose copies run late, early or out of order.

The compute lane is this process itself, so its work is done when it is called. Copies are queued, and run in some order
that their lanes and waits allow, drawn from a seed: at once, or only when the compute lane waits for them. What a
device would read or write too early, or after the memory was freed, becomes NaN here:

- a copy that did not wait for the compute lane after its source was made reads NaN;
- a copy into device memory that did not wait for the compute lane after ``allocate`` is lost, as later work of that
  lane, which still used the memory, would overwrite it;
- device memory that nobody holds when its copy runs is read as NaN; a write to it is a fault;
- new device memory is full of NaN, so that reading before the copy has come shows.
"""

from __future__ import annotations

import random
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_longmoe.runtime.streams import Lane


@dataclass(eq=False)
class _Copy:
    target: Callable[[], Tensor | None]
    source: Callable[[], Tensor | None]
    needs: list[_Copy]
    reads_garbage: bool = False
    lost: bool = False
    done: bool = False


@dataclass(eq=False)
class FakeEvent:
    """A point of a lane: behind ``copies``, and behind what the compute lane had done by ``time``."""

    lane: Lane
    time: int
    copies: list[_Copy] = field(default_factory=list)


class FakeStreams:
    """See the module.

    Args:
        seed: draws when each copy runs.
        forget: called with (waiting lane, lane of the event); where it says True the wait is left out, as by a mistake.

    Attributes:
        faults: what went wrong beyond wrong values, in words.
        copied: number of copies that have run, by lane.
    """

    def __init__(self, seed: int, forget: Callable[[Lane, Lane], bool] = lambda waiting, event: False) -> None:
        self._random = random.Random(seed)
        self._forget = forget
        self._time = 0  # of the compute lane
        self._made: weakref.WeakKeyDictionary[torch.UntypedStorage, int] = weakref.WeakKeyDictionary()
        self._queues: dict[Lane, deque[_Copy]] = {"out": deque(), "in": deque()}
        self._waited: dict[Lane, list[_Copy]] = {"out": [], "in": []}
        self._seen: dict[Lane, int] = {"out": -1, "in": -1}  # the compute lane's time that a lane has waited for
        self._arriving: list[weakref.ref[torch.UntypedStorage]] = []
        self.faults: list[str] = []
        self.copied: dict[Lane, int] = {"out": 0, "in": 0}

    # ---- the interface -----------------------------------------------------------------------------------------------
    def allocate(self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
        tensor = torch.empty_strided(tuple(shape), tuple(stride), dtype=dtype)
        torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).fill_(255)  # NaN in every floating type
        self._touch(tensor.untyped_storage())
        return tensor

    def _touch(self, storage: torch.UntypedStorage) -> None:
        """The compute lane may write this memory from now on."""
        self._time += 1
        self._made[storage] = self._time

    def copy(self, lane: Lane, target: Tensor, source: Tensor) -> None:
        copy = _Copy(lambda: target, lambda: source, [*self._waited[lane], *list(self._queues[lane])[-1:]])
        # Host memory is the slab's, and stays; of device memory only its holder decides how long it lives.
        if lane == "out":
            copy.source = _weak(source)
            # What `allocate` made is known; of any other memory the compute lane may have written just now.
            made = self._made.get(source.untyped_storage())
            copy.reads_garbage = self._seen[lane] < (self._time if made is None else made)
            self._time += made is None
        else:
            copy.target = _weak(target)
            copy.lost = self._seen[lane] < self._made.get(target.untyped_storage(), 0)
            self._arriving.append(weakref.ref(target.untyped_storage()))
        self._queues[lane].append(copy)
        self._run_some()

    def record(self, lane: Lane) -> FakeEvent:
        if lane == "compute":
            return FakeEvent(lane, self._time)
        return FakeEvent(lane, self._seen[lane], [*list(self._queues[lane])[-1:], *self._waited[lane]])

    def wait(self, lane: Lane, event: FakeEvent) -> None:
        if self._forget(lane, event.lane):
            return
        if lane == "compute":
            for copy in event.copies:
                self._run(copy)
            if event.lane == "in":  # what has come is for this lane to change
                for storage in filter(None, [ref() for ref in self._arriving]):
                    self._touch(storage)
                self._arriving.clear()
        else:
            self._seen[lane] = max(self._seen[lane], event.time)
            self._waited[lane] += [copy for copy in event.copies if not copy.done]
        self._run_some()

    def synchronize(self) -> None:
        for queue in self._queues.values():
            while queue:
                self._run(queue[0])

    def pin(self, memory: Tensor) -> bool:
        return True

    def unpin(self, memory: Tensor) -> None:
        memory.fill_(255)  # NaN in every floating type

    # ---- the scheduler -----------------------------------------------------------------------------------------------
    def _run_some(self) -> None:
        """Run none, some or all of what may run by now."""
        while self._random.random() < 0.4:
            ready = [queue[0] for queue in self._queues.values() if queue]
            if not ready:
                return
            self._run(self._random.choice(ready))

    def _run(self, copy: _Copy) -> None:
        """Run a copy, after all that it has to wait for."""
        if copy.done:
            return
        for needed in copy.needs:
            self._run(needed)
        lane: Lane = "out" if copy in self._queues["out"] else "in"
        while self._queues[lane][0] is not copy:
            self._run(self._queues[lane][0])
        self._queues[lane].popleft()
        copy.done = True
        self._waited[lane] = [other for other in self._waited[lane] if not other.done]
        self.copied[lane] += 1
        target, source = copy.target(), copy.source()
        if target is None:
            self.faults.append("a copy wrote device memory that was free")
        elif source is None or copy.reads_garbage:
            target.fill_(float("nan") if target.is_floating_point() else 255)
        elif not copy.lost:
            target.copy_(source)


def _weak(tensor: Tensor) -> Callable[[], Tensor | None]:
    """The tensor, as long as someone holds its memory."""
    storage = weakref.ref(tensor.untyped_storage())
    dtype, place = tensor.dtype, (tensor.storage_offset(), tensor.shape, tensor.stride())

    def alive() -> Tensor | None:
        held = storage()
        return None if held is None else torch.empty(0, dtype=dtype).set_(held, *place)

    return alive
