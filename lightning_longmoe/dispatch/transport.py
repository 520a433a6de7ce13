"""What a region asks of the ranks around it, and who answers: a process group, virtual ranks, or nobody.

A region is a generator. It yields *steps*, each a request to move data between ranks, and gets the answer back at the
same ``yield``. So one region runs over a process group, as one of W *virtual ranks* that take turns in one thread (an
accelerator that is alone can then measure all ranks), or in a dry run that moves nothing.

Gathers and all-to-alls, and their order, do not depend on the routing. Point-to-point steps do: there is one for each
guest. All of them are the same on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

T = TypeVar("T")

_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # its name from torch 2.13 on


@dataclass(frozen=True, eq=False)
class AllGather:
    """``output`` [Ep, M], or [Ep], becomes every rank's ``input`` [M]. Done when it answers."""

    output: Tensor
    input: Tensor


@dataclass(frozen=True, eq=False)
class ToHost:
    """Wait for the device and answer with the tensor's values: a NumPy array."""

    tensor: Tensor


@dataclass(frozen=True, eq=False)
class AllToAll:
    """Rows to and from every rank. Answers with a handle: the buffers are the transport's until it is waited for.

    Attributes:
        output: [sum(received), ...].
        input: [sum(sent), ...].
        received: rows from each rank.
        sent: rows to each rank.
    """

    output: Tensor
    input: Tensor
    received: list[int]
    sent: list[int]


@dataclass(frozen=True, eq=False)
class PointToPoint:
    """Whole tensors between pairs of ranks, in one group; nothing for most ranks. Answers with a handle.

    Attributes:
        sends: (tensor, rank that gets it), in the order in which that rank lists it.
        receives: (tensor, rank that it comes from).
    """

    sends: list[tuple[Tensor, int]]
    receives: list[tuple[Tensor, int]]


@dataclass(frozen=True, eq=False)
class Wait:
    """Until the step behind a handle is done."""

    handle: Any


Step: TypeAlias = AllGather | ToHost | AllToAll | PointToPoint | Wait
Steps: TypeAlias = Generator[Step, Any, T]


def signature(step: Step) -> tuple[Any, ...]:
    """What a log keeps of a step: its name, and its sizes where it has some."""
    name = type(step).__name__
    if isinstance(step, AllToAll):
        return name, tuple(step.sent), tuple(step.received)
    if isinstance(step, PointToPoint):
        return name, tuple(peer for _, peer in step.sends), tuple(peer for _, peer in step.receives)
    return (name,)


class GroupTransport:
    """The ranks of a process group.

    Args:
        group: all ranks of it run the same regions in the same order.
        log: gets the signature of every step.
    """

    def __init__(self, group: dist.ProcessGroup, log: list[tuple[Any, ...]] | None = None) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.log = log

    def run(self, steps: Steps[T]) -> T:
        """Run a region to its end and return its result."""
        answer: Any = None
        while True:
            try:
                step = steps.send(answer)
            except StopIteration as end:
                return end.value
            if self.log is not None:
                self.log.append(signature(step))
            answer = self._perform(step)
            del step  # while the region computes, nothing but the region holds its buffers

    def _perform(self, step: Step) -> Any:
        if isinstance(step, AllToAll):
            work = dist.all_to_all_single(
                step.output, step.input, step.received, step.sent, group=self.group, async_op=True
            )
            return [work]
        if isinstance(step, Wait):
            for work in step.handle:
                work.wait()
            step.handle.clear()  # a work that is done still holds its buffers, and the region may keep its handle
            return None
        if isinstance(step, PointToPoint):
            return self._point_to_point(step)
        if isinstance(step, AllGather):
            return _all_gather(step.output.view(-1), step.input, group=self.group)
        return step.tensor.cpu().numpy()

    def _point_to_point(self, step: PointToPoint) -> list[Any]:
        pairs = [(dist.isend, *pair) for pair in step.sends] + [(dist.irecv, *pair) for pair in step.receives]
        operations = [
            dist.P2POp(operation, tensor, dist.get_global_rank(self.group, peer), self.group)
            for operation, tensor, peer in pairs
        ]
        return dist.batch_isend_irecv(operations) if operations else []


