"""Copies between device and host beside the stream that computes: one small interface, CUDA and host forms of it.

What offloads to the host is written against `Streams` alone, so that tests run it on a scheduler without a device
(`fake_streams.py`) that reorders all that is not ordered by a wait.

Glossary: *lane* - a queue of work in order: "compute" (the stream that the caller computes on, asked for anew at each
call), "out" (device to host), "in" (host to device). *event* - a point of a lane that another lane can wait for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

Lane = Literal["compute", "out", "in"]


class Streams(Protocol):
    """What an offload needs of a device. Nothing here makes the host wait but ``synchronize``."""

    def allocate(self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Uninitialised device memory of the compute lane: whoever else touches it waits for that lane first."""

    def copy(self, lane: Lane, target: Tensor, source: Tensor) -> None:
        """Enqueue ``target = source``. Both must live until the compute lane has waited for it (no one else cares)."""

    def record(self, lane: Lane) -> Any:
        """An event behind everything that is in the lane by now."""

    def wait(self, lane: Lane, event: Any) -> None:
        """Let what comes into the lane from now on start after the event."""

    def synchronize(self) -> None:
        """Let the host wait until all lanes are empty."""

    def pin(self, memory: Tensor) -> bool:
        """Page-lock host memory as it is, without rounding. False: it stays pageable."""

    def unpin(self, memory: Tensor) -> None:
        """Undo ``pin``, before the memory is freed and when no copy uses it."""


class HostStreams:
    """Where "device" memory is host memory: a copy is done when it returns, and nothing has to wait."""

    def allocate(self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty_strided(tuple(shape), tuple(stride), dtype=dtype)

    def copy(self, lane: Lane, target: Tensor, source: Tensor) -> None:
        target.copy_(source)

    def record(self, lane: Lane) -> None:
        return None

    def wait(self, lane: Lane, event: Any) -> None:
        return None

    def synchronize(self) -> None:
        return None

    def pin(self, memory: Tensor) -> bool:
        return False

    def unpin(self, memory: Tensor) -> None:
        return None


class CudaStreams:
    """Two copy streams beside whatever stream is current."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lanes = {"out": torch.cuda.Stream(device), "in": torch.cuda.Stream(device)}

    def _stream(self, lane: Lane) -> torch.cuda.Stream:
        # Asked for at each call: a backward may run on another stream than the forward, or than the last step did.
        return torch.cuda.current_stream(self._device) if lane == "compute" else self._lanes[lane]

    def allocate(self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty_strided(tuple(shape), tuple(stride), dtype=dtype, device=self._device)

    def copy(self, lane: Lane, target: Tensor, source: Tensor) -> None:
        with torch.cuda.stream(self._stream(lane)):
            target.copy_(source, non_blocking=True)

    def record(self, lane: Lane) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(self._stream(lane))
        return event

    def wait(self, lane: Lane, event: torch.cuda.Event) -> None:
        self._stream(lane).wait_event(event)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)

    def pin(self, memory: Tensor) -> bool:
        # Not `pin_memory()`: torch's allocator of pinned memory rounds every block up to a power of two and keeps it.
        with contextlib.suppress(RuntimeError):
            return int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)) == 0
        return False

    def unpin(self, memory: Tensor) -> None:
        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())


def streams_for(device: torch.device) -> Streams:
    """The streams of a CUDA device; for any other device the host form."""
    return CudaStreams(device) if device.type == "cuda" else HostStreams()
