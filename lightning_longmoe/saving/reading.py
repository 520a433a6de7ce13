"""Loading: every rank reads its own parts of a checkpoint straight into the shards of the running module."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_longmoe._compat import local_tensor
from lightning_longmoe.runtime.pieces import Piece, like_parameter, piece_of
from lightning_longmoe.saving.agreement import CheckpointError, ControlGroup, broadcast_from_zero, on_all_ranks
from lightning_longmoe.saving.sources import Saved, SavedOptimizer, Source, open_source
from lightning_longmoe.saving.state import (
    EXTRA_STATE,
    MASTER,
    clean_name,
    keeps_masters,
    model_state,
    names_of,
    optimizer_state,
    parameters_of,
    set_optimizer_state,
    unwrap,
)

SHOWN = 10
Wanted = list[tuple[Saved, Piece]]


def load(
    path: str | os.PathLike[str],
    module: nn.Module,
    optimizers: Sequence[Optimizer | LightningOptimizer],
    *,
    weights_only: bool | None = None,
    strict: bool = True,
    control_group: ControlGroup = None,
) -> dict[str, Any]:
    """Load a checkpoint, folder or file, written on any world size and expert size. Collective.

    Everything is checked before the first value changes. Parameters without saved optimizer state become fresh, and a
    weights-only checkpoint leaves all optimizers fresh.

    Args:
        path: of the checkpoint; rank 0's counts.
        module: sharded as it will train; its values are overwritten in place, in its own data types.
        optimizers: of the module, in the order in which they were saved; empty to load the model alone.
        weights_only: as for ``torch.load``; None is torch's default, True.
        strict: refuse a checkpoint that misses keys of the module or has others.
        control_group: all ranks, over gloo.

    Returns:
        the rest of Lightning's checkpoint: no "state_dict" and no "optimizer_states".

    Raises:
        CheckpointError: there is no complete checkpoint, keys or shapes do not match, or a rank could not read it; on
            all ranks.
    """
    path = Path(broadcast_from_zero(os.path.abspath(path), control_group))
    running = [unwrap(optimizer) for optimizer in optimizers]
    source = on_all_ranks(f"Opening {path}", lambda: open_source(path, weights_only), control_group)
    plan = on_all_ranks(f"Matching {path}", lambda: _plan(source, module, running, strict), control_group)
    on_all_ranks(f"Reading {path}", lambda: source.read(plan.wanted), control_group)
    on_all_ranks(f"Restoring {path}", lambda: _restore(plan, module), control_group)
    if running and source.optimizers is None:
        rank_zero_info("weights-only checkpoint: optimizer starts fresh, and so do learning rate schedulers")
        for optimizer in filter(keeps_masters, running):
            optimizer.refresh_masters(changed_only=False)  # type: ignore[attr-defined]
        source.rest.setdefault("lr_schedulers", [])  # Lightning insists on the key
    return source.rest


@dataclasses.dataclass
class _OptimizerPlan:
    optimizer: Optimizer
    saved: SavedOptimizer
    state: dict[str, dict[str, Any]]
    keep_dtypes: bool = True


@dataclasses.dataclass
class _Plan:
    """What to read, and what to hand over afterwards to those who do not share memory with it."""

    wanted: Wanted = dataclasses.field(default_factory=list)
    entries: dict[str, Any] = dataclasses.field(default_factory=dict)
    optimizers: list[_OptimizerPlan] = dataclasses.field(default_factory=list)

    def read_into(self, saved: Saved, tensor: Tensor) -> None:
        piece = piece_of(tensor)
        if piece is not None:
            self.wanted.append((saved, piece))


def _plan(source: Source, module: nn.Module, optimizers: list[Optimizer], strict: bool) -> _Plan:
    plan = _Plan()
    _plan_model(plan, source, model_state(module), strict)
    if optimizers and source.optimizers is not None:
        if len(optimizers) != len(source.optimizers):
            rank_zero_warn(
                f"The checkpoint holds {len(source.optimizers)} optimizers and the module has {len(optimizers)}: they"
                " are matched in order, and those that are left over start fresh or are dropped."
            )
        for optimizer, saved in zip(optimizers, source.optimizers, strict=False):
            plan.optimizers.append(_plan_optimizer(plan, module, optimizer, saved))
    return plan


def _restore(plan: _Plan, module: nn.Module) -> None:
    if plan.entries:
        raw = {clean_name(name): name for name in module.state_dict()}
        module.load_state_dict({raw[name]: value for name, value in plan.entries.items()}, strict=False)
    for part in plan.optimizers:
        local = set(part.saved.local)
        state = {
            fqn: {n: local_tensor(value) if n in local else value for n, value in values.items()}
            for fqn, values in part.state.items()
        }
        groups, other = part.saved.param_groups, part.saved.other
        set_optimizer_state(module, part.optimizer, state, groups, other, part.keep_dtypes)


# --------------------------------------------------------------------------------------------------------- the model


def _plan_model(plan: _Plan, source: Source, targets: dict[str, Any], strict: bool) -> None:
    planned: set[int] = set()
    shared = {id(value) for name, value in targets.items() if name in source.model}
    missing, shapes = [], []
    for name, target in targets.items():
        if name in source.objects:
            plan.entries[name] = source.objects[name]
        elif name not in source.model:
            if id(target) not in shared:  # a tied parameter is there when one of its names is
                missing.append(name)
        elif not isinstance(target, Tensor) or name.rpartition(".")[2] == EXTRA_STATE:
            saved = source.model[name]
            plan.entries[name] = torch.empty(saved.shape, dtype=saved.dtype)
            plan.read_into(saved, plan.entries[name])
        elif id(target) not in planned:
            planned.add(id(target))
            saved = source.model[name]
            if saved.shape != tuple(target.shape):
                shapes.append(f"{name}: {saved.shape} in the checkpoint, {tuple(target.shape)} in the module")
            plan.read_into(saved, target)
    unexpected = [name for name in [*source.model, *source.objects] if name not in targets]
    if shapes:
        raise CheckpointError(
            f"The shapes of {len(shapes)} tensors do not match: {'; '.join(shapes[:SHOWN])}. Build the module with the"
            " sizes it was saved with."
        )
    if strict and (missing or unexpected):
        raise CheckpointError(_mismatch(missing, unexpected))


def _mismatch(missing: list[str], unexpected: list[str]) -> str:
    parts = []
    if missing:
        parts.append(f"the checkpoint lacks {_shown(missing)}")
    if unexpected:
        parts.append(f"the module has no {_shown(unexpected)}")
    return (
        f"The checkpoint does not fit the module: {', and '.join(parts)}. Build the module it was saved from, or set"
        " strict_loading = False on the LightningModule to load what both have."
    )


def _shown(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{', '.join(names[:SHOWN])}{more}"


# ----------------------------------------------------------------------------------------------------- an optimizer


def _plan_optimizer(plan: _Plan, module: nn.Module, optimizer: Optimizer, saved: SavedOptimizer) -> _OptimizerPlan:
    names = names_of(module, optimizer)
    saved = _named(saved, names)
    existing = optimizer_state(module, optimizer)["state"]
    state: dict[str, dict[str, Any]] = {name: dict(saved.values[name]) for name in names if name in saved.values}
    lossy = False  # an optimizer without masters gets moments in its parameters' dtypes, as it makes them itself
    for name, parameter in zip(names, parameters_of(optimizer), strict=True):
        for key, entry in saved.tensors.get(name, {}).items():
            if key == MASTER and not keeps_masters(optimizer):
                lossy = True
                continue
            target = existing.get(name, {}).get(key)
            if not _can_hold(target, entry):
                target = _allocate(entry, parameter, getattr(optimizer, "state_device", None))
            state.setdefault(name, {})[key] = target
            plan.read_into(entry, target)
    known = {name for group in saved.param_groups for name in group["params"]}
    dropped, fresh = sorted(known - set(names)), [name for name in names if name not in known]
    if dropped:
        rank_zero_warn(f"{type(optimizer).__name__} does not train {_shown(dropped)} any more: that state is dropped.")
    if fresh:
        rank_zero_warn(f"The checkpoint has no optimizer state for {_shown(fresh)}: it starts fresh.")
    return _OptimizerPlan(optimizer, saved, state, keep_dtypes=not lossy)


def _can_hold(target: Any, saved: Saved) -> bool:
    """Whether the optimizer's present state can take the saved values, unchanged, where it lies."""
    return isinstance(target, Tensor) and target.dtype == saved.dtype and tuple(target.shape) == saved.shape


