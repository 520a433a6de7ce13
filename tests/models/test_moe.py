"""Router, auxiliary loss, bias update and recomputation of the MoE layer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_longmoe.models.auxiliary import take_aux_loss
from lightning_longmoe.models.moe import MoELayer, Router, update_router_biases
from lightning_longmoe.runtime.reduction import TokenReduction
from lightning_longmoe.runtime.replay import checkpoint_contexts, replaying
from tests.pool import run_on_ranks

HIDDEN, FFN, EXPERTS, TOP_K = 6, 5, 8, 3


@pytest.fixture(autouse=True)
def _empty_list() -> Iterator[None]:
    take_aux_loss()
    yield
    take_aux_loss()


def by_hand(layer: MoELayer, hidden: Tensor) -> Tensor:
    """Token by token, from the definition."""
    router, out = layer.router, []
    for x in hidden.reshape(-1, hidden.size(-1)):
        logits = router.weight @ x
        if router.kind == "softmax":
            scores = choice = logits.exp() / logits.exp().sum()
        else:
            scores = 1 / (1 + torch.exp(-logits))
            choice = scores + router.expert_bias
        chosen = sorted(range(EXPERTS), key=lambda e: -choice[e].item())[: router.top_k]  # noqa: B023
        weights = scores[chosen]
        if router.renormalize:
            weights = weights / weights.sum()
        y = torch.zeros_like(x)
        if layer.shared is not None:
            gate, up = (layer.shared.gate_up_proj.weight @ x).chunk(2)
            y = y + layer.shared.down_proj.weight @ (F.silu(gate) * up)
        for weight, e in zip(weights, chosen, strict=True):
            gate, up = (layer.experts.gate_up_proj[e] @ x).chunk(2)
            y = y + router.scaling * weight * (layer.experts.down_proj[e] @ (F.silu(gate) * up))
        out.append(y)
    return torch.stack(out).view(hidden.shape)


@pytest.mark.parametrize("shared_ffn_size", [0, 4])
@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("router", ["softmax", "sigmoid"])
def test_the_layer_equals_its_definition_in_value_and_gradient(
    router: str, renormalize: bool, shared_ffn_size: int
) -> None:
    torch.manual_seed(0)
    layer = MoELayer(
        HIDDEN,
        FFN,
        EXPERTS,
        TOP_K,
        router=router,
        renormalize=renormalize,
        scaling=1.7,
        shared_ffn_size=shared_ffn_size,
    ).double()
    if router == "sigmoid":
        layer.router.expert_bias.normal_()
    hidden = torch.randn(2, 4, HIDDEN, dtype=torch.float64, requires_grad=True)
    out, expected = layer(hidden), by_hand(layer, hidden)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    wanted = [hidden, *layer.parameters()]
    ours = torch.autograd.grad(out.square().sum(), wanted)
    theirs = torch.autograd.grad(expected.square().sum(), wanted)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_router_weights_are_float32_in_a_bfloat16_model_and_under_autocast() -> None:
    router = Router(HIDDEN, EXPERTS, TOP_K)
    x = torch.randn(5, HIDDEN)
    ids, weights = router(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast_ids, cast_weights = router(x)
    assert torch.equal(ids, cast_ids)
    assert torch.equal(weights, cast_weights)
    low = router.bfloat16()
    _, low_weights = low(x.bfloat16())
    exact = torch.softmax(x.bfloat16().double() @ low.weight.double().T, -1).topk(TOP_K).values
    torch.testing.assert_close(low_weights.double(), exact / exact.sum(-1, keepdim=True), rtol=1e-6, atol=0)


@pytest.mark.parametrize("cast", [nn.Module.bfloat16, nn.Module.half, nn.Module.double, lambda m: m.to(torch.bfloat16)])
def test_the_correction_bias_stays_float32_and_keeps_every_bit(cast) -> None:  # type: ignore[no-untyped-def]
    layer = MoELayer(HIDDEN, FFN, EXPERTS, TOP_K, router="sigmoid")
    layer.router.expert_bias.copy_(torch.linspace(-1, 1, EXPERTS) / 3)
    before = layer.router.expert_bias.clone()
    cast(layer)
    assert layer.router.expert_bias.dtype == torch.float32
    assert torch.equal(layer.router.expert_bias, before)
    assert layer.router.weight.dtype != torch.float32
    assert "router.expert_bias" in layer.state_dict()


def test_idle_experts_get_zero_gradients_and_not_none() -> None:
    layer = MoELayer(HIDDEN, FFN, EXPERTS, 1)
    layer(torch.randn(1, 1, HIDDEN)).sum().backward()
    assert all(p.grad is not None for p in layer.parameters())
    assert sum(bool(g.any()) for g in layer.experts.down_proj.grad) == 1


# ------------------------------------------------------------------------------------------------- auxiliary loss


def aux_by_hand(router: Router, x: Tensor) -> Tensor:
    """coef · E · Σ f_e P_e from the definition; f is a constant of the graph."""
    scores = torch.softmax(x @ router.weight.T, -1)
    chosen = scores.topk(router.top_k).indices
    f = torch.tensor([(chosen == e).sum().item() / chosen.numel() for e in range(EXPERTS)], dtype=x.dtype)
    return router.aux_loss_coef * EXPERTS * (f * scores.mean(0)).sum()


def balanced_layer() -> MoELayer:
    torch.manual_seed(0)
    return MoELayer(HIDDEN, FFN, EXPERTS, TOP_K, aux_loss_coef=0.3).double()


def joined_tokens() -> Tensor:
    return torch.randn(10, HIDDEN, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def test_auxiliary_loss_equals_its_definition_in_value_and_gradient() -> None:
    layer, x = balanced_layer(), joined_tokens()
    layer(x)
    aux, expected = take_aux_loss(), aux_by_hand(layer.router, x)
    torch.testing.assert_close(aux, expected, rtol=1e-12, atol=0)
    ours = torch.autograd.grad(aux, layer.router.weight)
    theirs = torch.autograd.grad(expected, layer.router.weight)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


def test_perfect_balance_has_the_value_of_the_coefficient() -> None:
    layer = MoELayer(EXPERTS, FFN, EXPERTS, 1, aux_loss_coef=0.3).double()
    layer.router.weight.data = torch.eye(EXPERTS, dtype=torch.float64)
    layer(5 * torch.eye(EXPERTS, dtype=torch.float64))
    assert take_aux_loss().item() == pytest.approx(0.3, rel=1e-12)


@pytest.mark.parametrize("quiet", ["eval", "no_grad", "coefficient 0"])
def test_no_auxiliary_loss_without_training(quiet: str) -> None:
    layer = balanced_layer()
    layer.train(quiet != "eval")
    layer.router.aux_loss_coef *= quiet != "coefficient 0"
    with torch.set_grad_enabled(quiet != "no_grad"):
        layer(joined_tokens())
    assert take_aux_loss().item() == 0.0


def shared_aux(sizes: list[int], recompute: bool) -> tuple[float, Tensor]:
    layer = balanced_layer()
    layer.router.reduction = TokenReduction(dist.group.WORLD, dist.get_world_size())
    x = joined_tokens().split(sizes)[dist.get_rank()]
    run_layer(layer, x, recompute)
    aux = take_aux_loss()
    aux.backward()
    gradient = layer.router.weight.grad
    dist.all_reduce(gradient)
    return aux.item(), gradient / dist.get_world_size()


def run_layer(layer: MoELayer, x: Tensor, recompute: bool) -> Tensor:
    if not recompute:
        return layer(x)
    return checkpoint(layer, x, use_reentrant=False, context_fn=checkpoint_contexts)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("sizes", [[7, 3], [10, 0]])
def test_auxiliary_loss_of_uneven_ranks_equals_one_process_on_the_joined_batch(
    sizes: list[int], recompute: bool
) -> None:
    layer, x = balanced_layer(), joined_tokens()
    expected = aux_by_hand(layer.router, x)
    expected.backward()
    for value, gradient in run_on_ranks(2, shared_aux, sizes, recompute):
        assert value == pytest.approx(expected.item(), rel=1e-12)
        torch.testing.assert_close(gradient, layer.router.weight.grad, rtol=1e-12, atol=1e-14)


# ------------------------------------------------------------------------------------------------- recomputation


def gradients(layer: MoELayer, x: Tensor, recompute: bool) -> list[Tensor]:
    layer.zero_grad()
    x = x.clone().requires_grad_()
    out = run_layer(layer, x, recompute)
    (out.square().sum() + take_aux_loss()).backward()
    return [x.grad, *(p.grad.clone() for p in layer.parameters())]


def test_recomputation_equals_no_recomputation() -> None:
    layer, x = balanced_layer(), joined_tokens()
    plain, again = gradients(layer, x, False), gradients(layer, x, True)
    assert take_aux_loss().item() == 0.0  # the recomputation adds no term
    torch.testing.assert_close(again, plain, rtol=1e-13, atol=1e-14)


def test_a_router_that_would_flip_in_the_recomputation_keeps_its_first_choice() -> None:
    """Experts 0 and 1 read equal channels and tie but for 1e-9; noise of 1e-6 in the recomputation turns that round."""
    layer, x = balanced_layer(), joined_tokens().abs()
    x[:, 1] = x[:, 0]
    router = layer.router
    router.top_k, router.renormalize = 1, False
    with torch.no_grad():
        router.weight.fill_(-1.0)
        router.weight[:2] = torch.eye(2, HIDDEN)
        router.weight[0, 0] += 1e-9

    def disturb(_: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        noise = torch.zeros(HIDDEN, dtype=torch.float64)
        noise[0] = -1e-6 * replaying()
        return (args[0] * (1 + noise),)

    choices, would_choose = [], []

    def watch(router: Router, args: tuple[Tensor], out: tuple[Tensor, Tensor]) -> None:
        choices.append(out[0].unique().tolist())
        would_choose.append(router._choose(router._scores(args[0]).detach()).unique().tolist())

    handles = [router.register_forward_pre_hook(disturb), router.register_forward_hook(watch)]
    noisy = gradients(layer, x, True)
    for handle in handles:
        handle.remove()
    assert would_choose == [[0], [1]]
    assert choices == [[0], [0]]
    for got, expected in zip(noisy, gradients(layer, x, False), strict=True):
        assert (got - expected).abs().max() <= 1e-5 * expected.abs().max()


# ------------------------------------------------------------------------------------------------- bias update


def sigmoid_layer() -> MoELayer:
    torch.manual_seed(0)
    return MoELayer(HIDDEN, FFN, EXPERTS, TOP_K, router="sigmoid", bias_update_rate=0.01)


def expected_update(counts: Tensor) -> Tensor:
    return 0.01 * torch.sign(counts.double().mean() - counts).float()


def test_bias_moves_towards_balance_by_the_counts_of_all_forwards() -> None:
    layer, x = sigmoid_layer(), joined_tokens().float()
    counts = torch.zeros(EXPERTS)
    for part in x.split(4):
        ids, _ = layer.router(part)
        counts += torch.bincount(ids.flatten(), minlength=EXPERTS)
    update_router_biases(layer)
    assert torch.equal(layer.router.expert_bias, expected_update(counts))
    update_router_biases(layer)  # no forward since
    assert torch.equal(layer.router.expert_bias, expected_update(counts))


def test_evaluation_and_recomputation_are_not_counted() -> None:
    layer, x = sigmoid_layer(), joined_tokens().float()
    layer.eval()
    layer(x)
    assert layer.router.take_counts() is None
    layer.train()
    run_layer(layer, x.requires_grad_(), True).sum().backward()
    assert layer.router.take_counts().sum().item() == 10 * TOP_K


def update_on_ranks(sizes: list[int], with_reduction: bool) -> Tensor:
    layer = sigmoid_layer()
    x = joined_tokens().float().split(sizes)[dist.get_rank()]
    layer(x)
    if with_reduction:
        layer.router.reduction = TokenReduction(dist.group.WORLD, dist.get_world_size())
    update_router_biases(layer)
    return layer.router.expert_bias


@pytest.mark.parametrize("with_reduction", [True, False], ids=["strategy", "DDP"])
def test_bias_is_updated_from_the_counts_of_all_ranks(with_reduction: bool) -> None:
    layer = sigmoid_layer()
    ids, _ = layer.router(joined_tokens().float())
    expected = expected_update(torch.bincount(ids.flatten(), minlength=EXPERTS))
    for bias in run_on_ranks(2, update_on_ranks, [8, 2], with_reduction):
        assert torch.equal(bias, expected)


def test_repeated_bias_updates_balance_a_skewed_router() -> None:
    torch.manual_seed(0)
    layer = MoELayer(HIDDEN, FFN, EXPERTS, 1, router="sigmoid", bias_update_rate=0.02)
    x = torch.randn(512, HIDDEN) + 1.0

    def worst_share() -> float:
        return torch.bincount(layer.router(x)[0].flatten(), minlength=EXPERTS).max().item() / 512

    before = worst_share()
    for _ in range(150):
        layer.router(x)
        update_router_biases(layer)
    assert before > 0.3
    assert worst_share() < 0.2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 9}, "top_k=9"),
        ({"top_k": 0}, "top_k=0"),
        ({"router": "cosine"}, "'softmax' or 'sigmoid'"),
        ({"router": "sigmoid", "aux_loss_coef": 0.1}, "bias_update_rate"),
        ({"bias_update_rate": 0.1}, "aux_loss_coef"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MoELayer(HIDDEN, FFN, EXPERTS, **({"top_k": 2} | options))
