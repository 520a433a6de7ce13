"""PipelinedLLEP under the strategy: the same training as one process, the forward dispatch never replayed."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch.distributed as dist
from torch.utils.data import DataLoader

from lightning_longmoe import LongMoEStrategy
from lightning_longmoe.config import ParallelConfig, PipelinedLLEP
from lightning_longmoe.dispatch import PipelinedDispatch, PlainDispatch
from tests.pool import RemoteError, run_on_ranks
from tests.test_parity import all_to_experts_of_one_rank
from tests.test_strategy import Dense
from tests.tiny import TinyLM, assert_same_training, fit, make_batches, train_alone

MOVING = {"tokens_per_chunk": 5, "min_tokens_per_gemm": 1, "imbalance_threshold": 1.0}
"""Several chunks, and guests wherever the router is not perfectly even."""


@pytest.mark.parametrize("dispatch", [None, "auto", {**MOVING, "depth": 1}, {**MOVING, "depth": 2}], ids=str)
@pytest.mark.parametrize(
    "parallel",
    [
        {"expert_parallel_size": 2},
        {"expert_parallel_size": 4},
        {"expert_parallel_size": 2, "replicate_size": 2},
    ],
    ids=["ep2", "ep4", "ep2_hsdp"],
)
def test_every_dispatch_trains_like_one_process(parallel: dict[str, Any], dispatch: Any) -> None:
    batches = make_batches(8, 4)
    strategy = {"parallel": ParallelConfig(**parallel), "dispatch": dispatch}
    results = run_on_ranks(4, fit, batches, strategy, None, {"accumulate_grad_batches": 2}, [5, 1, 1, 1])
    for result in results:
        assert_same_training(result, train_alone(batches, accumulate=2))


def test_all_tokens_on_one_rank_are_spread_and_train_alike() -> None:
    batches = make_batches(8, 2)
    strategy = {"parallel": ParallelConfig(expert_parallel_size=4), "dispatch": MOVING}
    results = run_on_ranks(4, fit, batches, strategy, None, None, None, True, all_to_experts_of_one_rank)
    for result in results:
        assert_same_training(result, train_alone(batches, prepare=all_to_experts_of_one_rank))


def test_one_rank_may_chunk_its_own_experts() -> None:
    batches = make_batches(4, 2)
    result = run_on_ranks(1, fit, batches, {"dispatch": MOVING})[0]
    assert_same_training(result, train_alone(batches))


def _counts(recompute: bool, shared: int) -> list[dict[str, int]]:
    from lightning_longmoe.config import RecomputeConfig

    module = TinyLM(shared_ffn_size=shared)
    strategy = LongMoEStrategy(
        parallel=ParallelConfig(expert_parallel_size=2), recompute=RecomputeConfig(enabled=recompute)
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=strategy,
        max_steps=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(module, DataLoader(make_batches(2, 3), batch_size=None))  # type: ignore[arg-type]
    dispatches = [block.moe.experts.dispatch for block in module.blocks]
    assert all(isinstance(dispatch, PipelinedDispatch) for dispatch in dispatches)
    assert strategy.takeover.decisions["dispatch"] == "PipelinedLLEP"
    return [dict(dispatch.counts) for dispatch in dispatches]


@pytest.mark.parametrize("shared", [0, 8], ids=["plain_block", "shared_expert"])
@pytest.mark.parametrize("recompute", [True, False])
def test_recomputation_replays_no_dispatch_and_exchanges_no_counts(recompute: bool, shared: int) -> None:
    for counts in run_on_ranks(2, _counts, recompute, shared)[0]:
        assert counts == {"forward": 3, "exchange": 3, "backward": 3}


def _fit_dense(dispatch: Any) -> None:
    strategy = LongMoEStrategy(dispatch=dispatch)
    trainer = pl.Trainer(accelerator="cpu", devices=1, strategy=strategy, max_steps=1, logger=False)
    trainer.fit(Dense(), DataLoader([]))


def test_an_explicit_dispatch_without_experts_is_an_error() -> None:
    with pytest.raises(RemoteError, match=r"dispatch=PipelinedLLEP\(\.\.\.\) cannot apply"):
        run_on_ranks(1, _fit_dense, PipelinedLLEP())


def _kinds(dispatch: Any, size: int) -> set[str]:
    module = TinyLM()
    strategy = LongMoEStrategy(dispatch=dispatch, parallel=ParallelConfig(expert_parallel_size=size))
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=strategy,
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(module, DataLoader(make_batches(2, 1), batch_size=None))  # type: ignore[arg-type]
    return {type(block.moe.experts.dispatch).__name__ for block in module.blocks}


def test_auto_takes_the_operator_only_where_experts_are_spread() -> None:
    assert run_on_ranks(2, _kinds, "auto", 2)[0] == {PipelinedDispatch.__name__}
    assert run_on_ranks(2, _kinds, "auto", 1)[0] == {"NoneType"}
    assert run_on_ranks(2, _kinds, None, 2)[0] == {PlainDispatch.__name__}
