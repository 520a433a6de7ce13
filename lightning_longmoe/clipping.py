"""Gradient clipping over parameters that live on several meshes, or on none.

A parameter is a plain tensor, the same on every rank, or a DTensor: sharded over one axis of a mesh (FSDP2), over two
(FSDP2 on top of expert parallelism), or sharded over one and copied over the other (HSDP). The norm counts each logical
element once: every rank takes the norm of what it holds, and sums it over the axes that *shard* the parameter, never
over those that copy it.

Glossary: the *sharding* of a parameter is its mesh and the axes that shard it; parameters of equal sharding share their
collectives. Which collectives run is decided from the parameters and never from the gradients, so that a rank without
some gradient, or without any, still takes part: parameters must come in the same order on all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lightning_longmoe._compat import local_tensor
from lightning_longmoe.runtime.ranges import ranged


class _Sharding(NamedTuple):
    mesh: DeviceMesh
    axes: tuple[int, ...]


@ranged("longmoe/clip")
@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale all gradients in place so that their global norm is at most ``max_norm``, as torch's function does.

    Args:
        parameters: plain tensors and DTensors on any meshes, in the same order on all ranks.
        max_norm: at least 0.
        norm_type: above 0; ``float("inf")`` for the largest absolute value.
        error_if_nonfinite: raise, before anything is changed, where the norm is not finite.

    Returns:
        The norm before clipping, see `total_norm`.

    Raises:
        RuntimeError: the norm is not finite, on every rank alike.
        ValueError: a negative ``max_norm``, or what `total_norm` refuses.
    """
    if not max_norm >= 0:
        raise ValueError(f"max_norm={max_norm} is not allowed: it must be a number of at least 0.")
    parameters = _listed(parameters)
    norm = total_norm(parameters, norm_type)
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise RuntimeError(
            f"The total norm of order {float(norm_type)} for gradients from `parameters` is non-finite, so it cannot be"
            " clipped. To disable this error and scale the gradients by the non-finite norm anyway, set"
            " `error_if_nonfinite=False`"
        )
    coefficient = clip_coefficient(norm, max_norm)
    for gradients in _alike(_local_gradients(parameters)):
        torch._foreach_mul_(gradients, coefficient.to(gradients[0].device))
    return norm


def clip_coefficient(norm: Tensor, max_norm: float) -> Tensor:
    """What gradients of ``norm`` are multiplied by, at most 1, as a scalar on its device."""
    return torch.clamp(float(max_norm) / (norm + 1e-6), max=1.0)  # no branch: that would wait for the device


@torch.no_grad()
def total_norm(parameters: Tensor | Iterable[Tensor], norm_type: float = 2.0) -> Tensor:
    """The norm of all gradients of all ranks as one vector, in which each logical element is there once.

    Args:
        parameters: plain tensors (taken to be the same on every rank) and DTensors on any meshes, in the same order on
            all ranks. A parameter without a gradient counts as 0.
        norm_type: above 0; ``float("inf")`` for the largest absolute value.

    Returns:
        A plain scalar, equal on all ranks, on the device of the first parameter; float64 if any parameter is, else
        float32. Low-precision gradients are accumulated in float32.

    Raises:
        ValueError: ``norm_type`` is not above 0; a gradient is laid out differently from its parameter; the process
            group has no backend for the mesh's device.
    """
    norm_type = float(norm_type)
    if not norm_type > 0:
        raise ValueError(f"norm_type={norm_type} is not allowed: it must be above 0, or inf.")
    parameters = _listed(parameters)
    if not parameters:
        return torch.tensor(0.0)
    groups: dict[_Sharding | None, list[Tensor]] = {}
    for parameter in parameters:
        groups.setdefault(_sharding(parameter), []).append(parameter)
    device = local_tensor(parameters[0]).device
    parts = []
    for sharding, members in groups.items():
        part = _local_power(_local_gradients(members), norm_type)
        if sharding is not None:
            part = _reduced(part, sharding, norm_type)
        parts.append(part.to(device))
    power = torch.stack(parts)
    norm = power.amax() if math.isinf(norm_type) else power.sum() ** (1.0 / norm_type)
    is_double = any(parameter.dtype == torch.float64 for parameter in parameters)
    return norm.to(torch.float64 if is_double else torch.float32)


@torch.no_grad()
def grad_norms(module: nn.Module, norm_type: float = 2.0) -> dict[str, float]:
    """The norm of each parameter's gradient over all ranks, and of all, as Lightning's ``grad_norm``. A collective.

    Args:
        module: sharded or not; parameters without a gradient are left out.
        norm_type: above 0; ``float("inf")`` for the largest absolute value.

    Returns:
        numbers for ``log_dict``, named ``grad_{norm_type}_norm/{parameter}`` and ``grad_{norm_type}_norm_total``. All
        ranks must have gradients for the same parameters.
    """
    named = [(name, p) for name, p in module.named_parameters() if p.grad is not None]
    prefix = f"grad_{float(norm_type)}_norm"
    norms = {f"{prefix}/{name}": float(total_norm([parameter], norm_type)) for name, parameter in named}
    return {**norms, f"{prefix}_total": float(total_norm([p for _, p in named], norm_type))} if named else {}


