"""Saving: every rank its own shards into a folder, or everything gathered into one file by rank 0.

Both take Lightning's checkpoint as the strategy has it: under "state_dict" what `model_state` returned, under
"optimizer_states" what `optimizer_state` returned, each as a callback or hook may have changed it.
"""

from __future__ import annotations

import contextlib
import os
import warnings
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from lightning_longmoe.runtime.pieces import Piece
from lightning_longmoe.saving.agreement import (
    CheckpointError,
    ControlGroup,
    broadcast_from_zero,
    describe,
    failure_text,
    gather_per_rank,
    on_all_ranks,
    require_all_ranks,
    size_and_rank,
)
from lightning_longmoe.saving.commit import META_FILE, staged
from lightning_longmoe.saving.contents import KeyPath, flat_keys, ordinary_checkpoint, split
from lightning_longmoe.saving.gathering import as_bytes, gather, own_pieces
from lightning_longmoe.saving.state import clean_name

WHAT = "save_checkpoint"

StrPath = str | os.PathLike[str]


def save_sharded(
    path: StrPath,
    checkpoint: Mapping[str, Any],
    module: nn.Module,
    *,
    control_group: ControlGroup,
    timeout_s: float = 25.0,
) -> None:
    """Write a folder: tensors sharded as they are, the rest in ``meta.pt``. Collective.

    The folder appears under its name, or replaces the one before it, when all ranks have written everything.

    Args:
        path: of the folder, on a file system that all ranks share; rank 0's counts.
        checkpoint: Lightning's checkpoint; left as it is. Rank 0's counts for everything but tensors.
        module: tells parameters, which must agree over the ranks, from buffers, of which rank 0's are saved.
        control_group: all ranks, over gloo.
        timeout_s: how long to wait for every rank to come.

    Raises:
        CheckpointError: ranks are missing, or writing failed on a rank; on all ranks. What was at ``path`` is intact.
    """
    path = _agreed_path(path, control_group, timeout_s)
    tensors, meta = on_all_ranks(f"{WHAT}: sorting", lambda: split(checkpoint), control_group)
    keys = flat_keys(tensors)
    _check_agreement(keys, _buffer_keys(module), control_group)
    rank = size_and_rank(control_group)[1]
    pieces = own_pieces(keys, control_group)

    def write_shards(folder: Path) -> None:
        def begin() -> None:
            if rank == 0:
                folder.mkdir()
                write_file(folder / META_FILE, meta)

        on_all_ranks(f"{WHAT}: preparing {path}", begin, control_group)
        on_all_ranks(f"{WHAT}: finding {folder}", lambda: _check_shared(folder), control_group)
        _write_shards(folder, tensors, pieces, control_group)

    _stage_and_commit(path, write_shards, control_group)


def save_single_file(
    path: StrPath,
    checkpoint: Mapping[str, Any],
    module: nn.Module,
    *,
    control_group: ControlGroup,
    timeout_s: float = 25.0,
) -> None:
    """Write one file in Lightning's ordinary format, which plain torch loads. Collective.

    Tensors come to rank 0's host memory one after the other; it needs memory for all of them, the others for one part.

    Args, Raises: as for `save_sharded`.
    """
    path = _agreed_path(path, control_group, timeout_s)
    tensors, meta = on_all_ranks(f"{WHAT}: sorting", lambda: split(checkpoint), control_group)
    keys = flat_keys(tensors)
    _check_agreement(keys, _buffer_keys(module), control_group)
    full = gather(keys, control_group)
    rank = size_and_rank(control_group)[1]

    def write_whole(file: Path) -> None:
        def write() -> None:
            if rank == 0:
                write_file(file, ordinary_checkpoint(meta, full))

        on_all_ranks(f"{WHAT}: writing {path}", write, control_group)

    _stage_and_commit(path, write_whole, control_group)


# --------------------------------------------------------------------------------------------------- steps of a save


def _agreed_path(path: StrPath, group: ControlGroup, timeout_s: float) -> Path:
    require_all_ranks(group, timeout_s, WHAT)
    text = os.fspath(path)
    text = broadcast_from_zero(text if "://" in text else os.path.abspath(text), group)
    if "://" in text:
        raise CheckpointError(
            f"{WHAT}: {text} is not a path of a mounted file system. Give one, and copy it afterwards."
        )
    return Path(text)


