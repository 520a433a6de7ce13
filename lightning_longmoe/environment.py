"""Processes: which launcher starts them, and what must be true of them before anything is distributed."""

from __future__ import annotations

import atexit
import functools
import time
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist

from lightning_longmoe import _compat
from lightning_longmoe.launchers import NotebookLauncher
from lightning_longmoe.saving import newest_complete

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.pytorch.strategies.launchers.launcher import _Launcher
    from lightning.pytorch.strategies.parallel import ParallelStrategy

LauncherName = Literal["script", "fork", "spawn"]


def choose_launcher(strategy: ParallelStrategy, name: LauncherName, processes: int, nodes: int) -> _Launcher | None:
    """The launcher for ``processes`` on each of ``nodes``.

    One process needs none, so it also runs in a notebook. Environments that start the processes themselves (torchrun,
    Slurm) need none either.
    """
    from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher

    environment = strategy.cluster_environment
    assert environment is not None
    if environment.creates_processes_externally or processes * nodes == 1:
        return None
    if name == "script":
        return _SubprocessScriptLauncher(environment, processes, nodes)
    if nodes > 1:
        raise ValueError(
            f"LongMoEStrategy(launcher={name!r}) starts processes on one node only, and num_nodes={nodes}."
            " Use launcher='script', torchrun or Slurm."
        )
    return NotebookLauncher(strategy, start_method=name)


@functools.cache
def leave_process_group_at_exit() -> None:
    """Give gloo's threads time to end: a process that exits under them may abort, after a run that went well."""

    def leave() -> None:
        if dist.is_available() and dist.is_initialized() and "gloo" in str(dist.get_backend()):
            dist.destroy_process_group()
            time.sleep(0.5)

    atexit.register(leave)


def refuse_unusable_environment(device: torch.device, world_size: int) -> None:
    """Raise ValueError for an accelerator or a process group that the strategy cannot use.

    Args:
        device: this rank's device.
        world_size: what the Trainer expects.
    """
    if device.type not in ("cuda", "cpu"):
        raise ValueError(
            f"LongMoEStrategy does not run on {device.type!r} devices. Use Trainer(accelerator='gpu') with NVIDIA or"
            " AMD GPUs, or Trainer(accelerator='cpu') to try it with gloo."
        )
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() != world_size:
        raise ValueError(
            f"A process group of {dist.get_world_size()} ranks is already initialized, but the Trainer expects"
            f" {world_size} (num_nodes x devices). Make them equal, or let the Trainer initialize the group."
        )
    if device.type == "cuda" and dist.is_available() and dist.is_initialized():
        backend = dist.get_backend()
        if "nccl" not in str(backend):
            raise ValueError(
                f"The process group that is already initialized uses the backend {str(backend)!r}, which cannot reduce"
                " tensors on GPUs: initialize it with 'nccl' or 'cuda:nccl,cpu:gloo'."
            )


def refuse_fresh_start(trainer: pl.Trainer) -> None:
    """Raise ValueError where ``ckpt_path="last"`` found no ``last.ckpt`` though a complete checkpoint lies beside it.

    Lightning would start anew, as after a run that was killed while it wrote its first ``last.ckpt``.
    """
    from lightning.pytorch.callbacks import ModelCheckpoint

    if trainer.ckpt_path is not None or _compat.requested_checkpoint() != "last":
        return
    folders = [c.dirpath for c in trainer.callbacks if isinstance(c, ModelCheckpoint) and c.dirpath]  # type: ignore[attr-defined]
    found = [path for path in map(newest_complete, dict.fromkeys(folders)) if path is not None]
    if found:
        raise ValueError(
            f"ckpt_path='last' found no last checkpoint, and {str(found[0])!r} is complete: it would start from step 0."
            f" Pass ckpt_path={str(found[0])!r}, or None to start anew."
        )


def refuse_unusable_callbacks(trainer: pl.Trainer) -> None:
    """Raise ValueError for callbacks of Lightning that copy weights and do not know sharded ones."""
    from lightning.pytorch import callbacks

    names = ("StochasticWeightAveraging", "WeightAveraging")
    kinds = tuple(getattr(callbacks, name) for name in names if hasattr(callbacks, name))
    found = [type(callback).__name__ for callback in trainer.callbacks if isinstance(callback, kinds)]  # type: ignore[attr-defined]
    if found:
        raise ValueError(
            f"The callback {found[0]} averages whole weights and cannot average sharded ones: leave it out, or average"
            " checkpoints afterwards (`longmoe consolidate` makes whole files of them)."
        )
