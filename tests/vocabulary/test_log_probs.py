"""Log-probabilities and entropy of the ring against a log-softmax over all logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_longmoe.vocabulary import ring_log_probs
from lightning_longmoe.vocabulary.reference import reference_ring_cross_entropy, reference_ring_log_probs
from tests.pool import run_on_ranks
from tests.vocabulary.cases import UNEVEN, Case, assert_close, assert_equal, expected, leaves

MODES = ("weights", "activations")
OPTIONS = {"logit_softcap": 1.5, "logit_scale": 0.7}


def run(case: Case, entropy: bool, reference: bool = False) -> dict[str, Tensor]:
    """Values and gradients of this rank, with the case's incoming gradients for both results."""
    ranks = dist.get_world_size()
    own = leaves(case, dist.get_rank())
    keywords: dict[str, Any] = {**case.options, "group": dist.group.WORLD if ranks > 1 else None}
    operator = reference_ring_log_probs if reference else ring_log_probs
    result = operator(
        own["x"],
        own["weight"],
        own["targets"],
        vocab_size=case.vocab,
        config=case.config,
        bias_shard=own["bias"],
        entropy=entropy,
        **keywords,
    )
    outputs = [result.log_probs] if result.entropy is None else list(result)
    torch.autograd.backward(outputs, [own["incoming"], own["incoming"].flip(0)][: len(outputs)])
    grads = {name: own[name].grad for name in ("x", "weight", "bias")}
    return {"log_probs": outputs[0].detach(), "entropy": outputs[-1].detach(), **grads}


def all_at_once(case: Case, entropy: bool) -> dict[str, Tensor]:
    joined = case.joined()
    x, weight, bias = (joined[name].requires_grad_() for name in ("x", "weight", "bias"))
    u = case.options.get("logit_scale", 1.0) * (x @ weight.T + bias)
    cap = case.options.get("logit_softcap")
    log_p = torch.log_softmax(u if cap is None else cap * torch.tanh(u / cap), -1)
    valid = joined["targets"] != -100
    chosen = log_p[torch.arange(len(x)), joined["targets"].where(valid, 0)] * valid
    of_token = torch.distributions.Categorical(logits=log_p).entropy() * valid
    flipped = torch.cat([joined["incoming"][case.rows(rank)].flip(0) for rank in range(case.ranks)])
    objective = (chosen * joined["incoming"]).sum() + entropy * (of_token * flipped).sum()
    grads = torch.autograd.grad(objective, (x, weight, bias))
    values = {"log_probs": chosen.detach(), "entropy": of_token.detach()}
    return {**values, **dict(zip(("x", "weight", "bias"), grads, strict=True))}


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("entropy", [False, True])
def test_values_and_gradients_are_exact(ranks: int, mode: str, entropy: bool) -> None:
    for options in ({}, OPTIONS):
        case = Case(UNEVEN[ranks], mode=mode, options=options, vocab=38)
        results = run_on_ranks(ranks, run, case, entropy)
        wanted = all_at_once(case, entropy)
        for name in ("log_probs", "entropy", "x") if entropy else ("log_probs", "x"):
            assert_close(torch.cat([result[name] for result in results]), wanted[name], 1e-12, name)
        for name in ("weight", "bias"):
            joined = case.unpadded([result[name] for result in results])
            assert joined is not None
            assert_close(joined, wanted[name], 1e-12, name)


def test_the_entropy_of_masked_entries_is_zero_and_finite() -> None:
    bias = torch.tensor([0.0, -torch.inf, 1.0, -torch.inf], dtype=torch.float64)
    x = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.eye(4, 3, dtype=torch.float64, requires_grad=True)
    result = ring_log_probs(x, weight, torch.tensor([0, 2]), group=None, vocab_size=4, bias_shard=bias, entropy=True)
    wanted = torch.distributions.Categorical(logits=(x @ weight.T + bias)[:, ::2]).entropy()
    assert result.entropy is not None
    torch.testing.assert_close(result.entropy, wanted, rtol=1e-12, atol=1e-12)
    actual = torch.autograd.grad(result.entropy.sum(), (x, weight), retain_graph=True)
    torch.testing.assert_close(actual, torch.autograd.grad(wanted.sum(), (x, weight)), rtol=1e-12, atol=1e-12)


def reference_loss(case: Case) -> dict[str, Any]:
    own = leaves(case, dist.get_rank())
    loss = reference_ring_cross_entropy(
        own["x"],
        own["weight"],
        own["targets"],
        group=dist.group.WORLD if dist.get_world_size() > 1 else None,
        vocab_size=case.vocab,
        bias_shard=own["bias"],
        **case.options,
    )
    loss.backward(own["incoming"] if loss.dim() else torch.full_like(loss, 3.0))
    return {"loss": loss.detach(), **{name: own[name].grad for name in ("x", "weight", "bias")}}


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_the_reference_has_the_same_meaning(ranks: int, reduction: str) -> None:
    options = {**OPTIONS, "z_loss": 0.1, "label_smoothing": 0.2, "reduction": reduction}
    case = Case(UNEVEN[ranks], bias=True, options=options)
    assert_equal(case, run_on_ranks(ranks, reference_loss, case))
    assert expected(case)["weight"].abs().max() > 0


def test_the_reference_of_log_probs_has_the_same_meaning() -> None:
    case = Case(UNEVEN[2], options=OPTIONS)
    for mine, theirs in zip(run_on_ranks(2, run, case, True), run_on_ranks(2, run, case, True, True), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-12)