def _stage_and_commit(path: Path, write: Callable[[Path], None], group: ControlGroup) -> None:
    """Let all ranks ``write`` to the staging folder, which rank 0 makes, and commit it."""
    rank = size_and_rank(group)[1]
    with contextlib.ExitStack() as stack:
        new = on_all_ranks(
            f"{WHAT}: preparing {path}",
            lambda: stack.enter_context(staged(path)) if rank == 0 else None,
            group,
        )
        write(Path(broadcast_from_zero(os.fspath(new or ""), group)))
        on_all_ranks(f"{WHAT}: putting {path} in place", stack.close, group)


def _check_shared(folder: Path) -> None:
    if not folder.is_dir():
        raise CheckpointError(f"{folder} was made by rank 0 but is not visible here: use a file system that all share.")


def write_file(path: Path, value: Any) -> None:
    """``torch.save`` to a new file, durable when it returns."""
    with path.open("wb") as file:
        torch.save(value, file)
        file.flush()
        os.fsync(file.fileno())


def _write_shards(folder: Path, tensors: dict[str, Any], pieces: dict[KeyPath, Piece], group: ControlGroup) -> None:
    writer = dcp.FileSystemWriter(folder, single_file_per_rank=True, sync_files=True)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*assuming the intent is to save in a single process.*")
            dcp.save(
                tensors, storage_writer=writer, planner=_Planner(pieces), process_group=group, no_dist=group is None
            )
    except CheckpointException as error:  # no Exception: it would pass through every handler of a Trainer's user
        failures = {rank: describe(cause) for rank, (cause, _) in error.failures.items()}
        raise CheckpointError(failure_text(f"{WHAT}: writing {folder}", failures), failures) from error
    except RuntimeError as error:
        raise CheckpointError(f"{WHAT}: lost contact with a rank while writing {folder}. ({error})") from error


class _Planner(dcp.DefaultSavePlanner):
    """Writes pieces: what lies where is known from them and not from the tensors' types."""

    def __init__(self, pieces: dict[KeyPath, Piece]) -> None:
        super().__init__()
        self.pieces = {".".join(path): piece for path, piece in pieces.items()}

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([_write_item(*item) for item in self.pieces.items()], planner_data=self.mappings)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self.pieces[index.fqn].local


def _write_item(key: str, piece: Piece) -> WriteItem:
    offset, size = torch.Size(piece.offset), piece.local.shape
    data = TensorWriteData(
        chunk=ChunkStorageMetadata(offsets=offset, sizes=size),
        properties=TensorProperties.create_from_tensor(piece.local),
        size=torch.Size(piece.shape),
    )
    return WriteItem(index=MetadataIndex(key, offset), type=WriteItemType.SHARD, tensor_data=data)


# ------------------------------------------------------------------------------------------------ agreement of ranks


def _buffer_keys(module: nn.Module) -> set[KeyPath]:
    return {("state_dict", clean_name(name)) for name, _ in module.named_buffers(remove_duplicate=False)}


def _check_agreement(keys: dict[KeyPath, Tensor], buffers: set[KeyPath], group: ControlGroup) -> None:
    """Every rank must save the same tensors, and what is whole on every rank must be equal.

    A tensor that is split without saying so (the same name, another content on each rank) would lose all parts but one.

    Raises:
        CheckpointError: names the tensors that differ, on all ranks.
    """
    if group is None:
        return
    mine = {".".join(key): _fingerprint(value, content=key not in buffers) for key, value in keys.items()}
    digest = zlib.crc32(repr(mine).encode())
    if len(set(gather_per_rank(digest, group))) == 1:
        return
    everyone = gather_per_rank(mine, group)
    all_keys = {key: None for found in everyone for key in found}
    different = [key for key in all_keys if len({found.get(key) for found in everyone}) > 1]
    if not different:
        return  # the same in another order
    raise CheckpointError(
        f"{WHAT}: {len(different)} tensors differ between ranks, so one file cannot hold them: {different[:10]}. A"
        " parameter that is split over ranks must be a DTensor; one that is not must be equal everywhere."
    )


def _fingerprint(tensor: Tensor, content: bool) -> tuple[Any, ...]:
    sharded = isinstance(tensor, DTensor)
    what = (sharded, tuple(tensor.shape), str(tensor.dtype))
    if sharded or not content:
        return what
    return (*what, zlib.crc32(as_bytes(tensor.detach().cpu()).numpy()))  # type: ignore[arg-type]
