"""Chunked cross-entropy against torch's own functions on all logits at once."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_longmoe.kernels.cross_entropy import CrossEntropyOptions, chunked_cross_entropy, reference_cross_entropy

TOKENS, HIDDEN, VOCAB = 11, 5, 13
EVERYTHING = CrossEntropyOptions(ignore_index=3, logit_softcap=2.0, logit_scale=1.3, z_loss=0.05, label_smoothing=0.2)
OPTIONS = {
    "plain": CrossEntropyOptions(),
    "softcap": CrossEntropyOptions(logit_softcap=1.5),
    "scale": CrossEntropyOptions(logit_scale=0.7),
    "z_loss": CrossEntropyOptions(z_loss=1e-2),
    "smoothing": CrossEntropyOptions(label_smoothing=0.1),
    "everything": EVERYTHING,
}


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(3)
    hidden = torch.randn(TOKENS, HIDDEN).to(dtype).requires_grad_()
    weight = torch.randn(VOCAB, HIDDEN).to(dtype).requires_grad_()
    bias = torch.randn(VOCAB).to(dtype).requires_grad_()
    targets = torch.randint(0, VOCAB, (TOKENS,))
    targets[[2, 7]] = -100
    return hidden, weight, bias, targets


def by_hand(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, o: CrossEntropyOptions) -> Tensor:
    u = o.logit_scale * (hidden @ weight.T + (0 if bias is None else bias))
    y = u if o.logit_softcap is None else o.logit_softcap * torch.tanh(u / o.logit_softcap)
    lse = y.exp().sum(-1).log()
    total = y.new_zeros(())
    for row, target in enumerate(targets.tolist()):
        if target != o.ignore_index:
            hard, soft = lse[row] - y[row, target], lse[row] - y[row].mean()
            total = total + (1 - o.label_smoothing) * hard + o.label_smoothing * soft + o.z_loss * lse[row] ** 2
    return total


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_loss_and_gradients_equal_the_formula_with_any_upstream_gradient(
    options: CrossEntropyOptions, with_bias: bool
) -> None:
    hidden, weight, bias, targets = inputs()
    targets = targets.where(targets != -100, options.ignore_index)
    used_bias = bias if with_bias else None
    wanted = [hidden, weight, bias] if with_bias else [hidden, weight]
    loss = chunked_cross_entropy(hidden, weight, targets, bias=used_bias, options=options, chunk_tokens=4)
    expected = by_hand(hidden, weight, used_bias, targets, options)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    upstream = torch.tensor(-2.5, dtype=torch.float64)
    ours = torch.autograd.grad(loss, wanted, upstream)
    theirs = torch.autograd.grad(expected, wanted, upstream)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_shipped_reference_equals_the_formula(options: CrossEntropyOptions) -> None:
    hidden, weight, bias, targets = inputs()
    targets = targets.where(targets != -100, options.ignore_index)
    reference = reference_cross_entropy(hidden, weight, targets, bias=bias, options=options)
    torch.testing.assert_close(reference, by_hand(hidden, weight, bias, targets, options), rtol=1e-12, atol=0)


def test_chunk_size_does_not_change_the_result() -> None:
    hidden, weight, bias, targets = inputs()
    results = []
    for chunk_tokens in (1, 4, TOKENS, 100):
        loss = chunked_cross_entropy(hidden, weight, targets, bias=bias, chunk_tokens=chunk_tokens)
        results.append([loss, *torch.autograd.grad(loss, [hidden, weight, bias])])
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("tokens", [TOKENS, 0])
def test_without_valid_targets_loss_and_gradients_are_zero(tokens: int) -> None:
    hidden, weight, bias, targets = inputs()
    loss = chunked_cross_entropy(hidden[:tokens], weight, torch.full_like(targets, -100)[:tokens], bias=bias)
    loss.backward()
    assert loss.item() == 0.0
    for tensor in (hidden, weight, bias):
        assert torch.equal(tensor.grad, torch.zeros_like(tensor))


def test_only_the_wanted_gradients_are_computed() -> None:
    hidden, weight, bias, targets = inputs()
    weight.requires_grad_(False)
    chunked_cross_entropy(hidden, weight, targets, bias=bias).backward()
    assert weight.grad is None
    assert hidden.grad is not None
    assert bias.grad is not None


def test_float32_is_within_1e_5_of_float64() -> None:
    hidden, weight, bias, targets = inputs()
    targets = targets.where(targets != -100, EVERYTHING.ignore_index)
    exact = chunked_cross_entropy(hidden, weight, targets, bias=bias, options=EVERYTHING)
    single = chunked_cross_entropy(hidden.float(), weight.float(), targets, bias=bias.float(), options=EVERYTHING)
    torch.testing.assert_close(single, exact, rtol=1e-5, atol=0)


def test_bfloat16_gradient_of_the_weight_accumulates_in_float32() -> None:
    """1024 equal contributions of 2^-9: summed in bfloat16 they would stall at 2^-1."""
    hidden = torch.ones(1024, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    chunked_cross_entropy(hidden, weight, torch.zeros(1024, dtype=torch.int64), chunk_tokens=1).backward(
        torch.tensor(2.0**-8, dtype=torch.float64)
    )
    torch.testing.assert_close(weight.grad, torch.tensor([[-2.0], [2.0]], dtype=torch.bfloat16), rtol=0, atol=0)


def test_bfloat16_error_is_at_most_twice_that_of_plain_torch() -> None:
    hidden, weight, bias, targets = inputs(torch.bfloat16)
    exact = [t.detach().double().requires_grad_() for t in (hidden, weight, bias)]
    truth = F.cross_entropy(F.linear(*exact), targets, reduction="sum")
    truth_grads = torch.autograd.grad(truth, exact)
    ours = torch.autograd.grad(chunked_cross_entropy(hidden, weight, targets, bias=bias), [hidden, weight, bias])
    plain_loss = F.cross_entropy(F.linear(hidden, weight, bias).float(), targets, reduction="sum")
    plain = torch.autograd.grad(plain_loss, [hidden, weight, bias])
    for got, reference, exact_grad in zip(ours, plain, truth_grads, strict=True):
        assert (got - exact_grad).abs().max() <= 2 * (reference - exact_grad).abs().max() + 1e-3


class LargestTensor(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, Tensor):
                self.numel = max(self.numel, tensor.numel())
        return out


def test_no_tensor_is_larger_than_one_chunk_of_logits() -> None:
    tokens, chunk, vocab, hidden_size = 96, 8, 50, 2
    hidden = torch.randn(tokens, hidden_size, requires_grad=True)
    weight = torch.randn(vocab, hidden_size, requires_grad=True)
    targets = torch.randint(0, vocab, (tokens,))
    loss = chunked_cross_entropy(hidden, weight, targets, chunk_tokens=chunk, options=EVERYTHING)
    with LargestTensor() as seen:
        loss = chunked_cross_entropy(hidden, weight, targets, chunk_tokens=chunk, options=EVERYTHING)
    assert seen.numel == chunk * vocab
    with LargestTensor() as seen:
        torch.autograd.backward(loss)
    assert seen.numel <= chunk * vocab


def test_a_target_outside_the_vocabulary_is_an_error() -> None:
    hidden, weight, _, targets = inputs()
    targets[0] = VOCAB
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        chunked_cross_entropy(hidden, weight, targets)
