"""`PeakMemoryMonitor`: the largest memory of a training step, over all ranks and of rank 0."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.callbacks import Callback
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from lightning_longmoe.callbacks.tracked_bytes import TrackedBytes
from lightning_longmoe.dispatch import PipelinedDispatch
from lightning_longmoe.models.experts import Experts
from lightning_longmoe.parallelize import parallelized

if TYPE_CHECKING:
    import lightning.pytorch as pl

GIB = 2**30


class PeakMemoryMonitor(Callback):
    """Logs the peak memory of the training steps since the last logged one.

    On CUDA, from the allocator, whose peak counters it resets at each step: ``longmoe/peak_memory_gib`` (allocated to
    tensors) and ``longmoe/peak_reserved_gib`` (taken from the device). On the CPU, which has no such counters:
    ``longmoe/peak_tracked_gib``, the bytes of live tensors, by following every operation of the training steps; that
    slows small models visibly. Each is the largest over the ranks; the same key with ``_rank0`` before ``_gib`` is
    rank 0's own. ``longmoe/peak_dispatch_gib`` is what PipelinedLLEP booked in the worst layer, weights and gradients
    counted in; ``longmoe/peak_boundaries_gib`` and ``longmoe/host_boundaries_gib`` what boundaries held on the device
    and in host memory, where `LongMoEStrategy` offloads them. Validation is not measured. Ranks exchange figures only
    at the steps that Lightning logs.
    """

    def __init__(self) -> None:
        self._peaks: dict[str, int] = {}  # key -> bytes, the largest since the last exchange
        self._tracker: TrackedBytes | None = None
        self._entered = False
        self._last_step = 0

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._last_step = trainer.global_step
        self._peaks = {}
        self._tracker = TrackedBytes() if trainer.strategy.root_device.type == "cpu" else None

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._tracker is None:
            torch.cuda.reset_peak_memory_stats(trainer.strategy.root_device)
            return
        self._tracker.add(tree_leaves(batch))
        self._tracker.add(lasting_tensors(trainer, pl_module))
        self._tracker.reset_peak()
        self._tracker.__enter__()
        self._entered = True

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._leave()
        for key, size in self._measured(trainer.strategy.root_device).items():
            self._peaks[key] = max(size, self._peaks.get(key, 0))
        for key, size in operator_peaks(pl_module).items():
            self._peaks[key] = max(size, self._peaks.get(key, 0))
        step, every = trainer.global_step, trainer.log_every_n_steps  # type: ignore[attr-defined]
        if every and step // every != self._last_step // every:
            self._log(trainer, pl_module)
        self._last_step = step

    def _measured(self, device: torch.device) -> dict[str, int]:
        """This rank's peaks of the micro-batch that just ended, in bytes, by key without its unit."""
        if self._tracker is not None:
            return {"longmoe/peak_tracked": self._tracker.peak}
        return {
            "longmoe/peak_memory": torch.cuda.max_memory_allocated(device),
            "longmoe/peak_reserved": torch.cuda.max_memory_reserved(device),
        }

    def _log(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        own = list(self._peaks.values())
        rank0 = own if trainer.is_global_zero else [0] * len(own)
        both = torch.tensor(own + rank0, dtype=torch.float64, device=trainer.strategy.root_device)
        largest = trainer.strategy.reduce(both, reduce_op="max").tolist()
        for index, key in enumerate(self._peaks):
            module.log(f"{key}_gib", largest[index] / GIB, on_step=True, on_epoch=False, batch_size=1)
            module.log(f"{key}_rank0_gib", largest[len(own) + index] / GIB, on_step=True, on_epoch=False, batch_size=1)
        self._peaks = {}

    def _leave(self) -> None:
        if self._entered:
            assert self._tracker is not None
            self._tracker.__exit__(None, None, None)
            self._entered = False

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._leave()

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._tracker = None


def operator_peaks(module: pl.LightningModule) -> dict[str, int]:
    """The largest booked bytes of each operator with a ledger since the last call, by key without its unit."""
    peaks: dict[str, int] = {}
    for child in module.modules():
        if isinstance(child, Experts) and isinstance(child.dispatch, PipelinedDispatch):
            ledger = child.dispatch.ledger
            peaks["longmoe/peak_dispatch"] = max(ledger.peak_bytes, peaks.get("longmoe/peak_dispatch", 0))
            ledger.reset_peak()
    done = parallelized(module)
    if done is not None and done.takeover.offloader is not None:
        stats = done.takeover.offloader.stats()
        peaks["longmoe/peak_boundaries"] = stats["peak_device_bytes"]
        peaks["longmoe/host_boundaries"] = stats["host_bytes"]
    return peaks


def lasting_tensors(trainer: pl.Trainer, module: pl.LightningModule) -> list[Any]:
    """What lives from step to step: parameters, their gradients, buffers, optimizer states."""
    parameters = list(module.parameters())
    states = [leaf for optimizer in trainer.optimizers for leaf in tree_leaves(dict(optimizer.state))]
    return [*parameters, *(p.grad for p in parameters), *module.buffers(), *states]
