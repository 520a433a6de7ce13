"""The stack of experts as a module."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from lightning_longmoe.config import ExpertLayout
from lightning_longmoe.dispatch.plain import PlainDispatch
from lightning_longmoe.dispatch.reference import reference_dispatch
from lightning_longmoe.models.experts import Experts
from tests.pool import run_on_ranks

ODD = ExpertLayout(transposed=True, interleaved=True, activation="gpt_oss", clamp=2.0)


def routes(tokens: int, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(tokens, 6, generator=generator, dtype=torch.float64)
    ids = torch.randint(0, experts, (tokens, 2), generator=generator)
    return x, ids, torch.rand(tokens, 2, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize(("layout", "bias"), [(ExpertLayout(), False), (ODD, True)], ids=["standard", "gpt-oss"])
def test_output_and_gradients_equal_the_dense_reference(layout: ExpertLayout, bias: bool) -> None:
    experts = Experts(4, 6, 5, layout, bias=bias).double()
    if bias:
        for parameter in (experts.gate_up_bias, experts.down_bias):
            nn.init.normal_(parameter)
    x, ids, weights = routes(9, 4)
    y = experts(x, ids, weights)
    y.square().sum().backward()
    copies = {n: p.detach().clone().requires_grad_() for n, p in experts.named_parameters()}
    expected = reference_dispatch(x, ids, weights, **copies, layout=layout)
    expected.square().sum().backward()
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    for name, parameter in experts.named_parameters():
        torch.testing.assert_close(parameter.grad, copies[name].grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("gated", "transposed"), [(True, False), (True, True), (False, False), (False, True)])
def test_parameter_shapes_follow_the_layout(gated: bool, transposed: bool) -> None:
    experts = Experts(3, 6, 5, ExpertLayout(gated=gated, transposed=transposed), bias=True)
    width = 10 if gated else 5
    first, second = [3, width, 6], [3, 6, 5]
    if transposed:
        first, second = [3, 6, width], [3, 5, 6]
    assert list(experts.gate_up_proj.shape) == first
    assert list(experts.down_proj.shape) == second
    assert list(experts.gate_up_bias.shape) == [3, width]
    assert list(experts.down_bias.shape) == [3, 6]


def test_weights_are_cast_to_the_dtype_of_the_tokens_and_gradients_come_back_in_their_own() -> None:
    experts = Experts(4, 8, 8)
    x = torch.randn(5, 8).bfloat16()
    y = experts(x, torch.zeros(5, 1, dtype=torch.int64), torch.ones(5, 1))
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert experts.down_proj.grad.dtype == torch.float32


def test_gradient_scale_scales_the_weights_gradients_alone() -> None:
    gradients = []
    for scale in (1.0, 0.25):
        torch.manual_seed(0)
        experts = Experts(4, 6, 5, bias=True).double()
        experts.gradient_scale = scale
        x, ids, weights = routes(9, 4)
        x.requires_grad_()
        experts(x, ids, weights).sum().backward()
        gradients.append([x.grad, *(p.grad * (0.25 / scale) for p in experts.parameters())])
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-14, atol=0)


def test_an_experts_initial_values_depend_on_its_generator_alone() -> None:
    experts = Experts(4, 6, 5)
    for index in range(4):
        slices = {name: p.data[index] for name, p in experts.named_parameters()}
        experts.reset_expert(slices, torch.Generator().manual_seed(index % 2))
    assert torch.equal(experts.gate_up_proj[0], experts.gate_up_proj[2])
    assert torch.equal(experts.down_proj[1], experts.down_proj[3])
    assert not torch.equal(experts.down_proj[0], experts.down_proj[1])


def test_initial_outputs_have_the_scale_of_the_inputs_in_every_orientation() -> None:
    for transposed in (False, True):
        torch.manual_seed(0)
        experts = Experts(8, 64, 16, ExpertLayout(transposed=transposed))
        assert experts.gate_up_proj.std().item() == pytest.approx(64**-0.5, rel=0.05)
        assert experts.down_proj.std().item() == pytest.approx(16**-0.5, rel=0.05)


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ValueError, match="no parameter 'w1'"):
        Experts(2, 4, 4).reset_expert({"w1": torch.zeros(4, 4)})
    with pytest.raises(ValueError, match="ffn_size=0"):
        Experts(2, 4, 0)


def shard_over_ranks() -> tuple[Tensor, dict[str, Tensor]]:
    """Home experts as Shard(0) DTensors, as a strategy leaves them; this rank's half of the tokens."""
    torch.manual_seed(0)
    experts = Experts(4, 6, 5, bias=True).double()
    mesh = init_device_mesh("cpu", (2,))
    for name, parameter in list(experts.named_parameters()):
        local = parameter.detach().chunk(2)[dist.get_rank()].clone()
        setattr(experts, name, nn.Parameter(DTensor.from_local(local, mesh, [Shard(0)])))
    experts.dispatch = PlainDispatch(mesh.get_group())
    experts.gradient_scale = 0.5
    x, ids, weights = (t.tensor_split([3])[dist.get_rank()] for t in routes(9, 4))
    y = experts(x, ids, weights)
    y.square().sum().backward()
    return y.detach(), {n: p.grad.full_tensor() for n, p in experts.named_parameters()}


def test_experts_sharded_over_two_ranks_equal_one_process() -> None:
    results = run_on_ranks(2, shard_over_ranks)
    torch.manual_seed(0)
    experts = Experts(4, 6, 5, bias=True).double()
    y = experts(*routes(9, 4))
    y.square().sum().backward()
    torch.testing.assert_close(torch.cat([result[0] for result in results]), y.detach(), rtol=1e-12, atol=1e-12)
    for _, gradients in results:
        for name, parameter in experts.named_parameters():
            torch.testing.assert_close(gradients[name], 0.5 * parameter.grad, rtol=1e-12, atol=1e-12)
