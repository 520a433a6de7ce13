"""What is saved of a module and of an optimizer, under names that do not depend on wrappers, ranks or order."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from lightning_longmoe._compat import WRAPPER_NAMES, local_tensor
from lightning_longmoe.runtime.pieces import as_sharded, is_local_part

EXTRA_STATE = "_extra_state"
"""Last part of the state-dict key under which torch keeps what ``nn.Module.get_extra_state`` returns."""


def clean_name(name: str) -> str:
    """A parameter's or module's name without what torch.compile and checkpoint wrappers insert."""
    return ".".join(part for part in name.split(".") if part not in WRAPPER_NAMES)


def model_state(module: nn.Module) -> dict[str, Any]:
    """Parameters and persistent buffers by fqn, sharing memory with the module. Not collective.

    Args:
        module: sharded or not; gathered FSDP2 parameters are freed first.

    Returns:
        for each fqn a DTensor, or a plain tensor that every rank holds whole. A tied parameter appears under all its
        names as the same object. Values of ``get_extra_state`` are passed through.
    """
    reshard(module)
    state = {clean_name(name): value for name, value in module.state_dict().items()}
    first: dict[int, str] = {}
    named = itertools.chain(
        module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)
    )
    for name, tensor in named:
        name = clean_name(name)
        if name in state:
            state[name] = state[first.setdefault(id(tensor), name)]
    return state


def parameter_names(module: nn.Module) -> dict[int, str]:
    """``id`` of each sharded parameter to its fqn; a tied one has its first."""
    reshard(module)
    return {id(parameter): clean_name(name) for name, parameter in module.named_parameters()}


def reshard(module: nn.Module) -> None:
    """Free what FSDP2 has gathered, so that the module's parameters are the sharded ones."""
    for child in module.modules():
        if isinstance(child, FSDPModule):
            child.reshard()


def unwrap(optimizer: Optimizer | LightningOptimizer) -> Optimizer:
    """The optimizer itself, where Lightning handed out its wrapper."""
    return optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """All parameters in the order in which torch numbers them."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def names_of(module: nn.Module, optimizer: Optimizer) -> list[str]:
    """The fqn of each parameter of ``optimizer``, in torch's order.

    Raises:
        ValueError: the optimizer holds a parameter that the module does not have.
    """
    names = parameter_names(module)
    parameters = parameters_of(optimizer)
    strangers = [tuple(p.shape) for p in parameters if id(p) not in names]
    if strangers:
        raise ValueError(
            f"{type(optimizer).__name__} holds {len(strangers)} parameters that are not the module's, of shapes"
            f" {strangers[:10]}: it was built before the module was sharded. Build it in configure_optimizers from"
            " self.parameters()."
        )
    return [names[id(p)] for p in parameters]


def optimizer_state(module: nn.Module, optimizer: Optimizer | LightningOptimizer) -> dict[str, Any]:
    """The optimizer's state by fqn, sharing memory with it. Takes no step and is not collective.

    Args:
        module: holds all parameters of ``optimizer``.
        optimizer: its own ``state_dict`` is asked; a parameter that never took a step is absent from "state".

    Returns:
        ``{"state": {fqn: {name: value}}, "param_groups": [{..., "params": [fqn, ...]}], "local": [name, ...],
        "other": {...}}``. State that is this rank's part of a sharded tensor becomes a DTensor and its name is listed
        in "local"; "other" is state that belongs to no parameter.
    """
    optimizer = unwrap(optimizer)
    own = optimizer.state_dict()
    names, parameters = names_of(module, optimizer), parameters_of(optimizer)
    order = [index for group in own["param_groups"] for index in group["params"]]
    name_of = dict(zip(order, names, strict=True))
    parameter_of = dict(zip(order, parameters, strict=True))
    state: dict[str, dict[str, Any]] = {}
    local: set[str] = set()
    for index, values in own["state"].items():
        if index in name_of and isinstance(values, Mapping) and values:
            state[name_of[index]], found = _sharded_values(values, parameter_of[index])
            local |= found
    return {
        "state": state,
        "param_groups": [{**group, "params": [name_of[i] for i in group["params"]]} for group in own["param_groups"]],
        "local": sorted(local),
        "other": {key: value for key, value in own["state"].items() if key not in name_of},
    }


def _sharded_values(values: Mapping[str, Any], parameter: Tensor) -> tuple[dict[str, Any], set[str]]:
    """State of one parameter with plain local parts as DTensors, and the names of those."""
    local = {n for n, value in values.items() if isinstance(value, Tensor) and is_local_part(value, parameter)}
    return {n: as_sharded(value, parameter) if n in local else value for n, value in values.items()}, local


# ------------------------------------------------------------------------------------------------ putting state back

KEPT_SETTINGS = ("fused", "foreach", "capturable")
"""How a step is computed, not what: the running choice stays, so that a checkpoint of a GPU resumes on a CPU."""


MASTER = "master"
"""Name of the master weights among an optimizer's state of a parameter of lower precision."""


