"""`BoundaryOffloader`: activation checkpointing whose boundaries wait in host memory.

Source: arXiv 2609.14306, Algorithm 3 and Eq. 4. Glossary: *boundary* - the hidden states that one checkpointed part
keeps from its forward to its recomputation; *kept* - on the device, and the next to go; *in flight* - being copied to
the host, its device memory still held; *restored* - back on the device for its recomputation.

Which boundary is where, for keep_last=2, while part 6 runs forward, and later while part 3 is recomputed:

    part                    1      2             3         4          5     6
    forward, as 6 begins    host   host          host      in flight  kept  kept
    backward, as 3 begins   host   on its way    restored  -          -     -

Every copy waits for the compute lane before it starts, and the compute lane waits for it before the memory at either
end is let go. So all that happens to a piece of memory is ordered through the compute lane, and no two copies need to
know of each other.

What is saved, and when it is dropped, follows from one object: autograd holds a token of each boundary, and when the
graph lets it go, for whatever reason (a backward, an exception, a forgotten loss), the boundary is released.
"""

from __future__ import annotations

import math
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from lightning_longmoe.config import BoundaryOffload
from lightning_longmoe.runtime.host_memory import local_ranks, node_bytes
from lightning_longmoe.runtime.replay import checkpoint_contexts, replaying
from lightning_longmoe.runtime.slabs import HostSlab, Slot
from lightning_longmoe.runtime.streams import Streams, streams_for

GIB = 2**30


