"""What a checkpoint on disk holds, folder or file, and reading parts of its tensors.

Both kinds are opened without reading a tensor: a folder has an index, and a file is mapped into memory.
"""

from __future__ import annotations

import dataclasses
import io
import pickle
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from lightning_longmoe.runtime.pieces import Piece
from lightning_longmoe.saving.agreement import CheckpointError
from lightning_longmoe.saving.commit import META_FILE, missing_part, newest_complete, resolve
from lightning_longmoe.saving.contents import FORMAT_VERSION, KeyPath
from lightning_longmoe.saving.state import clean_name


@dataclasses.dataclass(frozen=True)
class Saved:
    """One tensor of a checkpoint: where it is found, and what it is."""

    path: KeyPath
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclasses.dataclass
class SavedOptimizer:
    """One optimizer of a checkpoint.

    Attributes:
        tensors: by fqn and name; where a foreign file does not tell fqns, the parameter's number stands for it.
        values: state that is no tensor, likewise.
        param_groups: settings; "params" holds fqns, or numbers.
        local: names of state that the optimizer kept as plain parts of sharded tensors.
        other: state that belongs to no parameter.
    """

    param_groups: list[dict[str, Any]]
    tensors: dict[Any, dict[str, Saved]] = dataclasses.field(default_factory=dict)
    values: dict[Any, dict[str, Any]] = dataclasses.field(default_factory=dict)
    local: list[str] = dataclasses.field(default_factory=list)
    other: dict[Any, Any] = dataclasses.field(default_factory=dict)


class Source:
    """An opened checkpoint.

    Attributes:
        model: tensors by fqn; a tied one under all its names.
        objects: state-dict entries that are no tensors.
        optimizers: None in a weights-only checkpoint.
        rest: everything else of Lightning's checkpoint.
    """

    model: dict[str, Saved]
    objects: dict[str, Any]
    optimizers: list[SavedOptimizer] | None
    rest: dict[str, Any]

    def read(self, wanted: Iterable[tuple[Saved, Piece]]) -> None:
        """Copy the part of each tensor that its piece covers into the piece's ``local``."""
        raise NotImplementedError


def open_source(path: Path, weights_only: bool | None) -> Source:
    """Open the checkpoint at ``path``, or the one that an interrupted replacement of it left.

    Args:
        path: of a folder or a file.
        weights_only: as for ``torch.load``; None is torch's default, True. Matters for what is no tensor.

    Raises:
        CheckpointError: there is no complete checkpoint, or it holds what ``weights_only`` forbids.
    """
    real = resolve(path)
    if real is None and not path.is_file():  # an old-format file is not known to be complete, but may be
        other = newest_complete(path.parent)
        hint = f" The newest complete checkpoint beside it is {other}." if other is not None else ""
        raise CheckpointError(f"Cannot load {path}: {missing_part(path)}.{hint}")
    real = real or path
    if real != path:
        rank_zero_warn(f"{path} was being replaced when a save was interrupted; its content is taken from {real}.")
    return FolderSource(real, weights_only) if real.is_dir() else FileSource(real, weights_only)


def load_file(path: Path, weights_only: bool | None, mmap: bool) -> Any:
    """``torch.load`` to the CPU.

    Raises:
        CheckpointError: the file is damaged, or holds objects that ``weights_only`` forbids.
    """
    settings: dict[str, Any] = {"map_location": "cpu", "weights_only": weights_only is not False}
    try:
        try:
            return torch.load(path, mmap=mmap, **settings)
        except RuntimeError as error:
            if not mmap or "mmap can only be used" not in str(error):
                raise
            return torch.load(path, **settings)
    except pickle.UnpicklingError as error:
        if weights_only is False:
            raise CheckpointError(f"Cannot load {path}: {missing_part(path)}. ({error})") from error
        raise CheckpointError(
            f"Cannot load {path} with weights_only=True: it holds Python objects other than tensors and plain"
            " containers, for instance hyper-parameters or the state of a callback. If you trust it, pass"
            f" weights_only=False to trainer.fit, validate, test or predict. ({error})"
        ) from error
    except (RuntimeError, EOFError, OSError) as error:
        raise CheckpointError(f"Cannot load {path}: {missing_part(path)}. ({error})") from error


def _check_version(saving: Mapping[str, Any], path: Path) -> None:
    if saving["version"] > FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has format {saving['version']}, and this version of lightning_longmoe reads up to format"
            f" {FORMAT_VERSION}: upgrade it."
        )


