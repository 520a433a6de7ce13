"""AdamW state of parameters of one kind, in flat page-locked slabs of host memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_longmoe._compat import dtensor_on_host, local_tensor
from lightning_longmoe.optimizer.buckets import aligned, cut
from lightning_longmoe.optimizer.update import round_stochastically
from lightning_longmoe.runtime.streams import Streams

MOMENTS = ("exp_avg", "exp_avg_sq")
MASTER = "master"
SLAB_NUMEL = 1 << 29
"""Elements of one slab, where no single parameter has more: slabs are page-locked one by one, which shows progress."""


def dense_flat(tensor: Tensor) -> Tensor:
    """A tensor's own memory as [numel], whatever the order of its dimensions.

    Raises:
        ValueError: its elements do not fill a stretch of memory without gaps.
    """
    if tensor.is_contiguous():
        return tensor.view(-1)  # steps run without gradients
    reach = 1
    for step, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and step != reach:
            raise ValueError(
                f"A parameter of shape {tuple(tensor.shape)} and strides {tensor.stride()} has gaps in memory, and"
                " OffloadStreamAdamW updates stretches of memory: make it contiguous."
            )
        reach *= size
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def master_dtype(dtype: torch.dtype) -> torch.dtype | None:
    """The dtype of the master weights of a parameter; None where it is its own master.

    Raises:
        ValueError: the dtype cannot be trained.
    """
    if dtype in (torch.float32, torch.float64):
        return None
    if dtype in (torch.bfloat16, torch.float16):
        return torch.float32
    raise ValueError(f"OffloadStreamAdamW trains float64, float32, bfloat16 and float16 parameters, not {dtype}.")


class Store:
    """Slabs of exp_avg, exp_avg_sq and, for parameters of low precision, of master weights.

    Args:
        parameters: of one dtype and one device.
        streams: of that device; page-locks the slabs.
        bucket_numel: elements of a bucket.
        moments: dtype of the moments in host memory; None: that of the update.

    Attributes:
        parameters: in the slabs' order.
        buckets: ranges of the slabs.
        slabs: by name, each [numel] on the CPU; parts between parameters are unused.
        update_dtype: in which the update is computed.
    """

    def __init__(
        self, parameters: Sequence[Tensor], streams: Streams, bucket_numel: int, moments: torch.dtype | None
    ) -> None:
        self.parameters = list(parameters)
        dtype = self.parameters[0].dtype
        numels = [local_tensor(parameter).numel() for parameter in self.parameters]
        self.buckets = cut(numels, bucket_numel)
        self._offsets = [0]
        for numel in numels:
            self._offsets.append(self._offsets[-1] + aligned(numel))
        self.update_dtype = master_dtype(dtype) or dtype
        of_moments = moments if moments is not None and self.update_dtype == torch.float32 else self.update_dtype
        dtypes = dict.fromkeys(MOMENTS, of_moments)
        if master_dtype(dtype) is not None:
            dtypes[MASTER] = self.update_dtype
        self.slabs = {name: torch.zeros(self._offsets[-1], dtype=kind) for name, kind in dtypes.items()}
        self.pinned = {name: streams.pin(slab) for name, slab in self.slabs.items() if slab.numel()}
        self._written: list[tuple[int, int] | None] = [None] * len(numels)
        self.refresh_masters()

    @property
    def rounds_moments(self) -> bool:
        return self.slabs[MOMENTS[0]].dtype != self.update_dtype

    def flat(self, name: str, index: int) -> Tensor:
        """The state of one parameter in its slab: [numel]."""
        start = self._offsets[index]
        return self.slabs[name][start : start + local_tensor(self.parameters[index]).numel()]

    def view(self, name: str, index: int) -> Tensor:
        """The same in the shape and the strides of the parameter; a DTensor on the CPU where the parameter is one."""
        parameter = self.parameters[index]
        local = local_tensor(parameter)
        if local.numel() == 0:
            part = torch.empty(local.shape, dtype=self.slabs[name].dtype)
        else:
            part = self.flat(name, index).as_strided(local.shape, local.stride())
        return dtensor_on_host(part, parameter) if isinstance(parameter, DTensor) else part

    @torch.no_grad()
    def refresh_masters(self, changed_only: bool = True) -> None:
        """Take master weights from parameters that someone else has changed since the last update, or all at first."""
        if MASTER not in self.slabs:
            return
        for index, parameter in enumerate(self.parameters):
            if not changed_only or self._written[index] != _version(parameter):
                self.flat(MASTER, index).copy_(dense_flat(local_tensor(parameter)))
                self._written[index] = _version(parameter)

    def masters_are_current(self) -> None:
        """Note that parameters and masters belong together."""
        if MASTER in self.slabs:
            self._written = [_version(parameter) for parameter in self.parameters]

    def bytes_of(self, start: int, stop: int) -> int:
        """Of a bucket, of all kinds, each aligned for itself."""
        return sum(_aligned_bytes((stop - start) * slab.element_size()) for slab in self.slabs.values())

    def carve(self, memory: Tensor, numel: int) -> dict[str, Tensor]:
        """Views of ``memory`` [bytes] for ``numel`` elements of every kind."""
        views, offset = {}, 0
        for name, slab in self.slabs.items():
            nbytes = numel * slab.element_size()
            views[name] = memory[offset : offset + nbytes].view(slab.dtype)
            offset += _aligned_bytes(nbytes)
        return views

    def widened(self, views: dict[str, Tensor]) -> dict[str, Tensor]:
        """Moments in the dtype of the update: copies, where they are stored in a lower one."""
        if not self.rounds_moments:
            return views
        return {n: view.to(self.update_dtype) if n in MOMENTS else view for n, view in views.items()}

    def narrow(self, wide: dict[str, Tensor], views: dict[str, Tensor]) -> None:
        """Put widened moments back."""
        if self.rounds_moments:
            for name in MOMENTS:
                round_stochastically(wide[name], views[name])

    def unpin(self, streams: Streams) -> None:
        for name, pinned in self.pinned.items():
            if pinned:
                streams.unpin(self.slabs[name])
        self.pinned = {}


def _version(parameter: Tensor) -> tuple[int, int]:
    local = local_tensor(parameter)
    return local.data_ptr(), local._version


def _aligned_bytes(nbytes: int) -> int:
    return -(-nbytes // 256) * 256


def make_stores(
    parameters: Sequence[Tensor],
    streams: Streams,
    bucket_numel: int,
    moments: torch.dtype | None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Store]:
    """Stores for all parameters: one for each dtype, and more where a slab would grow too large.

    Args:
        progress: called after each store with the bytes that are in place and those that will be.
    """
    groups: list[list[Tensor]] = []
    sizes: list[int] = []
    for dtype in dict.fromkeys(parameter.dtype for parameter in parameters):
        last: int | None = None
        for parameter in parameters:
            if parameter.dtype != dtype:
                continue
            numel = local_tensor(parameter).numel()
            if last is None or sizes[last] + numel > SLAB_NUMEL:
                groups.append([])
                sizes.append(0)
                last = len(groups) - 1
            groups[last].append(parameter)
            sizes[last] += numel
    total = sum(host_bytes(parameter, moments) for parameter in parameters)
    stores, done = [], 0
    for group in groups:
        stores.append(Store(group, streams, bucket_numel, moments))
        done += sum(host_bytes(parameter, moments) for parameter in group)
        progress(done, total)
    return stores


def host_bytes(parameter: Tensor, moments: torch.dtype | None) -> int:
    """Host memory for the state of one parameter on this rank."""
    wide = master_dtype(parameter.dtype)
    update = wide or parameter.dtype
    of_moment = moments if moments is not None and update == torch.float32 else update
    each = 2 * of_moment.itemsize + (0 if wide is None else wide.itemsize)
    return aligned(local_tensor(parameter).numel()) * each
