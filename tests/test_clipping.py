"""Clipping over several meshes, against torch's functions in one process."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from lightning_longmoe.clipping import clip_grad_norm_, clip_grad_value_, total_norm
from tests.pool import run_on_ranks

INF = math.inf


# ---------------------------------------------------------------------------------------------- the tests' model
def _gradients(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = {"dense": (5, 3), "bias": (3,), "experts": (4, 6, 2), "router": (3, 3), "unused": (4, 4), "plain": (2, 2)}
    return {
        name: 3 * torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        for name, shape in shapes.items()
    }


def _plain_parameters(gradients: dict[str, Tensor]) -> dict[str, nn.Parameter]:
    parameters = {name: nn.Parameter(torch.zeros_like(gradient)) for name, gradient in gradients.items()}
    for name, parameter in parameters.items():
        parameter.grad = None if name == "unused" else gradients[name].clone()
    return parameters


def _sharded_parameters(gradients: dict[str, Tensor], kind: str) -> dict[str, nn.Parameter]:
    """The same parameters and gradients, laid out as FSDP2 does: over one axis, with replicas, with experts on top."""
    world_size = dist.get_world_size()
    if kind == "fsdp":
        mesh = init_device_mesh("cpu", (world_size,))
        dense, experts = (mesh, [Shard(0)]), (mesh, [Shard(0)])
    elif kind == "hsdp":
        mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("replicate", "shard"))
        dense, experts = (mesh, [Replicate(), Shard(0)]), (mesh, [Replicate(), Shard(1)])
    else:
        assert kind == "expert", kind
        mesh = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("expert_shard", "expert"))
        dense = (init_device_mesh("cpu", (world_size,)), [Shard(0)])
        experts = (mesh["expert"], [Shard(0)])
    placed = {"dense": dense, "bias": dense, "router": dense, "unused": dense, "experts": experts}
    parameters = {}
    for name, gradient in gradients.items():
        place = lambda t, p=placed.get(name): t if p is None else distribute_tensor(t, *p)
        parameters[name] = nn.Parameter(place(torch.zeros_like(gradient)))
        parameters[name].grad = None if name == "unused" else place(gradient.clone())
    if kind == "expert" and world_size > 2:
        _shard_again(parameters, gradients["experts"], mesh)
    return parameters


def _shard_again(parameters: dict[str, nn.Parameter], gradient: Tensor, mesh: DeviceMesh) -> None:
    """FSDP2 itself over the experts of one rank: placements (_StridedShard(0), Shard(0))."""
    from torch.distributed.fsdp import fully_shard

    module = nn.Module()
    module.experts = parameters["experts"]
    module.experts.grad = None
    fully_shard(module, mesh=mesh["expert_shard"])
    sharded = module.experts
    # Row-major order of the mesh is (expert_shard, expert), and the experts are split by `expert` first.
    outer, inner = mesh.get_coordinate()
    local = gradient.chunk(2)[inner].chunk(mesh.size(0))[outer].clone()
    sharded.grad = DTensor.from_local(
        local, sharded.device_mesh, sharded.placements, shape=sharded.shape, stride=sharded.stride(), run_check=False
    )
    assert type(sharded.placements[0]).__name__ == "_StridedShard"
    parameters["experts"] = sharded


def _whole(parameters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    gradients = {name: parameter.grad for name, parameter in parameters.items() if parameter.grad is not None}
    return {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in gradients.items()}


def _clip_sharded(kind: str, dtype: torch.dtype, max_norm: float, norm_type: float) -> tuple[Tensor, dict[str, Tensor]]:
    parameters = _sharded_parameters(_gradients(dtype), kind)
    norm = clip_grad_norm_(parameters.values(), max_norm, norm_type)
    assert type(norm) is Tensor
    return norm, _whole(parameters)


LAYOUTS = [(1, "fsdp"), (2, "fsdp"), (2, "expert"), (4, "hsdp"), (4, "expert")]


@pytest.mark.parametrize(("world_size", "kind"), LAYOUTS)
@pytest.mark.parametrize("norm_type", [2.0, INF, 1.0, 3.0])
def test_norm_and_clipped_gradients_equal_those_of_one_process(world_size: int, kind: str, norm_type: float) -> None:
    alone = _plain_parameters(_gradients())
    expected = nn.utils.clip_grad_norm_(alone.values(), 0.5, norm_type)
    for norm, gradients in run_on_ranks(world_size, _clip_sharded, kind, torch.float64, 0.5, norm_type):
        assert norm.dtype == torch.float64
        torch.testing.assert_close(norm, expected, rtol=1e-13, atol=0)
        torch.testing.assert_close(gradients, _whole(alone), rtol=1e-12, atol=0)


def test_gradients_below_the_limit_stay_bitwise_as_they_are() -> None:
    for _, gradients in run_on_ranks(2, _clip_sharded, "expert", torch.float32, 1e4, 2.0):
        expected = {name: gradient for name, gradient in _gradients(torch.float32).items() if name != "unused"}
        torch.testing.assert_close(gradients, expected, rtol=0, atol=0)


def test_low_precision_gradients_accumulate_in_float32() -> None:
    alone = [g.double() for name, g in _gradients(torch.bfloat16).items() if name != "unused"]
    expected = torch.linalg.vector_norm(torch.cat([g.flatten() for g in alone])).float()
    for norm, gradients in run_on_ranks(2, _clip_sharded, "fsdp", torch.bfloat16, 0.5, 2.0):
        assert norm.dtype == torch.float32
        torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)
        factor = 0.5 / (expected + 1e-6)
        torch.testing.assert_close(
            gradients["dense"], (_gradients(torch.bfloat16)["dense"] * factor), check_dtype=False
        )
        assert gradients["dense"].dtype == torch.bfloat16


def test_a_large_bfloat16_gradient_loses_nothing() -> None:
    parameter = nn.Parameter(torch.zeros(100_000, dtype=torch.bfloat16))
    parameter.grad = torch.ones_like(parameter)
    torch.testing.assert_close(total_norm(parameter), torch.tensor(100_000.0).sqrt(), rtol=1e-6, atol=0)


# ---------------------------------------------------------------------------------------------- where experts live
def _expert(values: Tensor, rows: int, first: int, mesh: DeviceMesh) -> nn.Parameter:
    """A stack of four experts of which this rank holds ``rows`` from ``first``, however uneven."""
    shape = {"shape": values.shape, "stride": values.stride(), "run_check": False}
    local = values[first : first + rows].clone()
    parameter = nn.Parameter(DTensor.from_local(torch.zeros_like(local), mesh, [Shard(0)], **shape))
    parameter.grad = DTensor.from_local(local, mesh, [Shard(0)], **shape)
    return parameter


def _norm_of_four_experts(layout: str) -> float:
    """Four experts with squared gradient norms 4, 16, 36 and 64."""
    values = torch.tensor([[2.0, 0.0], [0.0, 4.0], [6.0, 0.0], [0.0, 8.0]])
    if layout == "replicated":
        parameters = [nn.Parameter(torch.zeros(2)) for _ in values]
        for parameter, value in zip(parameters, values, strict=True):
            parameter.grad = value.clone()
        return total_norm(parameters).item()
    mesh, rank = init_device_mesh("cpu", (2,)), dist.get_rank()
    split = {"2+2": (2, 2), "1+3": (1, 3), "4+0": (4, 0), "one without": (2, 2)}[layout]
    parameters = [_expert(values, split[rank], split[0] * rank, mesh)]
    if layout == "one without":
        idle = _expert(torch.zeros(4, 2), 2, 2 * rank, mesh)
        idle.grad = None if rank == 1 else idle.grad
        parameters.insert(0, idle)
    return total_norm(parameters).item()


@pytest.mark.parametrize("layout", ["replicated", "2+2", "1+3", "4+0", "one without"])
def test_each_expert_counts_once_wherever_it_lives(layout: str) -> None:
    assert run_on_ranks(2, _norm_of_four_experts, layout) == pytest.approx([math.sqrt(120)] * 2, rel=1e-7)


def _norm_without_gradients_on_some_ranks() -> float:
    """Every rank misses other gradients, and rank 1 all of them."""
    parameters = _sharded_parameters(_gradients(), "expert")
    rank = dist.get_rank()
    for index, name in enumerate(("dense", "bias", "experts")):
        if rank in (1, index):
            parameters[name].grad = None
    parameters["plain"].grad = parameters["router"].grad = None
    mine = [p.grad.to_local().square().sum() for p in parameters.values() if p.grad is not None]
    square = torch.stack([*mine, torch.zeros((), dtype=torch.float64)]).sum()
    dist.all_reduce(square)
    return total_norm(parameters.values()).item() / square.sqrt().item()


def test_ranks_without_gradients_take_part_in_every_collective() -> None:
    assert run_on_ranks(2, _norm_without_gradients_on_some_ranks) == pytest.approx([1.0, 1.0], rel=1e-12)


def test_a_model_without_gradients_has_norm_zero() -> None:
    assert clip_grad_norm_([], 1.0) == 0
    assert clip_grad_norm_([nn.Parameter(torch.ones(3))], 1.0) == 0
    assert total_norm(nn.Parameter(torch.ones(3)), INF) == 0


def test_a_parameter_given_twice_counts_once() -> None:
    parameter = nn.Parameter(torch.zeros(4))
    parameter.grad = torch.full((4,), 3.0)
    assert clip_grad_norm_(iter([parameter, parameter]), 3.0) == 6
    torch.testing.assert_close(parameter.grad, torch.full((4,), 1.5))


# ---------------------------------------------------------------------------------------------- non-finite norms
def _clip_nonfinite(value: float, norm_type: float, error_if_nonfinite: bool) -> tuple[str, float, bool]:
    parameters = _sharded_parameters(_gradients(), "expert")
    if dist.get_rank() == 1:
        parameters["experts"].grad.to_local().view(-1)[0] = value
    before = {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None}
    message, norm = "", 0.0
    try:
        norm = clip_grad_norm_(parameters.values(), 1.0, norm_type, error_if_nonfinite).item()
    except RuntimeError as error:
        message = str(error)
    unchanged = all(torch.equal(_bits(before[name]), _bits(parameters[name].grad)) for name in before)
    return message, norm, unchanged


def _bits(gradient: Tensor) -> Tensor:
    local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    return local.view(torch.int64)


@pytest.mark.parametrize("norm_type", [2.0, INF])
@pytest.mark.parametrize("value", [INF, math.nan])
def test_a_nonfinite_norm_raises_torchs_error_on_every_rank_before_any_change(value: float, norm_type: float) -> None:
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.tensor([value])
    with pytest.raises(RuntimeError) as torchs:
        nn.utils.clip_grad_norm_(parameter, 1.0, norm_type, error_if_nonfinite=True)
    for message, _, unchanged in run_on_ranks(2, _clip_nonfinite, value, norm_type, True):
        assert message == str(torchs.value)
        assert unchanged


@pytest.mark.parametrize("norm_type", [2.0, INF])
@pytest.mark.parametrize("value", [INF, math.nan])
def test_a_nonfinite_norm_is_returned_on_every_rank(value: float, norm_type: float) -> None:
    for message, norm, _ in run_on_ranks(2, _clip_nonfinite, value, norm_type, False):
        assert message == ""
        assert math.isnan(norm) if math.isnan(value) else norm == INF


# ---------------------------------------------------------------------------------------------- clipping by value
def _clip_sharded_by_value(kind: str) -> dict[str, Tensor]:
    parameters = _sharded_parameters(_gradients(), kind)
    clip_grad_value_(parameters.values(), 0.7)
    return _whole(parameters)


@pytest.mark.parametrize(("world_size", "kind"), LAYOUTS[2:])
def test_clipping_by_value_equals_that_of_one_process(world_size: int, kind: str) -> None:
    alone = _plain_parameters(_gradients())
    nn.utils.clip_grad_value_(alone.values(), 0.7)
    for gradients in run_on_ranks(world_size, _clip_sharded_by_value, kind):
        torch.testing.assert_close(gradients, _whole(alone), rtol=0, atol=0)


# ---------------------------------------------------------------------------------------------- what cannot work
def test_limits_and_orders_that_mean_nothing_are_refused() -> None:
    parameter = nn.Parameter(torch.zeros(1))
    for call in (
        lambda: clip_grad_norm_(parameter, -1.0),
        lambda: clip_grad_norm_(parameter, math.nan),
        lambda: clip_grad_value_(parameter, -1.0),
        lambda: total_norm(parameter, 0.0),
        lambda: total_norm(parameter, -INF),
    ):
        with pytest.raises(ValueError, match="is not allowed: it must be"):
            call()


def _clip_a_partial_gradient() -> str:
    mesh = init_device_mesh("cpu", (2,))
    parameter = nn.Parameter(DTensor.from_local(torch.zeros(2), mesh, [Replicate()]))
    parameter.grad = DTensor.from_local(torch.ones(2), mesh, [Partial()])
    with pytest.raises(ValueError, match="redistribute") as caught:
        total_norm(parameter)
    parameter.grad = parameter.grad.redistribute(placements=parameter.placements)
    assert total_norm(parameter).item() == pytest.approx(math.sqrt(8))
    return str(caught.value)


def test_a_gradient_that_still_waits_for_its_sum_is_refused() -> None:
    assert all("Partial" in message for message in run_on_ranks(2, _clip_a_partial_gradient))


def _start_group_for_cuda_only() -> None:
    """A process group whose only backend (gloo in disguise) takes no CPU tensors."""
    from torch.distributed import Backend, ProcessGroupGloo

    def create(store: Any, rank: int, size: int, timeout: Any) -> ProcessGroupGloo:
        return ProcessGroupGloo(store, rank, size, timeout=timeout)

    Backend.register_backend("cudaonly", create, devices=["cuda"])
    dist.init_process_group("cudaonly")


def _parameter_with_cpu_gradient(device_type: str) -> nn.Parameter:
    """What FSDP2's CPU offload leaves: parts on the CPU, whatever the mesh's device."""
    mesh = init_device_mesh(device_type, (2,))
    layout = {"shape": (4,), "stride": (1,), "run_check": False}
    parameter = nn.Parameter(DTensor.from_local(torch.zeros(2), mesh, [Shard(0)], **layout))
    parameter.grad = DTensor.from_local(torch.full((2,), 3.0), mesh, [Shard(0)], **layout)
    return parameter


def _clip_cpu_gradient_in_a_group_for_cuda_only(device_type: str) -> float | str:
    _start_group_for_cuda_only()
    try:
        norm = total_norm(_parameter_with_cpu_gradient(device_type))
    except ValueError as error:
        return str(error)
    assert norm.device.type == "cpu"
    return norm.item()


def test_a_group_without_a_backend_for_the_mesh_is_refused_with_the_backend_to_use() -> None:
    for message in run_on_ranks(2, _clip_cpu_gradient_in_a_group_for_cuda_only, "cpu", init_group=False):
        assert "cpu:gloo,cuda:nccl" in str(message)


@pytest.mark.gpu
def test_only_the_norm_of_a_cpu_gradient_moves_to_the_device_of_the_group() -> None:
    assert run_on_ranks(2, _clip_cpu_gradient_in_a_group_for_cuda_only, "cuda", init_group=False) == [6.0, 6.0]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_gradients_on_two_devices_and_of_two_dtypes_are_one_vector(dtype: torch.dtype) -> None:
    values = [3 * torch.randn(1000, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
    parameters = [
        nn.Parameter(torch.zeros(1000, device=device, dtype=kind))
        for device in ("cuda", "cpu")
        for kind in (dtype, torch.float32)
    ]
    for parameter, value in zip(parameters, values, strict=True):
        parameter.grad = value.to(parameter.device, parameter.dtype)
    before = [p.grad.double().cpu() for p in parameters]
    norm = clip_grad_norm_(parameters, 0.5)
    expected = torch.linalg.vector_norm(torch.cat(before))
    assert norm.device.type == "cuda"
    torch.testing.assert_close(norm.double().cpu(), expected, rtol=1e-6, atol=0)
    for parameter, gradient in zip(parameters, before, strict=True):
        clipped = (gradient * 0.5 / (expected + 1e-6)).to(parameter.dtype)
        torch.testing.assert_close(parameter.grad.cpu(), clipped)
