"""Bytes of live CPU tensors, counted exactly, for a device that has no allocator statistics.

The resident set of a process would say something else: it holds the interpreter and what the allocator keeps for later,
and it does not fall when a tensor dies.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class TrackedBytes(TorchDispatchMode):
    """While entered, follows the storage of every CPU tensor that an operation returns, until it is freed.

    ``current`` and ``peak`` are bytes; a storage counts once however many tensors view it. What an operation allocates
    and frees inside itself is not seen. Tensors made before are added with :meth:`add`. DTensors count by their local
    part. Slows each operation by some microseconds.
    """

    def __init__(self) -> None:
        super().__init__()
        self.current = 0
        self.peak = 0
        self._sizes: dict[int, int] = {}  # address of the storage -> bytes
        self._deaths: dict[int, weakref.ref] = {}
        self._resize = torch.UntypedStorage.resize_

    def reset_peak(self) -> None:
        """Start a new measurement from what is alive now."""
        self.peak = self.current

    def add(self, tensors: Iterable[Any]) -> None:
        """Count these tensors, if they are tensors on the CPU and not counted yet."""
        for tensor in tensors:
            if isinstance(tensor, DTensor):
                tensor = tensor._local_tensor
            if isinstance(tensor, Tensor) and tensor.device.type == "cpu" and not isinstance(tensor, FakeTensor):
                self._add(tensor.untyped_storage())

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._deaths:
            return
        self._deaths[key] = weakref.ref(storage, lambda _: self._set(key, None))
        self._set(key, storage.nbytes())

    def _set(self, key: int, size: int | None) -> None:
        """Note a storage's size; None: it was freed."""
        self.current += (size or 0) - self._sizes.pop(key, 0)
        self.peak = max(self.peak, self.current)
        if size is None:
            self._deaths.pop(key, None)
        else:
            self._sizes[key] = size

    def __enter__(self) -> TrackedBytes:
        tracker, original = self, self._resize

        # FSDP2 frees and refills gathered parameters by resizing their storage, which the dispatcher does not see.
        def resize_(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            result = original(storage, size)
            if storage._cdata in tracker._sizes:
                tracker._set(storage._cdata, storage.nbytes())
            return result

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
        super().__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # let DTensor turn itself into operations on local tensors, which come here
        result = func(*args, **(kwargs or {}))
        self.add(tree_leaves(result))
        return result