class BoundaryOffloader:
    """Checkpoints parts of a model and keeps their inputs, and nothing else, in host memory.

    Args:
        config: budget, and how many boundaries stay on the device.
        streams: None: those of the device of the first boundary.
        limit_bytes: host memory of this rank that boundaries may fill; where it is less than they need, and the config
            states no budget, the rest stays on the device with a warning. None: no limit, and a warning where all ranks
            of the node together need more than it has.

    Raises:
        ValueError: the config's budget is above the limit.
    """

    def __init__(
        self,
        config: BoundaryOffload = BoundaryOffload(),
        *,
        streams: Streams | None = None,
        limit_bytes: int | None = None,
    ) -> None:
        self.config = config
        budget = config.host_budget_bytes
        self._budget = math.inf if budget is None else budget
        self._limit = math.inf
        if limit_bytes is not None:
            self.set_limit(limit_bytes)
        self._streams = streams
        self._slab: HostSlab | None = None if streams is None else HostSlab(streams)
        self._alive: dict[int, _Boundary] = {}  # by number, the oldest first
        self._kept: deque[_Boundary] = deque()
        self._in_flight: deque[_Boundary] = deque()
        self._dead: deque[_Boundary] = deque()  # released by autograd, perhaps in the middle of a method of ours
        self._number = 0
        self._lock = threading.RLock()
        self._busy = False
        self._inside = threading.local()
        self._stats = _Stats()
        self._warned = False

    # -----------------------------------------------------------------------------------------------------------------
    # The public part
    # -----------------------------------------------------------------------------------------------------------------
    def checkpoint(self, function: Callable[..., Any], hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        """``function(hidden, *args, **kwargs)``, which the backward runs again from the ``hidden`` in host memory.

        Non-reentrant. Without gradients it just calls the function. Inside a part that is checkpointed already the
        inner call keeps its boundary where it is: it lives only while the outer one is recomputed.

        Args:
            function: a part of a model; it must do the same when it runs again.
            hidden: any shape and floating dtype, on any device; not to be changed in place afterwards.
            args, kwargs: handed on; tensors among them stay where they are.

        Raises:
            ValueError: ``hidden`` is no floating point tensor.
        """
        if not isinstance(hidden, Tensor) or not hidden.is_floating_point():
            what = f"a {hidden.dtype} tensor" if isinstance(hidden, Tensor) else f"a {type(hidden).__name__}"
            raise ValueError(
                f"BoundaryOffloader.checkpoint was given {what} as `hidden`. Give the hidden states, a floating point"
                " tensor, as the first positional argument after the function."
            )
        if not torch.is_grad_enabled():
            return function(hidden, *args, **kwargs)
        inner = getattr(self._inside, "value", False) or replaying()
        if inner:
            return _checkpoint(function, hidden, *args, **kwargs)
        self._begin(hidden)
        call = _Call(self, hidden)
        self._inside.value = True
        try:
            with torch.autograd.graph.saved_tensors_hooks(call.pack, call.unpack):
                return _checkpoint(function, hidden, *args, **kwargs)
        finally:
            self._inside.value = False
            call.end()

    def stats(self) -> dict[str, int]:
        """Counts and bytes of this rank, over the time since no boundary was last alive (one forward and backward).

        Returns:
            ``boundaries``: that were checkpointed; ``offloaded``: how many of them went to the host;
            ``payload_bytes``: their bytes; ``host_bytes``: the most host memory that was held for them;
            ``peak_device_bytes``: the most that boundaries held on the device, restored ones included.
        """
        with self._working():
            s = self._stats
            return {
                "boundaries": s.boundaries,
                "offloaded": s.offloaded,
                "payload_bytes": s.payload_bytes,
                "host_bytes": s.host_bytes,
                "peak_device_bytes": s.peak_device_bytes,
            }

    @property
    def alive(self) -> int:
        """Boundaries whose backward has not come yet."""
        with self._working():
            return len(self._alive)

    @property
    def host_allocations(self) -> int:
        """How often host memory was page-locked."""
        return 0 if self._slab is None else self._slab.allocations

    def set_limit(self, limit_bytes: int) -> None:
        """Host memory that boundaries may fill from now on.

        Raises:
            ValueError: the config's budget is above it.
        """
        if self._budget != math.inf and self._budget > limit_bytes:
            raise ValueError(
                f"BoundaryOffload(host_budget={self.config.host_budget!r}) is {self._budget / GIB:.2f} GiB, and"
                f" host_memory leaves this rank {limit_bytes / GIB:.2f} GiB for boundaries. Lower host_budget, or raise"
                " host_memory."
            )
        self._limit = limit_bytes

    def reset(self) -> None:
        """Let go of device memory that copies still hold, as after a failed step. Boundaries of a live graph stay."""
        with self._working():
            while self._in_flight:
                self._drop_source(self._in_flight.popleft())

    def close(self) -> None:
        """Free the host memory, where no boundary is alive; the next step takes it anew."""
        with self._working():
            if not self._alive and self._slab is not None:
                self._slab.close()

    # -----------------------------------------------------------------------------------------------------------------
    # Forward
    # -----------------------------------------------------------------------------------------------------------------
    def _working(self) -> _Working:
        return _Working(self)

    def _begin(self, hidden: Tensor) -> None:
        """Before each call. Between two steps host memory is made as large as the last one needed."""
        with self._working():
            if self._streams is None:
                self._streams = streams_for(hidden.device)
                self._slab = HostSlab(self._streams)
            if not self._alive:
                assert self._slab is not None
                self._warn_of_little_memory(self._slab.needed_bytes)
                self._slab.fit()
                self._stats = _Stats(host_bytes=self._slab.host_bytes)

    def _add(self, hidden: Tensor) -> _Token:
        """A new boundary, kept on the device; the oldest of those that are kept goes to the host."""
        with self._working():
            boundary = _Boundary(self._number, hidden.detach(), hidden._version, self._stats)
            self._number += 1
            self._alive[boundary.number] = boundary
            self._stats.boundaries += 1
            self._stats.on_device(boundary.nbytes)
            if _keeps_its_strides(hidden):
                self._kept.append(boundary)
            while len(self._kept) > self.config.keep_last:
                self._send(self._kept.popleft())
            token = _Token(boundary)
            weakref.finalize(token, self._release, boundary).atexit = False
            return token

    def _send(self, boundary: _Boundary) -> None:
        assert self._streams is not None
        assert self._slab is not None
        after = self._slab.used_bytes + boundary.nbytes
        if after > min(self._budget, self._limit):
            if after <= self._budget:
                self._warn_of_limit()
            self.reset()
            return  # it stays, as will those that come after it until something is freed
        source = boundary.require_unchanged()
        boundary.slot = self._slab.take(boundary.nbytes)
        self._streams.wait("out", self._streams.record("compute"))  # the source is computed
        self._streams.copy("out", boundary.in_host_memory(), _local(source))
        boundary.written = (self._streams.record("out"),)
        self._stats.sent(boundary.nbytes, self._slab.host_bytes)
        self._in_flight.append(boundary)
        while len(self._in_flight) > 1:  # with the next output, which is being computed, there are two more than kept
            self._drop_source(self._in_flight.popleft())

    def _drop_source(self, boundary: _Boundary) -> None:
        """Free the device memory of a boundary that is in the host's, as far as the compute lane is concerned."""
        if boundary.source is not None and boundary.written is not None:
            assert self._streams is not None
            boundary.require_unchanged()
            self._streams.wait("compute", boundary.written[0])
            boundary.source = None
            boundary.stats.on_device(-boundary.nbytes)

    # -----------------------------------------------------------------------------------------------------------------
    # Backward
    # -----------------------------------------------------------------------------------------------------------------
    def _restore(self, boundary: _Boundary) -> Tensor:
        """The boundary on the device for its recomputation, while the one before it starts on its way back."""
        with self._working():
            if boundary.source is not None:
                tensor = boundary.require_unchanged()
            else:
                tensor = self._arrived(boundary)
            previous = next((n for n in reversed(self._alive) if n < boundary.number), None)
            for other in [b for b in self._alive.values() if b.coming is not None and b.number != previous]:
                self._abandon(other)
            if previous is not None and self._alive[previous].source is None:
                self._fetch(self._alive[previous])
            return tensor

    def _fetch(self, boundary: _Boundary) -> None:
        """Start the copy back."""
        if boundary.coming is not None:
            return
        assert self._streams is not None
        buffer = self._streams.allocate(boundary.shape, boundary.stride, boundary.dtype)
        boundary.stats.on_device(boundary.nbytes)
        storage = buffer.untyped_storage()
        weakref.finalize(storage, boundary.stats.on_device, -boundary.nbytes).atexit = False
        self._streams.wait("in", self._streams.record("compute"))  # whoever had this device memory before is done
        self._streams.copy("in", buffer, boundary.in_host_memory())
        boundary.coming = (buffer, self._streams.record("in"))

    def _arrived(self, boundary: _Boundary) -> Tensor:
        self._fetch(boundary)
        assert boundary.coming is not None
        assert self._streams is not None
        (buffer, event), boundary.coming = boundary.coming, None
        self._streams.wait("compute", event)
        return boundary.like_source(buffer)

    def _abandon(self, boundary: _Boundary) -> None:
        """Drop a copy that nobody took, once it is done with the memory."""
        if boundary.coming is not None:
            assert self._streams is not None
            self._streams.wait("compute", boundary.coming[1])
            boundary.coming = None

    # -----------------------------------------------------------------------------------------------------------------
    # Release
    # -----------------------------------------------------------------------------------------------------------------
    def _release(self, boundary: _Boundary) -> None:
        """Called when autograd has let go of a token: in any thread, and at any point of our own code."""
        self._dead.append(boundary)
        if not self._busy:
            with self._working():
                pass

    def _bury(self) -> None:
        while self._dead:
            boundary = self._dead.popleft()
            self._alive.pop(boundary.number, None)
            for queue in (self._kept, self._in_flight):
                if boundary in queue:
                    queue.remove(boundary)
            if boundary.source is not None:
                if boundary.written is not None:
                    assert self._streams is not None
                    self._streams.wait("compute", boundary.written[0])  # a copy still reads it
                boundary.source = None
                boundary.stats.on_device(-boundary.nbytes)
            self._abandon(boundary)
            if boundary.slot is not None:
                boundary.slot.release()

    # -----------------------------------------------------------------------------------------------------------------
    # Warnings
    # -----------------------------------------------------------------------------------------------------------------
    def _warn_of_limit(self) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"Boundaries fill the {self._limit / GIB:.2f} GiB of host memory that this rank may use; the others"
                " stay on the device. Raise host_memory, or set BoundaryOffload(host_budget=...) to what you want."
            )

    def _warn_of_little_memory(self, needed: int) -> None:
        ranks, node = local_ranks(), node_bytes()
        if not self._warned and self._limit == math.inf and needed * ranks > node:
            self._warned = True
            warnings.warn(
                f"Boundaries need {needed / GIB:.2f} GiB of host memory a rank, {needed * ranks / GIB:.2f} GiB for the"
                f" {ranks} ranks of this node, which has {node / GIB:.2f} GiB. Set BoundaryOffload(host_budget=...)."
            )


