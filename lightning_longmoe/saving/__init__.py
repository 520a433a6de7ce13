"""Checkpoints: written so that an interruption at any moment leaves the last good one, read on any number of ranks.

A *folder* checkpoint (`save_sharded`) is what torch.distributed.checkpoint writes, each rank its own shards, and
``meta.pt`` with everything else of Lightning's checkpoint. A *file* checkpoint (`save_single_file`) has Lightning's
ordinary format. `load` reads both straight into the shards of the running module, whatever world size and expert size
wrote them; `consolidate` turns a folder into a file.

Glossary: *fqn* - a parameter's name in the module, without what wrappers add; *piece* - the part of one tensor that
this rank holds; *staging folder* - where a checkpoint grows until it is complete; *commit* - the one rename that puts
it in place; *control group* - all ranks, over gloo.

Reading order: ``runtime.pieces`` (where a shard lies in its tensor), ``state`` (names of parameters, optimizer state),
``contents`` (what goes where), ``commit`` (files and renames), ``agreement`` (errors on all ranks alike), ``gathering``
and ``writing``, ``sources`` and ``reading``, ``consolidate``.
"""

from __future__ import annotations

from lightning_longmoe.saving.agreement import CheckpointError, gather_per_rank, require_all_ranks
from lightning_longmoe.saving.commit import is_complete, newest_complete, remove
from lightning_longmoe.saving.consolidate import consolidate, consolidate_command
from lightning_longmoe.saving.reading import load
from lightning_longmoe.saving.state import model_state, optimizer_state
from lightning_longmoe.saving.writing import save_sharded, save_single_file

__all__ = [
    "CheckpointError",
    "consolidate",
    "consolidate_command",
    "gather_per_rank",
    "is_complete",
    "load",
    "model_state",
    "newest_complete",
    "optimizer_state",
    "remove",
    "require_all_ranks",
    "save_sharded",
    "save_single_file",
]