@torch.no_grad()
def clip_grad_value_(parameters: Tensor | Iterable[Tensor], clip_value: float) -> None:
    """Limit every element of every gradient, in place, to ``[-clip_value, clip_value]``. No communication.

    Args:
        parameters: plain tensors and DTensors on any meshes.
        clip_value: at least 0.

    Raises:
        ValueError: a negative ``clip_value``, or a gradient that is laid out differently from its parameter.
    """
    clip_value = float(clip_value)
    if not clip_value >= 0:
        raise ValueError(f"clip_value={clip_value} is not allowed: it must be a number of at least 0.")
    for gradients in _alike(_local_gradients(_listed(parameters))):
        torch._foreach_clamp_min_(gradients, -clip_value)
        torch._foreach_clamp_max_(gradients, clip_value)


def _listed(parameters: Tensor | Iterable[Tensor]) -> list[Tensor]:
    """Each parameter once: a tied weight given twice is still one."""
    given = [parameters] if isinstance(parameters, Tensor) else parameters
    return list({id(parameter): parameter for parameter in given}.values())


def _sharding(parameter: Tensor) -> _Sharding | None:
    """None for what every rank holds whole. An axis of size 1 splits nothing, whatever its placement says."""
    if not isinstance(parameter, DTensor):
        return None
    mesh = parameter.device_mesh
    axes = [a for a, placement in enumerate(parameter.placements) if not placement.is_replicate() and mesh.size(a) > 1]
    return _Sharding(mesh, tuple(axes)) if axes else None


def _local_gradients(parameters: list[Tensor]) -> list[Tensor]:
    """This rank's parts of the gradients that exist and hold elements; not copies."""
    local = []
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        if isinstance(gradient, DTensor) and gradient.placements != getattr(parameter, "placements", None):
            raise ValueError(
                f"A gradient of shape {tuple(gradient.shape)} has placements {gradient.placements}, its parameter"
                f" {getattr(parameter, 'placements', 'is a plain tensor')}: its parts cannot be counted once. Bring it"
                " into its parameter's layout first: `p.grad = p.grad.redistribute(placements=p.placements)`."
            )
        local.append(local_tensor(gradient))
    return [gradient for gradient in local if gradient.numel() > 0]


def _alike(tensors: list[Tensor]) -> list[list[Tensor]]:
    """Lists of one device and one dtype, as foreach operations need to be fast."""
    lists: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        lists.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return list(lists.values())


def _local_power(gradients: list[Tensor], norm_type: float) -> Tensor:
    """Sum of ``|g| ** norm_type`` (for inf: the largest ``|g|``) as a float64 scalar; 0 where there is no element.

    Powers of norms leave float32's range where the norms do not: hence float64 from here on.
    """
    norms = []
    for alike in _alike(gradients):
        wide = torch.float64 if alike[0].dtype == torch.float64 else torch.float32
        norms += [norm.double() for norm in torch._foreach_norm(alike, norm_type, dtype=wide)]
    if not norms:
        return torch.zeros((), dtype=torch.float64)
    stacked = torch.stack([norm.to(norms[0].device) for norm in norms])
    return stacked.amax() if math.isinf(norm_type) else stacked.pow(norm_type).sum()


def _reduced(part: Tensor, sharding: _Sharding, norm_type: float) -> Tensor:
    """``part`` summed (for inf: its maximum) over the sharding axes, on the mesh's device.

    Only this scalar moves there: gradients may lie on the CPU while the group's backend knows CUDA tensors only.
    """
    mesh, axes = sharding
    part = part.to(mesh.device_type)
    if math.isinf(norm_type):
        # Backends disagree on the maximum of NaN: it travels as a flag.
        value = torch.stack([part.nan_to_num(nan=0.0, posinf=math.inf), part.isnan().double()])
    else:
        value = part.reshape(1)
    for axis in axes:
        _all_reduce(value, mesh.get_group(axis), dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM)
    return value[0] if len(value) == 1 else torch.where(value[1] > 0, math.nan, value[0])


def _all_reduce(value: Tensor, group: dist.ProcessGroup, operation: dist.ReduceOp.RedOpType) -> None:
    try:
        dist.all_reduce(value, op=operation, group=group)
    except RuntimeError as error:
        if "No backend type associated with device type" not in str(error):
            raise
        raise ValueError(
            f"The process group (backend {dist.get_backend(group)!r}) cannot reduce a norm on {value.device.type!r},"
            " the device of the parameters' mesh. Start it with init_process_group('cpu:gloo,cuda:nccl')."
        ) from error