@dataclass(eq=False)
class _Stats:
    """Counts and bytes between two times at which no boundary is alive."""

    boundaries: int = 0
    offloaded: int = 0
    payload_bytes: int = 0
    host_bytes: int = 0
    device_bytes: int = 0
    peak_device_bytes: int = 0

    def on_device(self, nbytes: int) -> None:
        self.device_bytes += nbytes
        self.peak_device_bytes = max(self.peak_device_bytes, self.device_bytes)

    def sent(self, nbytes: int, host_bytes: int) -> None:
        self.offloaded += 1
        self.payload_bytes += nbytes
        self.host_bytes = max(self.host_bytes, host_bytes)


@dataclass(eq=False)
class _Boundary:
    """The input of one checkpointed part.

    Attributes:
        number: counts up over all forwards.
        source: the tensor on the device, detached; None once its memory is in the host's.
        version: of the source, when it was given.
        stats: of the step that it belongs to.
        slot: its host memory.
        written: (event,) behind its copy to the host.
        coming: the buffer of a copy back to the device that nobody took yet, and the event behind it.
    """

    number: int
    source: Tensor | None
    version: int
    stats: _Stats
    slot: Slot | None = None
    written: tuple[Any] | None = None
    coming: tuple[Tensor, Any] | None = None
    shape: torch.Size = field(init=False)
    stride: tuple[int, ...] = field(init=False)
    dtype: torch.dtype = field(init=False)
    nbytes: int = field(init=False)
    like_source: Callable[[Tensor], Tensor] = field(init=False)

    def __post_init__(self) -> None:
        assert self.source is not None
        local = _local(self.source)
        self.shape, self.stride, self.dtype = local.shape, local.stride(), local.dtype
        self.nbytes = local.numel() * local.element_size()
        self.like_source = _distribute_as(self.source)

    def in_host_memory(self) -> Tensor:
        """The slot as a tensor, with the source's strides where these leave no gaps."""
        assert self.slot is not None
        flat = self.slot.memory.view(self.dtype)
        dense = sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True)) + 1 == flat.numel()
        return flat.as_strided(self.shape, self.stride) if dense else flat.view(self.shape)

    def require_unchanged(self) -> Tensor:
        """The source; plain checkpointing refuses a changed one too.

        Raises:
            RuntimeError: it was changed in place.
        """
        assert self.source is not None
        if self.source._version != self.version:
            raise RuntimeError(
                f"The hidden states [{', '.join(map(str, self.shape))}] of a checkpointed part were changed in place"
                " after they were given to it, so it cannot be run again from them. Use an operation that is not in"
                " place, or clone them first."
            )
        return self.source


