"""Projection and loss in one module, alone and over ranks."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_longmoe.models.auxiliary import add_aux_loss, take_aux_loss
from lightning_longmoe.models.head import CausalLMHead
from lightning_longmoe.runtime.reduction import TokenReduction, WindowScale
from tests.pool import run_on_ranks

HIDDEN, VOCAB = 5, 11


def make_head(**options) -> CausalLMHead:  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    head = CausalLMHead(HIDDEN, VOCAB, bias=True, **options).double()
    nn.init.normal_(head.bias)
    nn.init.normal_(head.weight)
    return head


def make_batch(rows: int = 3, length: int = 4, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, length, HIDDEN, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, VOCAB, (rows, length), generator=generator)
    return hidden, targets.masked_fill(torch.rand(rows, length, generator=generator) < 0.3, -100)


def test_loss_is_torchs_mean_cross_entropy() -> None:
    head, (hidden, targets) = make_head(), make_batch()
    hidden.requires_grad_()
    wanted = [hidden, head.weight, head.bias]
    loss = head(hidden, targets)
    expected = F.cross_entropy(F.linear(hidden, head.weight, head.bias).flatten(0, 1), targets.flatten())
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    ours, theirs = torch.autograd.grad(3 * loss, wanted), torch.autograd.grad(3 * expected, wanted)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


def test_every_option_reaches_the_loss_and_the_logits() -> None:
    head = make_head(logit_softcap=1.2, logit_scale=0.8, z_loss=0.01, label_smoothing=0.1, ignore_index=0)
    hidden, targets = make_batch()
    targets = targets.where(targets != -100, 0)
    logits = 1.2 * torch.tanh(0.8 * F.linear(hidden, head.weight, head.bias) / 1.2)
    torch.testing.assert_close(head(hidden), logits, rtol=1e-12, atol=1e-14)
    valid = targets != 0
    lse = torch.logsumexp(logits, -1)
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=0, label_smoothing=0.1)
    expected = expected + 0.01 * lse[valid].square().mean()
    torch.testing.assert_close(head(hidden, targets), expected, rtol=1e-12, atol=0)


def test_sum_and_count_leave_the_regularisers_out() -> None:
    head = make_head(z_loss=0.3, label_smoothing=0.2, logit_softcap=2.0)
    hidden, targets = make_batch()
    total, count = head.loss_sum_and_count(hidden, targets)
    expected = F.cross_entropy(head(hidden).flatten(0, 1), targets.flatten(), reduction="sum")
    torch.testing.assert_close(total, expected, rtol=1e-12, atol=0)
    assert count.item() == (targets != -100).sum().item()


def test_sum_and_count_run_the_modules_hooks() -> None:
    """FSDP gathers parameters in them."""
    head, calls = make_head(), []
    head.register_forward_pre_hook(lambda *_: calls.append(1))
    head.loss_sum_and_count(*make_batch())
    assert calls == [1]


def test_without_valid_targets_loss_and_gradients_are_zero() -> None:
    head, (hidden, targets) = make_head(), make_batch()
    hidden.requires_grad_()
    loss = head(hidden, torch.full_like(targets, -100))
    loss.backward()
    assert loss.item() == 0.0
    for tensor in (hidden, head.weight, head.bias):
        assert torch.equal(tensor.grad, torch.zeros_like(tensor))


def test_the_loss_is_float32_for_a_bfloat16_model() -> None:
    head = make_head().bfloat16()
    hidden, targets = make_batch()
    loss = head(hidden.bfloat16(), targets)
    loss.backward()
    assert loss.dtype == torch.float32
    assert head.weight.grad.dtype == torch.bfloat16
    assert head(hidden.bfloat16()).dtype == torch.float32
    exact = F.cross_entropy(F.linear(hidden, *(p.double() for p in (head.weight, head.bias))).mT, targets)
    assert loss.item() == pytest.approx(exact.item(), rel=2e-2)


def test_autocast_decides_the_dtype_of_the_product_in_both_directions() -> None:
    head, (hidden, targets) = make_head().float(), make_batch()
    low = copy.deepcopy(head).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = head(hidden.float(), targets)
    loss.backward()
    expected = low(hidden.bfloat16(), targets)
    expected.backward()
    assert loss.item() == expected.item()
    assert head.weight.grad.dtype == torch.float32
    assert torch.equal(head.weight.grad, low.weight.grad.float())


def test_waiting_auxiliary_losses_are_taken_in_the_gradient_alone() -> None:
    head, (hidden, targets) = make_head(), make_batch()
    a = torch.tensor(2.0, requires_grad=True)
    plain = head(hidden, targets).item()
    add_aux_loss(a**2)
    loss = head(hidden, targets)
    (loss / 2).backward()
    assert loss.item() == plain
    assert a.grad.item() == 2.0  # 1/2 · 2a
    assert take_aux_loss().item() == 0.0


def test_evaluation_takes_no_auxiliary_losses() -> None:
    head, (hidden, targets) = make_head(), make_batch()
    add_aux_loss(torch.tensor(2.0, requires_grad=True) * 1)
    with torch.no_grad():
        head(hidden, targets)
        head.loss_sum_and_count(hidden, targets)
    assert take_aux_loss().item() == 2.0


# ------------------------------------------------------------------------------------------------------- tying


def test_a_tied_head_shares_one_parameter_and_sums_both_gradients() -> None:
    embedding = nn.Embedding(VOCAB, HIDDEN).double()
    head = CausalLMHead(HIDDEN, VOCAB, tied_to=embedding)
    assert head.weight is embedding.weight
    ids, targets = torch.tensor([[1, 2, 3]]), torch.tensor([[2, 3, 4]])
    head(embedding(ids), targets).backward()
    weight = embedding.weight.detach().clone().requires_grad_()
    F.cross_entropy(F.linear(F.embedding(ids, weight), weight)[0], targets[0]).backward()
    torch.testing.assert_close(embedding.weight.grad, weight.grad, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("head_first", [False, True])
def test_the_tie_outlives_the_meta_device_and_a_copy(head_first: bool) -> None:
    with torch.device("meta"):
        embedding = nn.Embedding(VOCAB, HIDDEN)
        head = CausalLMHead(HIDDEN, VOCAB, tied_to=embedding)
    model = nn.ModuleList([head, embedding] if head_first else [embedding, head])
    model.to_empty(device="cpu")
    for child in model:
        child.reset_parameters()
        if isinstance(child, CausalLMHead):
            child.tie_weights()
    assert head.weight is embedding.weight
    assert not head.weight.is_meta
    twin = copy.deepcopy(model)
    assert twin[0].weight is twin[1].weight
    assert len(list(twin.parameters())) == 1


def test_resetting_a_tied_head_leaves_the_embedding_alone() -> None:
    embedding = nn.Embedding(VOCAB, HIDDEN)
    before = embedding.weight.clone()
    CausalLMHead(HIDDEN, VOCAB, tied_to=embedding, bias=True).reset_parameters()
    assert torch.equal(embedding.weight, before)


# ------------------------------------------------------------------------------------------------------- over ranks


def step_on_ranks(rows: list[int], window: WindowScale | None, upstream: float) -> tuple[float, list[Tensor]]:
    """One micro-batch a rank; gradients averaged over ranks as FSDP2 and DDP do. ``hidden`` grads stay local."""
    head = make_head(z_loss=0.01)
    head.reduction = TokenReduction(dist.group.WORLD, dist.get_world_size())
    head.reduction.window = window
    hidden, targets = (t.split(rows)[dist.get_rank()] for t in make_batch(sum(rows)))
    hidden = hidden.clone().requires_grad_()
    loss = head(hidden, targets)
    (loss * upstream).backward()
    for parameter in head.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
    return loss.item(), [hidden.grad / dist.get_world_size(), head.weight.grad, head.bias.grad]


@pytest.mark.parametrize("rows", [[2, 1], [3, 0], [1, 1, 4, 2]])
def test_every_rank_returns_the_global_mean_and_its_part_of_the_gradient(rows: list[int]) -> None:
    head, (hidden, targets) = make_head(z_loss=0.01), make_batch(sum(rows))
    hidden.requires_grad_()
    loss = head(hidden, targets)
    (loss * 0.5).backward()
    results = run_on_ranks(len(rows), step_on_ranks, rows, None, 0.5)
    for value, gradients in results:
        assert value == pytest.approx(loss.item(), rel=1e-13)
        torch.testing.assert_close(gradients[1:], [head.weight.grad, head.bias.grad], rtol=1e-12, atol=1e-14)
    joined = torch.cat([gradients[0] for _, gradients in results])
    torch.testing.assert_close(joined, hidden.grad, rtol=1e-12, atol=1e-14)


def test_with_a_window_the_value_is_the_micro_batchs_and_the_gradient_the_windows() -> None:
    rows, window_tokens = [2, 1], 40
    head, (hidden, targets) = make_head(z_loss=0.01), make_batch(3)
    mean = head(hidden, targets)
    count = (targets != -100).sum().item()
    # Lightning divides by A = 4; what is left must be d(sum over this micro-batch) / N
    (mean * count / window_tokens).backward()
    window = WindowScale(accumulate=4, valid_tokens=window_tokens)
    for value, gradients in run_on_ranks(2, step_on_ranks, rows, window, 0.25):
        assert value == pytest.approx(mean.item(), rel=1e-13)
        torch.testing.assert_close(gradients[1:], [head.weight.grad, head.bias.grad], rtol=1e-12, atol=1e-14)


def ignored_everywhere() -> tuple[float, float]:
    head = make_head()
    head.reduction = TokenReduction(dist.group.WORLD, 2)
    hidden, targets = make_batch()
    loss = head(hidden, torch.full_like(targets, -100))
    loss.backward()
    return loss.item(), head.weight.grad.abs().max().item()


def test_labels_ignored_on_all_ranks_give_zero() -> None:
    assert run_on_ranks(2, ignored_everywhere) == [(0.0, 0.0)] * 2


# ------------------------------------------------------------------------------------------------------- errors


def test_targets_are_checked_before_use() -> None:
    head, seen = make_head(), []
    head.check_targets = seen.append
    hidden, targets = make_batch()
    head(hidden, targets)
    head(hidden)
    assert len(seen) == 2
    assert seen[0] is targets
    assert seen[1] is None  # logits


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"logit_softcap": 0.0}, "logit_softcap=0.0"),
        ({"label_smoothing": 1.0}, "label_smoothing=1.0"),
        ({"vocab_size": 0}, "at least 1"),
        ({"tied_to": nn.Embedding(3, HIDDEN)}, r"\[11, 5\]"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CausalLMHead(**({"hidden_size": HIDDEN, "vocab_size": VOCAB} | arguments))


def test_targets_of_another_shape_are_refused() -> None:
    hidden, targets = make_batch()
    with pytest.raises(ValueError, match="one target a position"):
        make_head()(hidden, targets.flatten())


def test_an_untrained_head_is_as_good_as_guessing() -> None:
    head = CausalLMHead(64, 256)
    loss = head(torch.randn(2, 8, 64), torch.randint(0, 256, (2, 8)))
    assert loss.item() == pytest.approx(math.log(256), abs=0.2)
