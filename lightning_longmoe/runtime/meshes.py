"""Device meshes and process groups of one world, made once and kept.

A DeviceMesh makes process groups; making one on every run of a Trainer leaks them and leaves DTensors on an old mesh.
So `meshes_for` keeps one `Meshes` for each layout and default process group.

Glossary: *world* - all ranks; *shard group* - ranks over which parameters are sharded; *replica* - a copy of the shard
group (HSDP); *expert group* - ranks that hold all experts once; *expert shard group* - ranks that hold the same
experts, over which FSDP2 shards them further; *vocabulary group*, *vocabulary shard group* - likewise for rows of the
vocabulary; *control group* - all ranks, over gloo, for small host values.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_longmoe._compat import group_timeout, set_group_timeout

if TYPE_CHECKING:
    from lightning_longmoe.layout import Layout


@dataclass(frozen=True)
class Meshes:
    """The meshes and groups of one layout.

    Attributes:
        user: what ``LightningModule.device_mesh`` returns: ``("data_parallel", "tensor_parallel")``, the first over all
            ranks (data x context), the second of size 1, so that a stock project's ``configure_model`` works.
        shard: mesh for ``fully_shard``: ``("shard",)``, or ``("replicate", "shard")`` with HSDP.
        expert: mesh on which experts are ``Shard(0)``; None when the expert size is 1.
        expert_shard: mesh for ``fully_shard`` of the experts over the rest of the ranks; None when no rest is left.
        vocabulary: mesh on which rows of the vocabulary are ``Shard(0)``; its group is the ring, and serves nothing
            else in a step. None when the vocabulary size is 1.
        vocabulary_shard: mesh for ``fully_shard`` of those rows over the rest of the ranks; None when no rest is left.
        vocabulary_copies: the ranks that hold the same rows, of all replicas and rests; None where there is one.
        context: mesh of the ranks that share a sequence; None when the context size is 1.
        replicate_group: the replicas of this rank, for what lives outside ``fully_shard``; None without HSDP.
        world_group: all ranks, on the device's backend: sums over everything that shares the loss.
        control: all ranks, over gloo.
    """

    layout: Layout
    user: DeviceMesh
    shard: DeviceMesh
    expert: DeviceMesh | None
    expert_shard: DeviceMesh | None
    vocabulary: DeviceMesh | None
    vocabulary_shard: DeviceMesh | None
    vocabulary_copies: DeviceMesh | None
    context: DeviceMesh | None
    replicate_group: dist.ProcessGroup | None
    world_group: dist.ProcessGroup
    control: dist.ProcessGroup

    def groups(self) -> list[dist.ProcessGroup]:
        """Every process group of this layout, each once, in an order that is the same on all ranks."""
        found: list[dist.ProcessGroup] = [self.world_group, self.control]
        vocabulary = (self.vocabulary, self.vocabulary_shard, self.vocabulary_copies)
        for mesh in (self.user, self.shard, self.expert, self.expert_shard, *vocabulary, self.context):
            found += [] if mesh is None else [mesh.get_group(axis) for axis in range(mesh.ndim)]
        return list({id(group): group for group in found}.values())


_kept: dict[tuple[object, ...], Meshes] = {}
_kept_user: dict[tuple[object, ...], DeviceMesh] = {}
"""Keys hold the default process group itself: the id of one that was destroyed may be given to the next."""


def meshes_for(layout: Layout, device_type: str, timeout: timedelta) -> Meshes:
    """The meshes of ``layout``, made on the first call for the current default process group.

    Args:
        layout: who is in which group; its world size is that of the default process group.
        device_type: "cuda" or "cpu".
        timeout: for every group.
    """
    key = (layout, device_type, timeout, dist.group.WORLD)
    if key not in _kept:
        meshes = _make(layout, device_type, timeout)
        for group in meshes.groups():
            set_group_timeout(group, timeout)
        _warm_up(meshes, device_type)
        _kept[key] = meshes
    return _kept[key]


def user_mesh(world_size: int, device_type: str, timeout: timedelta) -> DeviceMesh:
    """What ``LightningModule.device_mesh`` returns; it depends on nothing but the world, so it exists first."""
    key = (world_size, device_type, dist.group.WORLD)
    if key not in _kept_user:
        mesh = init_device_mesh(device_type, (world_size, 1), mesh_dim_names=("data_parallel", "tensor_parallel"))
        for axis in range(mesh.ndim):
            set_group_timeout(mesh.get_group(axis), timeout)
        _kept_user[key] = mesh
    return _kept_user[key]


def _make(layout: Layout, device_type: str, timeout: timedelta) -> Meshes:
    world, replicas, shards = layout.world_size, layout.replicate_size, layout.shard_size
    user = user_mesh(world, device_type, timeout)
    if replicas == 1:
        shard = init_device_mesh(device_type, (shards,), mesh_dim_names=("shard",))
    else:
        shard = init_device_mesh(device_type, (replicas, shards), mesh_dim_names=("replicate", "shard"))
    expert, expert_shard = _owners(layout, device_type, "expert")
    vocabulary, vocabulary_shard = _owners(layout, device_type, "vocabulary")
    copies = None
    if vocabulary is not None and world > layout.vocabulary_size:
        size = (world // layout.vocabulary_size, layout.vocabulary_size)
        root = init_device_mesh(device_type, size, mesh_dim_names=("vocabulary_copies", "vocabulary_rows"))
        copies = root["vocabulary_copies"]
    context = None
    if layout.context_size > 1:
        size = (world // layout.context_size, layout.context_size)
        context = init_device_mesh(device_type, size, mesh_dim_names=("data", "context"))["context"]
    replicate_group = None if replicas == 1 else shard.get_group("replicate")
    world_group = user.get_group("data_parallel")
    control = world_group if dist.get_backend(world_group) == "gloo" else dist.new_group(backend="gloo")
    return Meshes(
        layout=layout,
        user=user,
        shard=shard,
        expert=expert,
        expert_shard=expert_shard,
        vocabulary=vocabulary,
        vocabulary_shard=vocabulary_shard,
        vocabulary_copies=copies,
        context=context,
        replicate_group=replicate_group,
        world_group=world_group,
        control=control,
    )


def _owners(layout: Layout, device_type: str, axis: str) -> tuple[DeviceMesh | None, DeviceMesh | None]:
    """The mesh of ``axis`` ("expert" or "vocabulary"), and the one for ``fully_shard`` over the rest of the ranks."""
    replicas, rest, size = layout.replicate_size, layout.size(f"{axis}_shard"), layout.size(axis)
    if size == 1:
        return None, None
    names = ("replicate", f"{axis}_shard", axis)
    root = init_device_mesh(device_type, (replicas, rest, size), mesh_dim_names=names)
    if rest == 1:
        return root[axis], None
    return root[axis], root[f"{axis}_shard"] if replicas == 1 else root["replicate", f"{axis}_shard"]


def _warm_up(meshes: Meshes, device_type: str) -> None:
    """Use each group once: a communicator made lazily in the middle of a step finds the memory full, or hangs."""
    for group in meshes.groups():
        device = "cpu" if dist.get_backend(group) == "gloo" else device_type
        dist.all_reduce(torch.zeros(1, device=device), group=group)


def group_timeouts(meshes: Meshes) -> list[timedelta]:
    """The timeout of each group of `Meshes.groups`."""
    return [group_timeout(group) for group in meshes.groups()]
