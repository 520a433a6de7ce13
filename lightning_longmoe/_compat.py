"""Every private name of torch and Lightning that the package touches, in one place.

Each has a test in ``tests/test_compat.py`` that fails when it moves.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


def inside_backward() -> bool:
    """Whether the current thread executes a backward pass (a recomputation does)."""
    return torch._C._current_graph_task_id() != -1


def set_group_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Give a process group a timeout; groups that a DeviceMesh makes take torch's default otherwise."""
    dist.distributed_c10d._set_pg_timeout(timeout, group)


def group_timeout(group: dist.ProcessGroup) -> timedelta:
    """The timeout of a process group's first backend."""
    backend = group._get_backend(torch.device("cuda" if "nccl" in dist.get_backend(group) else "cpu"))
    return backend.options._timeout


def lazily_initialize_root(module: nn.Module) -> None:
    """Make ``module`` the FSDP2 root now: otherwise the first submodule called on its own would become one."""
    module._get_fsdp_state()._lazy_init()  # type: ignore[operator]


def is_fsdp_module(module: nn.Module) -> bool:
    """Whether FSDP2's ``fully_shard`` was applied to this very module."""
    from torch.distributed.fsdp import FSDPModule

    return isinstance(module, FSDPModule)


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor, not a copy and outside autograd; a plain tensor as it is."""
    return getattr(tensor, "_local_tensor", tensor)


def full_tensors(state: dict[str, Any]) -> dict[str, Any]:
    """A state dict with every DTensor gathered to the CPU, one at a time. Collective: all ranks call it."""
    from torch.distributed.tensor import DTensor

    gathered = {}
    for name, value in state.items():
        value = value.full_tensor() if isinstance(value, DTensor) else value
        gathered[name] = value.detach().cpu() if isinstance(value, torch.Tensor) else value
    return gathered


def local_shape_and_offset(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and global offset of this rank's part of a DTensor, also where FSDP2 shards what is already sharded."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)  # type: ignore[attr-defined]
    return tuple(shape), tuple(offset)


def plain_class(module: nn.Module) -> type[nn.Module]:
    """The class of a module before ``fully_shard`` swapped in a subclass of (FSDPModule, that class)."""
    kind = type(module)
    return kind.__mro__[2] if is_fsdp_module(module) else kind


def default_store() -> dist.Store:
    """The key-value store of the default process group."""
    return dist.distributed_c10d._get_default_store()


def is_strided_shard(placement: Any) -> bool:
    """Whether a DTensor placement is the one that FSDP2 gives to a dimension that another mesh already shards."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return isinstance(placement, _StridedShard)


WRAPPER_NAMES = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
"""Modules that torch.compile, checkpoint wrappers and FSDP1 put around a module; they appear in parameter names."""


def unit_parameters(unit: nn.Module) -> list[tuple[Any, torch.dtype | None]]:
    """The sharded parameters that an FSDP2 unit gathers itself, and the dtype it gathers them in (None: their own)."""
    groups = unit._get_fsdp_state()._fsdp_param_groups  # type: ignore[operator]
    return [(param.sharded_param, group.mp_policy.param_dtype) for group in groups for param in group.fsdp_params]