class SoloTransport:
    """One process that holds all experts."""

    rank, size = 0, 1

    def __init__(self, log: list[tuple[Any, ...]] | None = None) -> None:
        self.log = log

    def run(self, steps: Steps[T]) -> T:
        """Run a region to its end and return its result."""
        return run_virtual([steps], logs=None if self.log is None else [self.log])[0]


class _Pending:
    """A step of all virtual ranks whose data has yet to move."""

    def __init__(self, steps: Sequence[Any]) -> None:
        self._steps: Sequence[Any] | None = steps

    def move(self) -> None:
        steps, self._steps = self._steps, None
        if steps is None:
            return
        if isinstance(steps[0], AllToAll):
            _move_rows(steps)
        else:
            _move_tensors(steps)


def run_virtual(
    regions: Sequence[Steps[T]], *, late: bool = False, logs: list[list[tuple[Any, ...]]] | None = None
) -> list[T]:
    """Run the regions of all ranks of a virtual group, in turns, and return their results.

    Args:
        regions: rank by rank; they must yield the same kinds of steps in the same order.
        late: move data when it is waited for instead of when it is sent, to show buffers that are used too early.
        logs: one list a rank, which gets the signature of every step.
    """
    answers: list[Any] = [None] * len(regions)
    while True:
        steps, results = _advance(regions, answers)
        if not steps:
            return results
        assert len(steps) == len(regions), "some virtual ranks ended before the others"
        assert len({type(step) for step in steps}) == 1, [signature(step) for step in steps]
        for log, step in zip(logs or [], steps, strict=bool(logs)):
            log.append(signature(step))
        answers = _answer(steps, late)


def _advance(regions: Sequence[Steps[T]], answers: list[Any]) -> tuple[list[Step], list[T]]:
    steps, results = [], []
    for region, answer in zip(regions, answers, strict=True):
        try:
            steps.append(region.send(answer))
        except StopIteration as end:
            results.append(end.value)
    return steps, results


def _answer(steps: Sequence[Any], late: bool) -> list[Any]:
    if isinstance(steps[0], ToHost):
        return [step.tensor.cpu().numpy() for step in steps]
    if isinstance(steps[0], Wait):
        for step in steps:
            step.handle.move()
    elif isinstance(steps[0], AllGather):
        gathered = torch.cat([step.input for step in steps])
        for step in steps:
            step.output.view(-1).copy_(gathered)
    else:
        pending = _Pending(steps)
        if not late:
            pending.move()
        return [pending] * len(steps)
    return [None] * len(steps)


def _move_rows(steps: Sequence[AllToAll]) -> None:
    sent = [step.input.split(step.sent) for step in steps]
    for rank, step in enumerate(steps):
        assert step.received == [parts[rank].size(0) for parts in sent], "ranks disagree on what is sent"
        for slot, parts in zip(step.output.split(step.received), sent, strict=True):
            slot.copy_(parts[rank])


def _move_tensors(steps: Sequence[PointToPoint]) -> None:
    for rank, step in enumerate(steps):
        waiting = {peer: iter([t for t, to in other.sends if to == rank]) for peer, other in enumerate(steps)}
        for slot, peer in step.receives:
            slot.copy_(next(waiting[peer]))
        assert all(next(rest, None) is None for rest in waiting.values()), "a tensor was sent that nobody receives"


class DryTransport:
    """One rank of a group whose other ranks do not exist: moves nothing.

    Args:
        rank, size: of the group.
        read: answers `ToHost` in the device's place.
    """

    def __init__(self, rank: int, size: int, read: Callable[[Tensor], NDArray[np.integer]]) -> None:
        self.rank, self.size = rank, size
        self.read = read

    def run(self, steps: Steps[T]) -> T:
        """Run a region to its end and return its result."""
        answer: Any = None
        while True:
            try:
                step = steps.send(answer)
            except StopIteration as end:
                return end.value
            answer = self.read(step.tensor) if isinstance(step, ToHost) else None


Transport: TypeAlias = GroupTransport | SoloTransport | DryTransport