class _Token:
    """What autograd holds of a boundary."""

    def __init__(self, boundary: _Boundary) -> None:
        self.boundary = boundary


class _Call:
    """The hooks of one checkpointed call: of all that it saves they take its ``hidden``, as often as it is saved."""

    def __init__(self, offloader: BoundaryOffloader, hidden: Tensor) -> None:
        self._offloader = offloader
        self._hidden: Tensor | None = hidden
        self._token: weakref.ref[_Token] | None = None

    def pack(self, tensor: Tensor) -> Tensor | _Token:
        hidden = self._hidden
        if hidden is None or not (tensor is hidden or _is_alias(tensor, hidden)):
            return tensor
        token = None if self._token is None else self._token()
        if token is None:
            token = self._offloader._add(hidden)
            self._token = weakref.ref(token)
        return token

    def end(self) -> None:
        """The graph keeps the hooks, and they must not keep the hidden states."""
        self._hidden = None

    def unpack(self, saved: Tensor | _Token) -> Tensor:
        return saved if isinstance(saved, Tensor) else self._offloader._restore(saved.boundary)


class _Working:
    """Inside: the offloader's lists are ours alone, and what autograd releases meanwhile waits until the end."""

    def __init__(self, offloader: BoundaryOffloader) -> None:
        self._offloader = offloader

    def __enter__(self) -> None:
        self._offloader._lock.acquire()
        self._outer = self._offloader._busy
        self._offloader._busy = True
        if not self._outer:
            self._offloader._bury()

    def __exit__(self, *exception: object) -> None:
        try:
            if not self._outer:
                self._offloader._bury()
        finally:
            self._offloader._busy = self._outer
            self._offloader._lock.release()


def _checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return checkpoint(function, *args, use_reentrant=False, context_fn=checkpoint_contexts, **kwargs)


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _distribute_as(tensor: Tensor) -> Callable[[Tensor], Tensor]:
    if not isinstance(tensor, DTensor):
        return lambda local: local
    mesh, placements, shape, stride = tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride()
    return lambda local: DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


def _is_alias(tensor: Tensor, hidden: Tensor) -> bool:
    """Whether it is the very memory of ``hidden``, seen in the same way: the same argument given twice."""
    return (
        type(tensor) is type(hidden)
        and not isinstance(tensor, DTensor)
        and tensor.numel() > 0
        and tensor.dtype == hidden.dtype
        and tensor.shape == hidden.shape
        and tensor.stride() == hidden.stride()
        and tensor.device == hidden.device
        and tensor.data_ptr() == hidden.data_ptr()
    )


def _keeps_its_strides(tensor: Tensor) -> bool:
    """Whether a copy can have the same strides: no element lies twice in memory, as after ``expand``, and there is one.

    Other strides would choose other kernels, and the recomputation would differ in the last bit.
    """
    local = _local(tensor)
    if local.numel() == 0:
        return False
    reach = 0
    for step, size in sorted(zip(local.stride(), local.shape, strict=True)):
        if size > 1:
            if step <= reach:
                return False
            reach += step * (size - 1)
    return True
