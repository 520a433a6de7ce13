"""A head and an embedding that were taken over, without any strategy: shards as plain parameters."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_longmoe.config import RingDTP
from lightning_longmoe.models.head import CausalLMHead
from lightning_longmoe.runtime.reduction import TokenReduction
from lightning_longmoe.vocabulary.projection import RingProjection, take_over_embedding
from tests.pool import run_on_ranks

HIDDEN = 6
OPTIONS: dict[str, Any] = {"logit_softcap": 1.5, "logit_scale": 0.7, "z_loss": 0.1, "label_smoothing": 0.2}


def whole(vocab: int, tied: bool) -> tuple[nn.Embedding, CausalLMHead]:
    torch.manual_seed(0)
    embedding = nn.Embedding(vocab, HIDDEN).double()
    head = CausalLMHead(HIDDEN, vocab, bias=True, tied_to=embedding if tied else None, **OPTIONS).double()
    with torch.no_grad():
        for parameter in head.parameters():
            nn.init.normal_(parameter)
    return embedding, head


def batch(vocab: int) -> tuple[Tensor, Tensor]:
    """Joined ids and targets [4, 3], some ignored."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, vocab, (4, 3), generator=generator)
    targets = torch.randint(0, vocab, (4, 3), generator=generator)
    return ids, targets.masked_fill(torch.rand(4, 3, generator=generator) < 0.3, -100)


def shard(parameter: Tensor) -> nn.Parameter:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    size = -(-len(parameter) // ranks)
    return nn.Parameter(parameter.detach()[rank * size : (rank + 1) * size].clone())


def spread(vocab: int, tied: bool, as_logits: bool) -> dict[str, Any]:
    """Loss, evaluation sums, logits and gradients of this rank, for its rows of the batch."""
    ranks, group = dist.get_world_size(), dist.group.WORLD
    embedding, head = whole(vocab, tied)
    head.weight, head.bias = shard(head.weight), shard(head.bias)
    embedding.weight = head.weight if tied else shard(embedding.weight)
    take_over_embedding(embedding, group, gradient_scale=1 / ranks)
    head.projection, head.gradient_scale = RingProjection(group, vocab, RingDTP(token_tile=2, vocab_tile=3)), 1 / ranks
    head = copy.deepcopy(head) if not tied else head
    head.reduction = TokenReduction(group, ranks)
    ids, targets = (t.tensor_split(ranks)[dist.get_rank()] for t in batch(vocab))
    hidden = torch.tanh(embedding(ids))
    total, count = head.loss_sum_and_count(hidden.detach(), targets)
    if as_logits:  # a module that computes its own loss; each rank's is a mean of its own
        logits = head(hidden)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    else:
        logits = head(hidden).detach()
        loss = head(hidden, targets)
    loss.backward()
    grads = {"embedding": embedding.weight.grad, "weight": head.weight.grad, "bias": head.bias.grad}
    return {"loss": loss.detach(), "total": total, "count": count, "logits": logits.detach(), **grads}


def alone(vocab: int, tied: bool, as_logits: bool, ranks: int) -> dict[str, Any]:
    embedding, head = whole(vocab, tied)
    ids, targets = batch(vocab)
    hidden = torch.tanh(embedding(ids))
    total, count = head.loss_sum_and_count(hidden.detach(), targets)
    logits = head(hidden)
    loss = head(hidden, targets)
    if as_logits:
        parts = zip(logits.tensor_split(ranks), targets.tensor_split(ranks), strict=True)
        loss = sum(F.cross_entropy(y.flatten(0, 1), t.flatten()) for y, t in parts) / ranks  # type: ignore[assignment]
    loss.backward()
    grads = {"embedding": embedding.weight.grad, "weight": head.weight.grad, "bias": head.bias.grad}
    return {"loss": loss.detach(), "total": total, "count": count, "logits": logits.detach(), **grads}


@pytest.mark.parametrize("as_logits", [False, True], ids=["loss", "logits"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(("ranks", "vocab"), [(1, 7), (2, 7), (4, 7), (4, 2)])
def test_a_taken_over_head_equals_a_whole_one(ranks: int, vocab: int, tied: bool, as_logits: bool) -> None:
    """Gradients summed over the owning ranks and scaled by 1/P are those of the average over ranks."""
    results = run_on_ranks(ranks, spread, vocab, tied, as_logits)
    wanted = alone(vocab, tied, as_logits, ranks)
    close = {"rtol": 1e-12, "atol": 1e-12}
    if not as_logits:
        for result in results:
            torch.testing.assert_close(result["loss"], wanted["loss"], **close)
    torch.testing.assert_close(torch.cat([r["logits"] for r in results]), wanted["logits"], **close)
    torch.testing.assert_close(sum(r["total"] for r in results), wanted["total"], **close)
    assert sum(int(r["count"]) for r in results) == int(wanted["count"])
    for name in ("embedding", "weight", "bias"):
        torch.testing.assert_close(torch.cat([r[name] for r in results]), wanted[name], **close)


def evaluate_frozen() -> tuple[float, bool]:
    """Perplexity without gradients, and whether anything asks for one."""
    group = dist.group.WORLD
    _, head = whole(7, False)
    head.weight, head.bias = shard(head.weight), shard(head.bias)
    head.projection = RingProjection(group, 7)
    _, targets = (t.tensor_split(2)[dist.get_rank()] for t in batch(7))
    hidden = torch.ones(*targets.shape, HIDDEN, dtype=torch.float64)
    with torch.no_grad():
        total, _ = head.loss_sum_and_count(hidden, targets)
    return float(total), total.requires_grad


def test_evaluation_needs_no_gradients() -> None:
    results = run_on_ranks(2, evaluate_frozen)
    _, head = whole(7, False)
    _, targets = batch(7)
    total, _ = head.loss_sum_and_count(torch.ones(4, 3, HIDDEN, dtype=torch.float64), targets)
    assert sum(value for value, _ in results) == pytest.approx(float(total), rel=1e-12)
    assert not any(wants for _, wants in results)


def mixed_precision() -> dict[str, Tensor]:
    """A float32 shard, bfloat16 hidden states: the gradient is never rounded to bfloat16."""
    _, head = whole(7, False)
    head = head.float()
    head.weight, head.bias = shard(head.weight), shard(head.bias)
    head.projection = RingProjection(dist.group.WORLD, 7)
    _, targets = (t.tensor_split(2)[dist.get_rank()] for t in batch(7))
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(*targets.shape, HIDDEN, generator=generator).bfloat16().requires_grad_()
    loss = head(hidden, targets)
    loss.backward()
    assert loss.dtype == torch.float32
    return {"weight": head.weight.grad, "hidden": hidden.grad}


def test_a_float32_shard_and_bfloat16_tokens_keep_their_own_dtypes() -> None:
    for result in run_on_ranks(2, mixed_precision):
        assert result["weight"].dtype == torch.float32
        assert result["hidden"].dtype == torch.bfloat16
        assert not torch.equal(result["weight"], result["weight"].bfloat16().float())
