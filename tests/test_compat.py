"""Each private name of torch and Lightning that the package touches is where `_compat` expects it."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from lightning_longmoe import _compat
from tests.pool import run_on_ranks


def test_a_backward_is_recognised_from_inside() -> None:
    seen = []
    x = torch.ones(2, requires_grad=True)
    (x * 2).sum().register_hook(lambda grad: seen.append(_compat.inside_backward()))
    y = x.exp().sum()
    x.register_hook(lambda grad: seen.append(_compat.inside_backward()))
    y.backward()
    assert seen == [True]
    assert not _compat.inside_backward()


def _group_timeout() -> tuple[float, float]:
    group = dist.new_group(backend="gloo")
    before = _compat.group_timeout(group).total_seconds()
    _compat.set_group_timeout(group, timedelta(seconds=7))
    return before, _compat.group_timeout(group).total_seconds()


def test_a_group_takes_another_timeout() -> None:
    for before, after in run_on_ranks(2, _group_timeout):
        assert before > 7
        assert after == 7


def _fsdp_names() -> tuple[str, bool, bool, tuple[int, ...]]:
    mesh = init_device_mesh("cpu", (2,))
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3))
    fully_shard(module[0], mesh=mesh)
    fully_shard(module, mesh=mesh)
    _compat.lazily_initialize_root(module)
    child_is_root = module[0]._get_fsdp_state()._is_root  # type: ignore[operator]
    weight = module[0].weight
    return (
        _compat.plain_class(module[0]).__name__,
        _compat.is_fsdp_module(module[0]) and not _compat.is_fsdp_module(nn.Linear(1, 1)),
        bool(child_is_root),
        tuple(_compat.local_tensor(weight).shape),
    )


def test_fsdp_modules_tell_their_class_their_root_and_their_local_part() -> None:
    for name, recognised, child_is_root, shape in run_on_ranks(2, _fsdp_names):
        assert name == "Linear"
        assert recognised
        assert not child_is_root
        assert shape == (2, 3)


def _strided_slices() -> tuple[tuple[int, ...], tuple[int, ...], bool]:
    root = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "expert"))
    full = torch.arange(24.0).view(8, 3)
    home = full.chunk(2)[root["expert"].get_local_rank()].clone()
    layer = nn.Module()
    layer.weight = nn.Parameter(DTensor.from_local(home, root["expert"], [Shard(0)]))
    fully_shard(layer, mesh=root["shard"])
    shape, offset = _compat.local_shape_and_offset(layer.weight)
    expected = full[offset[0] : offset[0] + shape[0]]
    return shape, offset, torch.equal(_compat.local_tensor(layer.weight), expected)


def test_the_slice_of_a_doubly_sharded_tensor_is_known() -> None:
    results = run_on_ranks(4, _strided_slices)
    assert all(equal for _, _, equal in results)
    assert sorted(offset for _, offset, _ in results) == [(0, 0), (2, 0), (4, 0), (6, 0)]


def _full() -> dict[str, torch.Tensor]:
    mesh = init_device_mesh("cpu", (2,))
    local = torch.full((1, 2), float(mesh.get_local_rank()))
    return _compat.full_tensors({"a": DTensor.from_local(local, mesh, [Shard(0)]), "b": torch.ones(1)})


def test_a_state_dict_is_gathered() -> None:
    for state in run_on_ranks(2, _full):
        assert torch.equal(state["a"], torch.tensor([[0.0, 0.0], [1.0, 1.0]]))
        assert torch.equal(state["b"], torch.ones(1))