def _allocate(saved: Saved, parameter: Tensor, device: torch.device | None) -> Tensor:
    """Memory for state in the data type it was saved in: sharded like its parameter where it has its shape."""
    if len(saved.shape) == 0:
        return torch.empty((), dtype=saved.dtype)  # step counters live on the host; torch moves those that do not
    device = device or local_tensor(parameter).device
    if saved.shape == tuple(parameter.shape):
        return like_parameter(parameter, saved.dtype, device)
    return torch.empty(saved.shape, dtype=saved.dtype, device=device)


def _named(saved: SavedOptimizer, names: list[str]) -> SavedOptimizer:
    """``saved`` by fqn, also where a file only numbers parameters: then their order tells.

    Raises:
        CheckpointError: parameters are only numbered, and their number differs.
    """
    numbers = [number for group in saved.param_groups for number in group["params"]]
    if all(isinstance(number, str) for number in numbers):
        return saved
    if len(numbers) != len(names):
        raise CheckpointError(
            f"The checkpoint's optimizer has {len(numbers)} parameters, without names, and the module's has"
            f" {len(names)}: build the optimizer as it was when the checkpoint was saved."
        )
    name_of = dict(zip(numbers, names, strict=True))
    return dataclasses.replace(
        saved,
        param_groups=[{**g, "params": [name_of[number] for number in g["params"]]} for g in saved.param_groups],
        tensors={name_of[number]: values for number, values in saved.tensors.items()},
        values={name_of[number]: values for number, values in saved.values.items()},
    )