def keeps_masters(optimizer: Optimizer) -> bool:
    """Whether the optimizer has a place for master weights."""
    return hasattr(optimizer, "refresh_masters")


def set_optimizer_state(
    module: nn.Module,
    optimizer: Optimizer,
    state: dict[str, dict[str, Any]],
    groups: list[dict[str, Any]],
    other: dict,
    keep_dtypes: bool = True,
) -> None:
    """Give ``optimizer`` the state and settings of a checkpoint, with the data types that were saved.

    Args:
        module: holds all parameters of ``optimizer``.
        optimizer: parameters without an entry in ``state`` become fresh.
        state: by fqn; tensors sharded as the optimizer keeps them. They are used, not copied.
        groups: saved settings with the fqns of their parameters; see `matched_groups`.
        other: state that belongs to no parameter.
        keep_dtypes: False: let torch cast state to the dtypes of the parameters.
    """
    names, parameters = names_of(module, optimizer), parameters_of(optimizer)
    settings = matched_groups(names, optimizer.param_groups, groups)
    index_state: dict[Any, Any] = {i: dict(state[name]) for i, name in enumerate(names) if name in state}
    numbers = itertools.count()
    new_groups = [
        {**group, "params": [next(numbers) for _ in old["params"]]}
        for group, old in zip(settings, optimizer.param_groups, strict=True)
    ]
    optimizer.load_state_dict({"state": {**index_state, **other}, "param_groups": new_groups})
    if keep_dtypes and type(optimizer).load_state_dict is Optimizer.load_state_dict:
        for index, values in index_state.items():
            _undo_cast(optimizer.state[parameters[index]], values)


def _undo_cast(installed: dict[str, Any], saved: dict[str, Any]) -> None:
    """torch casts loaded state to the parameter's data type, and breaks strings; put back what was saved."""
    for name, value in saved.items():
        if not isinstance(value, Tensor):
            installed[name] = value
        elif name != "step" and installed[name].dtype != value.dtype:
            installed[name] = value.to(local_tensor(installed[name]).device)


def matched_groups(
    names: list[str], running: list[dict[str, Any]], saved: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """For each running param group, its settings with those of the saved group that held its parameters.

    Args:
        names: fqns of the running groups' parameters, one after the other.
        running: the optimizer's ``param_groups``.
        saved: groups of the checkpoint, "params" being fqns.

    Raises:
        ValueError: parameters of one running group had different settings.
    """
    home = {name: index for index, group in enumerate(saved) for name in group["params"]}
    remaining = iter(names)
    matched = []
    for number, group in enumerate(running):
        mine = list(itertools.islice(remaining, len(group["params"])))
        found = sorted({home[name] for name in mine if name in home})
        settings = [
            {k: v for k, v in saved[i].items() if k not in ("params", "param_names", *KEPT_SETTINGS)} for i in found
        ]
        different = [k for k in (settings[0] if settings else {}) if any(s.get(k) != settings[0][k] for s in settings)]
        if different:
            raise ValueError(
                f"Param group {number} of the optimizer holds parameters that were in groups {found} of the checkpoint,"
                f" which differ in {different}. Build the optimizer with the groups it was saved with."
            )
        own = {k: v for k, v in group.items() if k != "params"}
        matched.append({**own, **(settings[0] if settings else {})})
    return matched
