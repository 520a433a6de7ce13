"""Mean loss and perplexity over uneven batches and ranks."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_longmoe.models.metrics import MeanTokenLoss, TokenPerplexity
from tests.pool import run_on_ranks


def update(metric: MeanTokenLoss, *pairs: tuple[float, int]) -> MeanTokenLoss:
    for loss_sum, count in pairs:
        metric.update(torch.tensor(loss_sum), torch.tensor(count))
    return metric


def test_batches_weigh_by_their_tokens() -> None:
    assert update(MeanTokenLoss(), (6.0, 3), (0.0, 0), (4.0, 1)).compute().item() == 2.5
    assert update(TokenPerplexity(), (6.0, 3), (4.0, 1)).compute().item() == pytest.approx(math.exp(2.5))


def test_without_tokens_the_result_is_nan() -> None:
    assert math.isnan(update(MeanTokenLoss(), (0.0, 0)).compute().item())


def over_ranks() -> tuple[float, float]:
    pairs = [(6.0, 3), (4.0, 1)] if dist.get_rank() == 0 else [(20.0, 6)]
    return (
        update(MeanTokenLoss(), *pairs).compute().item(),
        update(TokenPerplexity(), *pairs).compute().item(),
    )


def test_uneven_ranks_give_the_mean_over_all_tokens() -> None:
    for mean, perplexity in run_on_ranks(2, over_ranks):
        assert mean == 3.0
        assert perplexity == pytest.approx(math.exp(3.0))


@pytest.mark.parametrize("cast", [nn.Module.bfloat16, nn.Module.half, lambda m: m.to(torch.bfloat16)])
def test_sums_stay_exact_in_a_model_of_low_precision(cast) -> None:  # type: ignore[no-untyped-def]
    model = nn.ModuleDict({"metric": MeanTokenLoss(), "linear": nn.Linear(2, 2)})
    cast(model)
    assert model["linear"].weight.dtype != torch.float32
    metric = model["metric"]
    for _ in range(2):
        update(metric, *[(1.0, 1)] * 300, (0.0, 300))
        assert metric.compute().dtype == torch.float64
        assert metric.compute().item() == 0.5
        metric.reset()


def test_states_move_to_the_device_of_the_update() -> None:
    metric = MeanTokenLoss().to("meta")
    metric.update(torch.zeros((), device="meta"), torch.zeros((), dtype=torch.int64, device="meta"))
    assert isinstance(metric.loss_sum, Tensor)
    assert metric.loss_sum.device.type == "meta"