def _without_saving(meta: dict[str, Any]) -> dict[str, Any]:
    """``meta`` without what this package added to it."""
    rest = {key: value for key, value in meta.items() if key != "longmoe"}
    ours = {key: value for key, value in meta.get("longmoe", {}).items() if key != "saving"}
    return {**rest, "longmoe": ours} if ours else rest


# ------------------------------------------------------------------------------------------------------- folders


class FolderSource(Source):
    """A folder of torch.distributed.checkpoint with ``meta.pt``: ours, or of Lightning's ModelParallelStrategy.

    Attributes:
        meta: the content of ``meta.pt``; ``meta["longmoe"]["saving"]`` is always there.
        tensors: everything in the index.
    """

    def __init__(self, folder: Path, weights_only: bool | None) -> None:
        self.folder = folder
        self.meta = dict(load_file(folder / META_FILE, weights_only, mmap=False))
        self._index = _read_index(folder)
        paths = _paths(self._index)
        self._key_of = {path: key for key, path in paths.items()}
        self.tensors = {
            paths[key]: Saved(paths[key], tuple(entry.size), entry.properties.dtype)
            for key, entry in self._index.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        ours = self.meta.get("longmoe", {})
        saving = ours.get("saving") or self._saving_of_stock_strategy()
        _check_version(saving, folder)
        self.meta["longmoe"] = {**ours, "saving": saving}
        self.model = {clean_name(path[1]): saved for path, saved in self.tensors.items() if path[0] == "state_dict"}
        self.model.update({name: self.model[first] for name, first in saving["tied"].items()})
        self.objects = saving["objects"]
        self.optimizers = None
        if "optimizers" in saving:
            self.optimizers = [self._optimizer(index, entry) for index, entry in enumerate(saving["optimizers"])]
        self.rest = _without_saving(self.meta)

    def _optimizer(self, index: int, entry: dict[str, Any]) -> SavedOptimizer:
        optimizer = SavedOptimizer(**entry)
        for path, saved in self.tensors.items():
            if path[0] == f"optimizer_{index}":
                optimizer.tensors.setdefault(clean_name(path[2]), {})[path[3]] = saved
        return optimizer

    def _saving_of_stock_strategy(self) -> dict[str, Any]:
        """What `FolderSource` needs to know, from a folder of Lightning's own strategy."""
        saving: dict[str, Any] = {"version": FORMAT_VERSION, "tied": {}, "objects": {}}
        paths = [path for path in self._key_of if path[0].startswith("optimizer_") and path not in self.tensors]
        found: dict[str, dict[str, dict[str, dict[str, Any]]]] = {}
        for (optimizer, part, name, key), value in self._read_objects(paths).items():
            found.setdefault(optimizer, {}).setdefault(part, {}).setdefault(name, {})[key] = value
        if found:
            saving["optimizers"] = [_stock_optimizer(found[f"optimizer_{index}"]) for index in range(len(found))]
        return saving

    def read(self, wanted: Iterable[tuple[Saved, Piece]]) -> None:
        self._load(_Planner([(self._key_of[saved.path], piece) for saved, piece in wanted], []))

    def _read_objects(self, paths: list[KeyPath]) -> dict[KeyPath, Any]:
        planner = _Planner([], [self._key_of[path] for path in paths])
        if paths:
            self._load(planner)
        return {path: planner.objects[self._key_of[path]] for path in paths}

    def _load(self, planner: _Planner) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*assuming the intent is to load in a single process.*")
            try:
                # Each rank reads what it needs; nothing has to be agreed on, and no rank waits for another.
                dcp.load({}, storage_reader=dcp.FileSystemReader(self.folder), planner=planner, no_dist=True)
            except CheckpointException as error:
                cause = next(iter(error.failures.values()))[0]
                raise CheckpointError(f"Cannot read {self.folder}: {type(cause).__name__}: {cause}") from error


def _read_index(folder: Path) -> Metadata:
    try:
        return dcp.FileSystemReader(folder).read_metadata()
    except (pickle.UnpicklingError, EOFError, AttributeError) as error:
        raise CheckpointError(f"Cannot load {folder}: its index .metadata is damaged. ({error})") from error


def _paths(index: Metadata) -> dict[str, KeyPath]:
    """The path of each flat key."""
    known = index.planner_data or {}
    return {key: tuple(map(str, known.get(key) or key.split(".", 1))) for key in index.state_dict_metadata}


def _stock_optimizer(found: dict[str, dict[str, dict[str, Any]]]) -> dict[str, Any]:
    """What is no tensor of one optimizer, by part ("state" or "param_groups"), fqn or number of the group, and name."""
    numbered = sorted(found["param_groups"].items(), key=lambda item: int(item[0]))
    return {
        "param_groups": [{**group, "params": [clean_name(n) for n in group["params"]]} for _, group in numbered],
        "values": {clean_name(fqn): values for fqn, values in found.get("state", {}).items()},
        "local": [],
        "other": {},
    }


class _Planner(dcp.LoadPlanner):
    """Reads pieces by their place, and objects."""

    def __init__(self, pieces: list[tuple[str, Piece]], objects: list[str]) -> None:
        self._pieces = pieces
        self._object_keys = objects
        self.objects: dict[str, Any] = {}

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        assert metadata is not None
        self._index = metadata.state_dict_metadata

    def create_local_plan(self) -> LoadPlan:
        items = []
        for number, (key, piece) in enumerate(self._pieces):
            here = ChunkStorageMetadata(offsets=torch.Size(piece.offset), sizes=piece.local.shape)
            target = MetadataIndex(str(number), here.offsets)
            for item in create_read_items_for_chunk_list(key, self._index[key], [here]):  # type: ignore[arg-type]
                items.append(dataclasses.replace(item, dest_index=target))
        return LoadPlan(items + [_read_object(key) for key in self._object_keys])

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.objects[read_item.storage_index.fqn] = torch.load(value, map_location="cpu", weights_only=True)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        target = self._pieces[int(read_item.dest_index.fqn)][1].local
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            target = target.narrow(dim, start, length)
        return target

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Nothing is left to do: the tensor is a part of the piece."""


def _read_object(key: str) -> ReadItem:
    nothing = torch.Size((0,))
    index = MetadataIndex(key)
    return ReadItem(
        type=LoadItemType.BYTE_IO,
        dest_index=index,
        dest_offsets=nothing,
        storage_index=index,
        storage_offsets=nothing,
        lengths=nothing,
    )


# --------------------------------------------------------------------------------------------------------- files


class FileSource(Source):
    """One file in Lightning's ordinary format, ours or anybody's. Tensors stay on disk until a part is read."""

    def __init__(self, file: Path, weights_only: bool | None) -> None:
        checkpoint = load_file(file, weights_only, mmap=True)
        if not isinstance(checkpoint, dict) or "state_dict" not in checkpoint:
            raise CheckpointError(f"Cannot load {file}: it has no 'state_dict', so it is no Lightning checkpoint.")
        saving = checkpoint.get("longmoe", {}).get("saving", {})
        if saving:
            _check_version(saving, file)
        self._tensors: dict[KeyPath, Tensor] = {}
        state = {clean_name(name): value for name, value in checkpoint["state_dict"].items()}
        self.model = {
            n: self._keep(("state_dict", n), value) for n, value in state.items() if isinstance(value, Tensor)
        }
        self.objects = {name: value for name, value in state.items() if not isinstance(value, Tensor)}
        self.optimizers = None
        if "optimizer_states" in checkpoint:
            self.optimizers = [
                self._optimizer(index, entry, saving) for index, entry in enumerate(checkpoint["optimizer_states"])
            ]
        self.rest = _without_saving(checkpoint)
        self.rest = {k: v for k, v in self.rest.items() if k not in ("state_dict", "optimizer_states")}

    def _keep(self, path: KeyPath, tensor: Tensor) -> Saved:
        self._tensors[path] = tensor
        return Saved(path, tuple(tensor.shape), tensor.dtype)

    def _optimizer(self, index: int, entry: dict[str, Any], saving: dict[str, Any]) -> SavedOptimizer:
        numbers = [number for group in entry["param_groups"] for number in group["params"]]
        names = saving["parameter_names"][index] if "parameter_names" in saving else [_fqn(n) for n in numbers]
        name_of = dict(zip(numbers, names, strict=True))
        optimizer = SavedOptimizer(
            [{**group, "params": [name_of[n] for n in group["params"]]} for group in entry["param_groups"]],
            local=saving["local"][index] if "local" in saving else [],
        )
        for number, values in entry["state"].items():
            if number not in name_of:
                optimizer.other[number] = values
                continue
            name = name_of[number]
            for key, value in values.items():
                if isinstance(value, Tensor):
                    path = (f"optimizer_{index}", "state", str(name), key)
                    optimizer.tensors.setdefault(name, {})[key] = self._keep(path, value)
                else:
                    optimizer.values.setdefault(name, {})[key] = value
        return optimizer

    def read(self, wanted: Iterable[tuple[Saved, Piece]]) -> None:
        for saved, piece in wanted:
            piece.local.copy_(self._tensors[saved.path][piece.slices])


def _fqn(number: int | str) -> int | str:
    return clean_name(number) if isinstance(number, str) else number
