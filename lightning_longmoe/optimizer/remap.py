"""Point an optimizer that was built too early at the parameters that training really updates.

Sharding replaces parameter objects. An optimizer made in ``__init__`` or by LightningCLI's ``--optimizer`` keeps the
old ones, updates nothing and says nothing. `EarlyParameters` remembers every parameter by name before sharding, so
that the optimizer's groups can be given the live ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import LBFGS, Optimizer

from lightning_longmoe import _compat


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

    def release_data(self) -> None:
        """Let go of the values (the sharded parameters own theirs) while keeping the objects."""
        for parameter in self.objects:
            if not isinstance(parameter, DTensor):
                parameter.data = parameter.data.new_empty(0)


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
                    state = optimizer.state.pop(parameter, None)
                    parameter = live[name]
                    if state:
                        optimizer.state[parameter] = state
                    replaced += 1
                current.append(parameter)
            group["params"] = current
        _refuse_lbfgs(optimizer)
        _refuse_fused_over_meshes(optimizer)
    if optimizers:
        _check_each_parameter_once(module, optimizers)
    return replaced


def _refuse_lbfgs(optimizer: Optimizer) -> None:
    """It flattens all parameters into one vector, which sharded parameters do not have."""
    if isinstance(optimizer, LBFGS):
        raise ValueError("LBFGS cannot update sharded parameters. Use a first-order optimizer, such as AdamW.")


def _refuse_fused_over_meshes(optimizer: Optimizer) -> None:
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
