"""Each private name of torch and Lightning that the package touches is where `_compat` expects it."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
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


def _strided_placement() -> tuple[bool, bool]:
    root = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "expert"))
    layer = nn.Module()
    layer.weight = nn.Parameter(DTensor.from_local(torch.ones(4, 3), root["expert"], [Shard(0)]))
    fully_shard(layer, mesh=root["shard"])
    outer, inner = layer.weight.placements
    return _compat.is_strided_shard(outer), _compat.is_strided_shard(inner)


def test_a_dimension_that_two_meshes_shard_is_recognised() -> None:
    assert run_on_ranks(4, _strided_placement)[0] == (True, False)


def _store_and_units() -> tuple[bytes, list[tuple[tuple[int, ...], torch.dtype | None]]]:
    _compat.default_store().set("longmoe/test", "here")
    layer = nn.Linear(3, 4)
    fully_shard(layer, mesh=init_device_mesh("cpu", (2,)), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    units = [(tuple(parameter.shape), dtype) for parameter, dtype in _compat.unit_parameters(layer)]
    return _compat.default_store().get("longmoe/test"), units


def test_the_default_store_and_the_parameters_of_a_unit_are_found() -> None:
    value, units = run_on_ranks(2, _store_and_units)[0]
    assert value == b"here"
    assert units == [((4, 3), torch.bfloat16), ((4,), torch.bfloat16)]


def test_wrapper_names_are_those_that_torch_puts_into_parameter_names() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    names = [n for n, _ in torch.compile(nn.Linear(1, 1)).named_parameters()]
    assert names[0].split(".")[0] == _compat.WRAPPER_NAMES[0]
    wrapped = nn.Sequential(checkpoint_wrapper(nn.Linear(1, 1)))
    assert any(_compat.WRAPPER_NAMES[1] in name for name, _ in wrapped.named_modules())


def _full() -> dict[str, torch.Tensor]:
    mesh = init_device_mesh("cpu", (2,))
    local = torch.full((1, 2), float(mesh.get_local_rank()))
    return _compat.full_tensors({"a": DTensor.from_local(local, mesh, [Shard(0)]), "b": torch.ones(1)})


def test_a_state_dict_is_gathered() -> None:
    for state in run_on_ranks(2, _full):
        assert torch.equal(state["a"], torch.tensor([[0.0, 0.0], [1.0, 1.0]]))
        assert torch.equal(state["b"], torch.ones(1))


def test_lightnings_placeholder_optimizer_is_recognised() -> None:
    from lightning.pytorch.core.optimizer import _MockOptimizer

    assert _compat.is_placeholder(_MockOptimizer())
    assert not _compat.is_placeholder(torch.optim.SGD([torch.ones(1)]))


def test_a_reshaped_tensor_is_no_view_and_passes_gradients() -> None:
    x = torch.randn(2, 1, 3, requires_grad=True)
    out = _compat.reshaped(x * 2, (2, 3))
    assert out._base is None
    out.sum().backward()
    assert torch.equal(x.grad, torch.full((2, 1, 3), 2.0))


@pytest.mark.parametrize("given", [None, "last"])
def test_the_checkpoint_that_a_fit_was_asked_for_is_known_also_where_it_was_not_found(given: str | None) -> None:
    import lightning.pytorch as pl
    from lightning.pytorch.demos.boring_classes import BoringModel

    seen: list[object] = []

    class Ask(pl.Callback):
        def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
            seen.append(_compat.requested_checkpoint())

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "barebones": False}
    trainer = pl.Trainer(accelerator="cpu", max_steps=1, callbacks=[Ask()], **quiet)
    trainer.fit(BoringModel(), ckpt_path=given)
    assert seen == [given]
    assert _compat.requested_checkpoint() is None
