"""Lookup over vocabulary shards: rows and gradients are those of one embedding that sees all ids."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_longmoe.vocabulary import recording
from lightning_longmoe.vocabulary.embedding import vocabulary_embedding
from lightning_longmoe.vocabulary.projection import take_over_embedding
from tests.pool import RemoteError, run_on_ranks

HIDDEN = 6
SHAPES = {1: [(2, 5)], 2: [(2, 5), (7,)], 3: [(2, 5), (0,), (3, 4)], 4: [(2, 5), (0, 3), (1,), (30,)]}
"""Shape of each rank's ids."""


def problem(vocab: int, ranks: int) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """The whole weight; ids and incoming gradients of each rank."""
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(vocab, HIDDEN, generator=generator, dtype=torch.float64)
    # squared: low ids are frequent, as in a real vocabulary
    shares = [torch.rand(shape, generator=generator).square() for shape in SHAPES[ranks]]
    ids = [(share * vocab).long() for share in shares]
    incoming = [torch.randn(*i.shape, HIDDEN, generator=generator, dtype=torch.float64) for i in ids]
    return weight, ids, incoming


def shard_of(weight: Tensor, ranks: int, rank: int) -> Tensor:
    size = -(-len(weight) // ranks)
    return weight[rank * size : (rank + 1) * size].clone()


def look_up(vocab: int, padding_idx: int | None, dtype: torch.dtype) -> tuple[Tensor, Tensor, int]:
    """Rows, gradient of the shard, and bytes sent by this rank."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    weight, ids, incoming = problem(vocab, ranks)
    shard = shard_of(weight, ranks, rank).to(dtype).requires_grad_()
    with recording() as record:
        group = dist.group.WORLD if ranks > 1 else None
        rows = vocabulary_embedding(ids[rank], shard, group=group, vocab_size=vocab, padding_idx=padding_idx)
        rows.backward(incoming[rank].to(dtype))
    return rows.detach(), shard.grad, record.lookup.sent_bytes


def expected(vocab: int, ranks: int, padding_idx: int | None) -> tuple[list[Tensor], Tensor]:
    weight, ids, incoming = problem(vocab, ranks)
    weight.requires_grad_()
    rows = [F.embedding(i, weight, padding_idx) for i in ids]
    (grad,) = torch.autograd.grad(rows, weight, incoming)
    return [row.detach() for row in rows], grad


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("vocab", [1, 2, 37, 38])
@pytest.mark.parametrize("padding_idx", [None, 0])
def test_rows_and_gradients_equal_one_process(ranks: int, vocab: int, padding_idx: int | None) -> None:
    results = run_on_ranks(ranks, look_up, vocab, padding_idx, torch.float64)
    rows, grad = expected(vocab, ranks, padding_idx)
    for rank, (actual, _, _) in enumerate(results):
        assert torch.equal(actual, rows[rank])
    torch.testing.assert_close(torch.cat([result[1] for result in results]), grad, rtol=1e-12, atol=1e-12)


def test_gradients_of_a_bfloat16_shard_are_rounded_once() -> None:
    results = run_on_ranks(3, look_up, 5, None, torch.bfloat16)
    weight, ids, incoming = problem(5, 3)
    total = torch.zeros(5, HIDDEN, dtype=torch.float64)
    for i, grad in zip(ids, incoming, strict=True):
        total.index_add_(0, i.reshape(-1), grad.bfloat16().double().reshape(-1, HIDDEN))
    actual = torch.cat([result[1] for result in results])
    torch.testing.assert_close(actual, total.bfloat16(), rtol=0, atol=0)


def test_each_different_row_travels_once_and_its_gradient_once() -> None:
    vocab, ranks = 37, 4
    size = -(-vocab // ranks)
    results = run_on_ranks(ranks, look_up, vocab, None, torch.float64)
    _, ids, _ = problem(vocab, ranks)
    asked = [[len(set(i[(i // size) == owner].tolist())) for owner in range(ranks)] for i in ids]
    for rank, (_, _, sent) in enumerate(results):
        out = sum(asked[rank]) - asked[rank][rank]
        back = sum(asked[other][rank] for other in range(ranks) if other != rank)
        assert sent == out * 8 + back * HIDDEN * 8 + out * HIDDEN * 8


def frozen_on_rank_1() -> Tensor | None:
    weight, ids, incoming = problem(6, 2)
    shard = shard_of(weight, 2, dist.get_rank()).requires_grad_(dist.get_rank() == 0)
    rows = vocabulary_embedding(ids[dist.get_rank()], shard, group=dist.group.WORLD, vocab_size=6)
    rows.backward(incoming[dist.get_rank()])
    return shard.grad


def test_a_frozen_shard_still_sends_the_gradients_of_the_others() -> None:
    first, second = run_on_ranks(2, frozen_on_rank_1)
    assert second is None
    torch.testing.assert_close(first, expected(6, 2, None)[1][:3], rtol=1e-12, atol=1e-12)


def strange_id() -> None:
    ids = torch.tensor([0, 6] if dist.get_rank() == 1 else [0, 1])
    vocabulary_embedding(ids, torch.zeros(3, 2), group=dist.group.WORLD, vocab_size=6)


def test_ids_outside_the_vocabulary_are_refused_by_all_ranks() -> None:
    with pytest.raises(
        RemoteError, match="1 ids are outside the vocabulary \\(number by rank of the group: \\{1: 1\\}"
    ):
        run_on_ranks(2, strange_id)


def test_arguments_that_do_not_fit_are_named() -> None:
    with pytest.raises(ValueError, match="weight_shard \\[4, 2\\]"):
        vocabulary_embedding(torch.tensor([0]), torch.zeros(4, 2), group=None, vocab_size=6)
    with pytest.raises(ValueError, match="ids are torch.float32"):
        vocabulary_embedding(torch.zeros(1), torch.zeros(6, 2), group=None, vocab_size=6)


def taken_over() -> dict[str, Tensor]:
    """An nn.Embedding and a deep copy of it whose rows are on two ranks."""
    weight, ids, incoming = problem(7, 2)
    rank = dist.get_rank()
    embedding = nn.Embedding(7, HIDDEN, padding_idx=1)
    embedding.weight = nn.Parameter(shard_of(weight, 2, rank))
    take_over_embedding(embedding, dist.group.WORLD, gradient_scale=0.5)
    twin = copy.deepcopy(embedding)
    with torch.no_grad():
        twin.weight.mul_(2)
    rows = embedding(ids[rank])
    rows.backward(incoming[rank])
    return {"rows": rows.detach(), "grad": embedding.weight.grad, "twin": twin(ids[rank]).detach()}


def test_a_taken_over_embedding_scales_its_gradient_and_can_be_copied() -> None:
    results = run_on_ranks(2, taken_over)
    rows, grad = expected(7, 2, 1)
    for rank, result in enumerate(results):
        assert torch.equal(result["rows"], rows[rank])
        assert torch.equal(result["twin"], 2 * rows[rank])
    torch.testing.assert_close(torch.cat([r["grad"] for r in results]), 0.5 * grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("options", [{"max_norm": 1.0}, {"sparse": True}, {"scale_grad_by_freq": True}])
def test_an_option_that_would_be_ignored_is_refused(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="cannot look its rows up on other ranks"):
        take_over_embedding(nn.Embedding(4, 2, **options), None)
