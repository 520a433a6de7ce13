"""The expert products against a loop over rows that is written out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lightning_longmoe.config import ExpertLayout
from lightning_longmoe.kernels import expert_mlp as kernel
from lightning_longmoe.kernels.expert_mlp import expert_activation, expert_mlp, loop_expert_mlp

HIDDEN, FFN, EXPERTS = 6, 4, 3
LAYOUTS = [
    ExpertLayout(),
    ExpertLayout(transposed=True),
    ExpertLayout(interleaved=True, activation="gelu"),
    ExpertLayout(gated=False, activation="gelu", clamp=0.2),
    ExpertLayout(activation="identity"),
    ExpertLayout(clamp=0.3),
    ExpertLayout(transposed=True, interleaved=True, activation="gpt_oss", clamp=0.4),
]


def activation_by_hand(name: str, gate: Tensor) -> Tensor:
    if name == "silu":
        return gate / (1 + torch.exp(-gate))
    if name == "gelu":
        return gate * 0.5 * (1 + torch.erf(gate / math.sqrt(2)))
    return gate


def row_by_hand(row: Tensor, first: Tensor, second: Tensor, layout: ExpertLayout) -> Tensor:
    """One row through one expert without biases; the weights in the layout's own orientation."""
    h = row @ first if layout.transposed else first @ row
    if not layout.gated:
        gate = torch.minimum(h, torch.tensor(layout.clamp or math.inf, dtype=h.dtype))
        act = activation_by_hand(layout.activation, gate)
    else:
        gate, up = (h[0::2], h[1::2]) if layout.interleaved else (h[:FFN], h[FFN:])
        if layout.clamp is not None:
            gate, up = torch.clamp(gate, max=layout.clamp), torch.clamp(up, -layout.clamp, layout.clamp)
        if layout.activation == "gpt_oss":
            act = gate / (1 + torch.exp(-1.702 * gate)) * (up + 1)
        else:
            act = activation_by_hand(layout.activation, gate) * up
    return act @ second if layout.transposed else second @ act


def weights_for(layout: ExpertLayout, dtype: torch.dtype = torch.float64, scale: int = 1) -> list[Tensor]:
    hidden, ffn = HIDDEN * scale, FFN * scale
    width = 2 * ffn if layout.gated else ffn
    shapes = [(width, hidden), (hidden, ffn)]
    if layout.transposed:
        shapes = [s[::-1] for s in shapes]
    shapes += [(width,), (hidden,)]
    return [torch.randn(EXPERTS, *shape).mul_(0.5).to(dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout.activation}-{layout.gated}")
def test_every_layout_equals_rows_by_hand_in_value_and_gradient(layout: ExpertLayout) -> None:
    torch.manual_seed(1)
    first, second, _, _ = weights_for(layout)
    rows = torch.randn(5, HIDDEN, dtype=torch.float64, requires_grad=True)
    owners = [0, 0, 2, 2, 2]
    out = expert_mlp(rows, [2, 0, 3], first, second, layout=layout)
    by_hand = torch.stack([row_by_hand(r, first[e], second[e], layout) for r, e in zip(rows, owners, strict=True)])
    torch.testing.assert_close(out, by_hand, rtol=1e-12, atol=1e-13)
    upstream = torch.randn_like(out)
    ours = torch.autograd.grad(out, [rows, first, second], upstream)
    theirs = torch.autograd.grad(by_hand, [rows, first, second], upstream)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)


def test_biases_are_added_after_each_product() -> None:
    layout = ExpertLayout(gated=False, activation="identity")
    first, second, first_bias, second_bias = weights_for(layout)
    rows = torch.randn(4, HIDDEN, dtype=torch.float64)
    out = expert_mlp(rows, [1, 2, 1], first, second, layout=layout, gate_up_bias=first_bias, down_bias=second_bias)
    by_hand = torch.stack(
        [second[e] @ (first[e] @ rows[i] + first_bias[e]) + second_bias[e] for i, e in enumerate([0, 1, 1, 2])]
    )
    torch.testing.assert_close(out, by_hand, rtol=1e-12, atol=1e-13)
    out.sum().backward()
    torch.testing.assert_close(second_bias.grad, torch.tensor([1.0, 2.0, 1.0]).double()[:, None].expand(3, HIDDEN))


@pytest.mark.parametrize("counts", [[0, 4, 0], [0, 0, 0]])
def test_idle_experts_get_zero_gradients_and_not_none(counts: list[int]) -> None:
    layout = ExpertLayout()
    weights = weights_for(layout)
    rows = torch.randn(sum(counts), HIDDEN, dtype=torch.float64, requires_grad=True)
    expert_mlp(
        rows, counts, *weights[:2], layout=layout, gate_up_bias=weights[2], down_bias=weights[3]
    ).sum().backward()
    for weight in weights:
        assert weight.grad is not None
        for expert, count in enumerate(counts):
            assert bool(weight.grad[expert].any()) == (count > 0)


def test_gpt_oss_activation_has_its_published_values() -> None:
    layout = ExpertLayout(interleaved=True, activation="gpt_oss", clamp=7.0)
    gate_up = torch.tensor([1.0, 2.0, 9.0, -8.0], dtype=torch.float64)  # gate 1, up 2; gate 9 -> 7, up -8 -> -7
    expected = torch.tensor([3 / (1 + math.exp(-1.702)), 7 / (1 + math.exp(-1.702 * 7)) * -6], dtype=torch.float64)
    torch.testing.assert_close(expert_activation(gate_up, layout), expected, rtol=1e-14, atol=0)


@pytest.mark.parametrize("layout", [ExpertLayout(), ExpertLayout(transposed=True)], ids=["plain", "transposed"])
def test_grouped_product_equals_the_loop_in_bfloat16(layout: ExpertLayout) -> None:
    """Called directly, so that a machine without CUDA checks its offsets, strides and idle groups too."""
    torch.manual_seed(2)
    weights = weights_for(layout, torch.bfloat16, scale=8)
    rows = torch.randn(9, HIDDEN * 8).bfloat16().requires_grad_()
    results = []
    for mlp in (kernel._grouped_expert_mlp, loop_expert_mlp):
        out = mlp(rows, [4, 0, 5], *weights[:2], layout=layout, gate_up_bias=weights[2], down_bias=weights[3])
        results.append([out, *torch.autograd.grad(out.float().square().sum(), [rows, *weights])])
    for grouped, looped in zip(*results, strict=True):
        scale = looped.float().abs().max()
        assert (grouped.float() - looped.float()).abs().max() <= 2e-2 * scale
    assert not results[0][2][1].any()  # the idle expert's gate_up_proj


@pytest.mark.gpu
def test_grouped_product_is_taken_on_cuda_and_equals_the_loop() -> None:
    layout = ExpertLayout()
    weights = [w.detach().cuda().requires_grad_() for w in weights_for(layout, torch.bfloat16, scale=16)]
    rows = torch.randn(300, HIDDEN * 16, device="cuda").bfloat16().requires_grad_()
    assert kernel._can_group(rows, *weights[:2])
    results = []
    for mlp in (expert_mlp, loop_expert_mlp):
        out = mlp(rows, [100, 0, 200], *weights[:2], layout=layout)
        results.append([out, *torch.autograd.grad(out.float().square().sum(), [rows, *weights[:2]])])
    for grouped, looped in zip(*results, strict=True):
        assert (grouped.float() - looped.float()).abs().max() <= 2e-2 * looped.float().abs().max()
    assert not results[0][2][1].any()
