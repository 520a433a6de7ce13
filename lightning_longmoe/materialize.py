"""Initial weights: equal on all ranks, and given shard by shard to a module that was built on the meta device.

A module on the meta device has shapes and no values, so a model larger than a host can be built and sharded first.
Each of its parameters then gets values that depend on the seed and on its name alone: every module's
``reset_parameters`` runs once under a seed made from its name, in full, on the host, and this rank keeps its own part.
A stack of experts offers `reset_expert`, so that a rank only makes its home experts. World size and group sizes
therefore change no weight.
"""

from __future__ import annotations

import zlib

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_longmoe import _compat
from lightning_longmoe.runtime.pieces import box


def has_meta(module: nn.Module) -> bool:
    """Whether a parameter or buffer of ``module`` has no values yet."""
    return any(t.is_meta for t in [*module.parameters(), *module.buffers()])


def agree_on_initial_values(module: nn.Module, control: dist.ProcessGroup) -> int:
    """Make plain parameters and buffers equal on all ranks: rank 0's values win where any rank differs.

    Ranks that seeded alike exchange one checksum for each tensor and nothing else.

    Args:
        module: before sharding.
        control: all ranks, over gloo.

    Returns:
        How many tensors rank 0 sent.
    """
    tensors = [t for t in [*module.parameters(), *module.buffers()] if t.numel() and not t.is_meta]
    tensors = [t for t in tensors if not isinstance(t, DTensor)]
    if dist.get_world_size(control) == 1 or not tensors:
        return 0
    # the bytes and not the values, in whole numbers: exact, and a NaN compares equal to itself
    sums = torch.stack([_checksum(t) for t in tensors])
    lowest, highest = sums.clone(), sums.clone()
    dist.all_reduce(lowest, op=dist.ReduceOp.MIN, group=control)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=control)
    differing = [t for t, equal in zip(tensors, (lowest == highest).tolist(), strict=True) if not equal]
    for tensor in differing:
        value = tensor.detach().cpu().contiguous()
        dist.broadcast(value, src=0, group=control)
        tensor.data.copy_(value)
    return len(differing)


