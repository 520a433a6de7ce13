"""Point an optimizer that was built too early at the parameters that training really updates.

Sharding replaces parameter objects. An optimizer made in ``__init__`` or by LightningCLI's ``--optimizer`` keeps the
old ones, updates nothing and says nothing. `EarlyParameters` remembers every parameter by name before sharding, so
that the optimizer's groups can be given the live ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import LBFGS, Optimizer

from lightning_longmoe import _compat

_OF_MODULES = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")

_STILL_TRUE = ("is_leaf", "retains_grad", "requires_grad", "dtype", "device", "layout")
"""What an early parameter may still be asked: an optimizer does so when it is built."""


class StaleParameter(nn.Parameter):
    """A parameter as it was before sharding. It has no values and no gradient any more, and says so."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = getattr(func, "__name__", "")
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        if kind == "__hash__" or (kind == "__get__" and attribute in _STILL_TRUE):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise RuntimeError(
            "This parameter was kept from before the model was sharded, and training updates another object. Ask"
            " `self.parameters()` or `self.named_parameters()` when you need it, or keep a list of parameters as an"
            " attribute of the module: those are replaced."
        )


def _with_successors(value: Any, successors: dict[int, nn.Parameter]) -> Any:
    """``value`` with early parameters replaced, in nested containers too; itself where there are none."""
    if isinstance(value, nn.Parameter):
        return successors.get(id(value), value)
    if isinstance(value, (list, tuple, set)):
        replaced = [_with_successors(item, successors) for item in value]
        if all(new is old for new, old in zip(replaced, value, strict=True)):
            return value
        if isinstance(value, list):
            value[:] = replaced
            return value
        return type(value)(*replaced) if hasattr(value, "_fields") else type(value)(replaced)
    if isinstance(value, dict):
        for key, item in list(value.items()):
            new = _with_successors(item, successors)
            if new is not item:
                value[key] = new
    return value


@dataclass
class EarlyParameters:
    """Names of the parameters as they were before sharding. Keeps the objects alive, so that no id is reused."""

    names: dict[int, str] = field(default_factory=dict)
    objects: list[nn.Parameter] = field(default_factory=list)

    def remember(self, module: nn.Module) -> None:
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if id(parameter) not in self.names:
                self.names[id(parameter)] = name
                self.objects.append(parameter)

    def release(self, module: nn.Module) -> None:
        """Let go of the values, which the sharded parameters own now, while keeping the objects.

        Lists, tuples, dicts and sets in attributes of ``module`` and its children get the live parameters instead.
        Whoever else still holds an early one, such as a closure, gets an error on use.
        """
        live = dict(module.named_parameters(remove_duplicate=False))
        successors = {
            id(early): live[self.names[id(early)]] for early in self.objects if self.names[id(early)] in live
        }
        for child in module.modules():
            for name, value in vars(child).items():
                if name not in _OF_MODULES and isinstance(value, (list, tuple, dict, set)):
                    child.__dict__[name] = _with_successors(value, successors)
        current = {id(parameter) for parameter in live.values()}
        for early in self.objects:
            if not isinstance(early, (DTensor, StaleParameter)) and id(early) not in current:
                early.data = early.data.new_empty(0)
                early.__class__ = StaleParameter


def remap_optimizers(module: nn.Module, optimizers: Iterable[Optimizer], early: EarlyParameters) -> int:
    """Replace early parameters in every group by the live ones of the same name.

    Args:
        module: after sharding.
        optimizers: as ``configure_optimizers`` returned them; changed in place.
        early: the names before sharding.

    Returns:
        How many parameters were replaced.

    Raises:
        ValueError: a parameter of an optimizer is neither live nor known by name; a trainable parameter is in no
            optimizer, or in more than one group.
    """
    live = dict(module.named_parameters(remove_duplicate=False))
    live_ids = {id(parameter) for parameter in live.values()}
    replaced = 0
    optimizers = [optimizer for optimizer in optimizers if not _compat.is_placeholder(optimizer)]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            current = []
            for parameter in group["params"]:
                if id(parameter) not in live_ids:
                    name = early.names.get(id(parameter))
                    if name is None or name not in live:
                        raise ValueError(
                            f"{type(optimizer).__name__} holds a parameter of shape {tuple(parameter.shape)} that is"
                            " not part of the LightningModule. Build the optimizer in `configure_optimizers` from"
                            " `self.parameters()`."
                        )
                    state = None if hasattr(optimizer, "follow_groups") else optimizer.state.pop(parameter, None)
                    parameter = live[name]
                    if state:
                        optimizer.state[parameter] = state
                    replaced += 1
                current.append(parameter)
            group["params"] = current
        if replaced and hasattr(optimizer, "follow_groups"):
            optimizer.follow_groups()
        _refuse_lbfgs(optimizer)
    if optimizers:
        _check_each_parameter_once(module, optimizers)
    return replaced


def _refuse_lbfgs(optimizer: Optimizer) -> None:
    """It flattens all parameters into one vector, which sharded parameters do not have."""
    if isinstance(optimizer, LBFGS):
        raise ValueError("LBFGS cannot update sharded parameters. Use a first-order optimizer, such as AdamW.")


def refuse_fused_over_meshes(optimizer: Optimizer) -> None:
    """torch's multi-tensor kernels take DTensors of one mesh only."""
    for group in optimizer.param_groups:
        meshes = {p.device_mesh for p in group["params"] if isinstance(p, DTensor)}
        flags = [flag for flag in ("foreach", "fused") if group.get(flag)]
        if len(meshes) > 1 and flags:
            raise ValueError(
                f"{type(optimizer).__name__}({flags[0]}=True) cannot update parameters on {len(meshes)} device meshes"
                f" (experts are on their own) in one group: leave {flags[0]} out, or give the experts a parameter group"
                " of their own."
            )


def _check_each_parameter_once(module: nn.Module, optimizers: list[Optimizer]) -> None:
    seen = Counter(id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"])
    trainable = {name: p for name, p in module.named_parameters() if p.requires_grad}
    missing = [name for name, p in trainable.items() if seen[id(p)] == 0]
    twice = [name for name, p in trainable.items() if seen[id(p)] > 1]
    if missing:
        raise ValueError(
            f"{len(missing)} trainable parameters are in no optimizer and would stay as they are: {missing[:10]}."
            " Add them in `configure_optimizers`, or freeze them with `requires_grad_(False)`."
        )
    if twice:
        raise ValueError(f"{len(twice)} parameters are in more than one optimizer group: {twice[:10]}.")
