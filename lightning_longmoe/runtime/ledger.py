"""A ledger of named bytes, and an arena that takes every buffer of an operator through it.

An allocator's trace depends on what ran before; a ledger does not. It books what an operator asks for, by name, so two
runs of one shape give the same figures to the byte, and a *dry* run, on the meta device, gives them without allocating.

Glossary: *buffer* - a tensor that the arena made; *adopted* - made by a torch function that has no ``out=``; *held* -
lent by the caller (an input, the parameters), counted all the same; *transient* - what torch functions allocate inside
a stretch of code and free again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Ledger:
    """Bytes by name, now and at their largest.

    Args:
        aside: names that ``peak_working_bytes`` leaves out (parameters, their gradients, ...).

    Attributes:
        now: bytes by name.
        current_bytes, peak_bytes: of all names together.
        peak_working_bytes: of all names but those aside.
        at_peak: bytes by name at ``peak_bytes``.
        largest, largest_buffer: of each name, all its bytes together and its largest buffer.
    """

    def __init__(self, aside: Collection[str] = ()) -> None:
        self.aside = frozenset(aside)
        self.now: Counter[str] = Counter()
        self.reset_peak()

    def reset_peak(self) -> None:
        """Start the peaks again from what is booked now."""
        self.peak_bytes = self.current_bytes = sum(self.now.values())
        self.peak_working_bytes = self._working_bytes = sum(n for name, n in self.now.items() if name not in self.aside)
        self.at_peak = dict(self.now)
        self.largest = dict(self.now)
        self.largest_buffer: dict[str, int] = {}

    def add(self, name: str, nbytes: int) -> None:
        """Book ``nbytes`` more under ``name``."""
        self._change(name, nbytes)
        self.largest_buffer[name] = max(self.largest_buffer.get(name, 0), nbytes)
        self.largest[name] = max(self.largest.get(name, 0), self.now[name])
        self.peak_working_bytes = max(self.peak_working_bytes, self._working_bytes)
        if self.current_bytes > self.peak_bytes:
            self.peak_bytes = self.current_bytes
            self.at_peak = {name: n for name, n in self.now.items() if n}

    def remove(self, name: str, nbytes: int) -> None:
        assert self.now[name] >= nbytes, (name, self.now[name], nbytes)
        self._change(name, -nbytes)

    def _change(self, name: str, nbytes: int) -> None:
        self.now[name] += nbytes
        self.current_bytes += nbytes
        if name not in self.aside:
            self._working_bytes += nbytes


class Arena:
    """Buffers of one run of an operator, booked in a ledger.

    The arena keeps no storage of its own: a released buffer goes back to torch's allocator, which gives the same block
    to the next buffer of that size. Whoever releases a buffer also drops its own reference.

    Args:
        device: where buffers live; the meta device makes a dry run.
        ledger: None: a new one.
        fill: a value that every new buffer is filled with, to show reads of what was never written.
    """

    def __init__(self, device: torch.device, ledger: Ledger | None = None, fill: float | None = None) -> None:
        self.device = device
        self.ledger = Ledger() if ledger is None else ledger
        self._fill = fill
        self._live: dict[int, tuple[Tensor, str, int]] = {}

    @property
    def dry(self) -> bool:
        return self.device.type == "meta"

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, capacity: int | None = None) -> Tensor:
        """An uninitialised buffer.

        Args:
            capacity: rows (of the first dimension) that the buffer is made for, where it is to have the size of others.
        """
        rows = shape[0] if capacity is None else capacity
        assert rows >= shape[0], (name, shape, capacity)
        self.ledger.add(name, nbytes := rows * prod(shape[1:]) * dtype.itemsize)
        buffer = torch.empty((rows, *shape[1:]), dtype=dtype, device=self.device)
        if self._fill is not None and dtype.is_floating_point:
            buffer.fill_(self._fill)
        return self._keep(name, buffer[: shape[0]], nbytes)

    def zeros(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        self.ledger.add(name, nbytes := prod(shape) * dtype.itemsize)
        return self._keep(name, torch.zeros(shape, dtype=dtype, device=self.device), nbytes)

    def adopt(self, name: str, tensor: Tensor) -> Tensor:
        """Book a tensor that owns its memory."""
        self.ledger.add(name, tensor.nbytes)
        return self._keep(name, tensor, tensor.nbytes)

    def upload(self, name: str, array: NDArray[np.integer]) -> Tensor:
        """A copy of a host array on the device, without waiting for it."""
        host = torch.from_numpy(np.ascontiguousarray(array))
        return self.adopt(name, host.to(self.device, non_blocking=True))

    def hold(self, name: str, *tensors: Tensor | None) -> None:
        """Book tensors of the caller until ``release``; a tensor without elements is left out."""
        for tensor in tensors:
            if tensor is not None and id(tensor) not in self._live:
                self.adopt(name, tensor)

    def _keep(self, name: str, tensor: Tensor, nbytes: int) -> Tensor:
        self._live[id(tensor)] = (tensor, name, nbytes)
        return tensor

    def release(self, *tensors: Tensor | None) -> None:
        """Take tensors off the books; they must be the very objects that the arena gave."""
        for tensor in tensors:
            if tensor is not None:
                _, name, nbytes = self._live.pop(id(tensor))
                self.ledger.remove(name, nbytes)

    @contextmanager
    def transient(self, name: str, nbytes: int) -> Iterator[None]:
        """Book what torch functions allocate for themselves inside the ``with``."""
        self.ledger.add(name, nbytes)
        try:
            yield
        finally:
            self.ledger.remove(name, nbytes)

    def close(self) -> None:
        """Take everything off the books."""
        for _, name, nbytes in self._live.values():
            self.ledger.remove(name, nbytes)
        self._live.clear()