def _checksum(tensor: Tensor) -> Tensor:
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    whole = flat[: flat.numel() // 8 * 8].view(torch.int64)
    rest = flat[whole.numel() * 8 :].to(torch.int64).sum()
    position = torch.arange(1, whole.numel() + 1)  # the order of the values counts too; int64 wraps around
    return (whole * position).sum() + rest


def agreed_seed(control: dist.ProcessGroup) -> int:
    """Rank 0's seed (what ``seed_everything`` set, else torch's own)."""
    seed = torch.tensor(torch.initial_seed() % 2**62)
    dist.broadcast(seed, src=0, group=control)
    return int(seed)


def materialize(module: nn.Module, device: torch.device, seed: int) -> int:
    """Give every meta parameter and buffer of ``module`` storage on ``device`` and its initial values.

    Args:
        module: after sharding; parameters are DTensors or plain tensors.
        device: of this rank.
        seed: equal on all ranks.

    Returns:
        How many modules were initialised.

    Raises:
        ValueError: a module owns meta parameters and has no ``reset_parameters`` to give them values.
    """
    pending = {n: m for n, m in module.named_modules() if _owns_meta(m)}
    without = [f"{n} ({type(m).__name__})" for n, m in pending.items() if not hasattr(m, "reset_parameters")]
    if without:
        raise ValueError(
            f"{len(without)} modules on the meta device cannot be initialised: {without[:10]}. Give each a method"
            " `reset_parameters()` that sets its own parameters and buffers."
        )
    filled: dict[int, nn.Parameter] = {}  # by id of the meta parameter: a tied one has several owners
    for name, child in pending.items():
        _materialize_one(name, child, device, seed, filled)
    return len(pending)


def _owns_meta(module: nn.Module) -> bool:
    own = [*module._parameters.values(), *module._buffers.values()]
    return any(t is not None and t.is_meta for t in own)


def _materialize_one(
    name: str, module: nn.Module, device: torch.device, seed: int, filled: dict[int, nn.Parameter]
) -> None:
    full: dict[str, Tensor] = {}
    for key, parameter in list(module._parameters.items()):
        if parameter is None or not parameter.is_meta:
            continue
        if id(parameter) not in filled:
            local = _initial_shard(name, module, key, parameter, seed, full)
            filled[id(parameter)] = _with_local(parameter, local.to(device))
        module._parameters[key] = filled[id(parameter)]
    for key, buffer in module._buffers.items():
        if buffer is not None and buffer.is_meta:
            full = full or _initial_values(name, module, seed)
            module._buffers[key] = full[key].to(device)


def _initial_shard(
    name: str, module: nn.Module, key: str, parameter: nn.Parameter, seed: int, full: dict[str, Tensor]
) -> Tensor:
    """This rank's part of a parameter's initial values; ``full`` keeps the module's values for its next parameter."""
    shape, offset = _local_slice(parameter)
    if hasattr(module, "reset_expert"):
        home = range(offset[0], offset[0] + shape[0])
        part = torch.stack([_initial_expert(name, module, key, parameter, index, seed) for index in home])
        offset = (0, *offset[1:])
    else:
        if not full:
            full.update(_initial_values(name, module, seed))
        part = full[key]
    for dim, (start, length) in enumerate(zip(offset, shape, strict=True)):
        part = part.narrow(dim, start, length)
    return part.clone().to(parameter.dtype)


def _initial_expert(name: str, module: nn.Module, key: str, stack: Tensor, index: int, seed: int) -> Tensor:
    """One expert's values of the parameter ``key``; they depend on its index and not on the rank that makes them."""
    values = torch.empty(stack.shape[1:], dtype=stack.dtype)
    generator = torch.Generator().manual_seed(_seed_of(f"{name}.{key}.{index}", seed))
    module.reset_expert({key: values}, generator)  # type: ignore[operator]
    return values


def _local_slice(parameter: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and global offset of this rank's part."""
    if not isinstance(parameter, DTensor):
        return tuple(parameter.shape), (0,) * parameter.ndim
    mesh = parameter.device_mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "every rank is in every mesh of ours"
    offset, shape = box(tuple(parameter.shape), parameter.placements, tuple(mesh.shape), tuple(coordinate))
    return shape, offset


def _with_local(parameter: nn.Parameter, local: Tensor) -> nn.Parameter:
    """A parameter like ``parameter`` that holds ``local``."""
    value = local
    if isinstance(parameter, DTensor):
        value = DTensor.from_local(
            local,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
    return nn.Parameter(value, requires_grad=parameter.requires_grad)


def _seed_of(name: str, seed: int) -> int:
    return (seed * 1_000_003 + zlib.crc32(name.encode())) % 2**63


def _initial_values(name: str, module: nn.Module, seed: int) -> dict[str, Tensor]:
    """Full values of a module's own parameters and buffers, on the CPU; leaves the random state as it was."""
    twin = object.__new__(_compat.plain_class(module))  # FSDP2's own class cannot be copied
    twin.__dict__ = dict(module.__dict__)
    twin._parameters = {
        key: None if p is None else nn.Parameter(torch.empty(p.shape, dtype=p.dtype), requires_grad=False)
        for key, p in module._parameters.items()
    }
    twin._buffers = {k: None if b is None else torch.empty(b.shape, dtype=b.dtype) for k, b in module._buffers.items()}
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(_seed_of(name, seed))
        twin.reset_parameters()  # type: ignore[operator]
    return {k: t.detach() for k, t in {**twin._parameters, **twin._buffers}.items() if t is not None}


def move_to_device(module: nn.Module, device: torch.device) -> None:
    """Move what is left on another device: buffers, and parameters outside ``fully_shard``."""
    for child in module.modules():
        for key, parameter in child._parameters.items():
            if parameter is not None and parameter.device != device:
                child._parameters[key] = _with_local(parameter, _compat.local_tensor(parameter.detach()).to(device))
        for key, buffer in child._buffers.items():
            if buffer is not None and buffer.device != device:
                child._buffers[key] = buffer.to(device)
