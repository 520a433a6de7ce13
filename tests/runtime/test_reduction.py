"""Sums over ranks, and the factor that makes averaged gradients the gradient of the global mean."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist

from lightning_longmoe.runtime.reduction import TokenReduction, WindowScale
from tests.pool import run_on_ranks


def tokens(count: int) -> torch.Tensor:
    return torch.tensor(count)


def test_one_process_sums_to_a_copy() -> None:
    value = torch.tensor([1.0, 2.0], requires_grad=True)
    total = TokenReduction().sum(value)
    assert torch.equal(total, value)
    assert not total.requires_grad
    assert total.data_ptr() != value.data_ptr()


def sum_over_ranks() -> tuple[torch.Tensor, torch.Tensor]:
    value = torch.tensor([1, 10]) * (dist.get_rank() + 1)
    return TokenReduction(dist.group.WORLD, 2).sum(value), value


def test_ranks_are_summed_and_the_input_is_left_alone() -> None:
    for rank, (total, value) in enumerate(run_on_ranks(2, sum_over_ranks)):
        assert total.tolist() == [3, 30]
        assert value.tolist() == [rank + 1, 10 * (rank + 1)]


@pytest.mark.parametrize(("count", "expected"), [(8, 0.5), (0, 0.0)])
def test_without_a_window_the_scale_is_ranks_over_tokens(count: int, expected: float) -> None:
    scale = TokenReduction(None, 4).gradient_scale(tokens(count))
    assert scale.dtype == torch.float64
    assert scale.item() == expected


@pytest.mark.parametrize(("count", "window", "expected"), [(3, 16, 0.5), (0, 16, 0.5), (0, 0, 0.0)])
def test_with_a_window_the_scale_is_its_own_whatever_the_micro_batch_holds(
    count: int, window: int, expected: float
) -> None:
    reduction = TokenReduction(None, 4)
    reduction.window = WindowScale(accumulate=2, valid_tokens=window)
    assert reduction.gradient_scale(tokens(count)).item() == expected


def test_a_copied_module_keeps_its_reduction() -> None:
    reduction = TokenReduction(None, 1)
    assert copy.deepcopy([reduction])[0] is reduction
