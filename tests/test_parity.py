"""One optimizer step on W ranks equals one step of one process on the joined batch."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_longmoe.config import FSDPConfig, ParallelConfig, RecomputeConfig
from tests.pool import run_on_ranks
from tests.tiny import assert_same_training, fit, make_batches, train_alone


def _parity(
    world: int,
    parallel: dict[str, Any],
    accumulate: int = 1,
    model: dict[str, Any] | None = None,
    split: list[int] | None = None,
    trainer: dict[str, Any] | None = None,
    fsdp: dict[str, Any] | None = None,
    recompute: bool = True,
    rows: int = 8,
    steps: int = 2,
    tolerance: float = 1e-12,
    **alone: Any,
) -> None:
    batches = make_batches(rows, steps * accumulate)
    strategy = {
        "parallel": ParallelConfig(**parallel),
        "fsdp": FSDPConfig(**(fsdp or {})),
        "recompute": RecomputeConfig(enabled=recompute),
    }
    settings = {"accumulate_grad_batches": accumulate, **(trainer or {})}
    results = run_on_ranks(world, fit, batches, strategy, model, settings, split)
    expected = train_alone(batches, model, accumulate, **alone)
    for result in results:  # every rank logs the global loss and holds the same gathered values
        assert_same_training(result, expected, tolerance)


@pytest.mark.parametrize(
    ("world", "expert"), [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4)], ids=lambda value: str(value)
)
def test_step_equals_one_process_for_every_expert_size(world: int, expert: int) -> None:
    _parity(world, {"expert_parallel_size": expert})


@pytest.mark.parametrize("expert", [1, 2])
def test_step_equals_one_process_with_replicas(expert: int) -> None:
    _parity(4, {"expert_parallel_size": expert, "replicate_size": 2})


@pytest.mark.parametrize("sync", [True, False], ids=["sync_each", "sync_last"])
@pytest.mark.parametrize(
    "parallel",
    [
        {"expert_parallel_size": 1},
        {"expert_parallel_size": 2},
        {"expert_parallel_size": 4},
        {"expert_parallel_size": 2, "replicate_size": 2},
    ],
    ids=["fsdp", "expert2", "expert4", "hsdp"],
)
def test_accumulation_weighs_every_valid_token_of_the_window_alike(parallel: dict[str, Any], sync: bool) -> None:
    _parity(4, parallel, accumulate=2, fsdp={"sync_each_microbatch": sync})


def test_last_short_window_is_a_full_mean() -> None:
    batches = make_batches(4, 3)
    results = run_on_ranks(2, fit, batches, {}, None, {"accumulate_grad_batches": 2})
    assert_same_training(results[0], train_alone(batches, accumulate=2))


def test_unequal_rows_over_ranks_are_weighed_by_token() -> None:
    _parity(2, {"expert_parallel_size": 2}, split=[7, 1], accumulate=2)


def test_recomputation_changes_nothing() -> None:
    _parity(2, {"expert_parallel_size": 2}, recompute=False)


def test_tied_embedding_gets_both_gradients() -> None:
    _parity(2, {"expert_parallel_size": 2}, model={"tied": True}, accumulate=2)


@pytest.mark.parametrize("parallel", [{"expert_parallel_size": 2}, {"expert_parallel_size": 4}], ids=["ep2", "ep4"])
def test_clipping_by_norm_covers_all_meshes(parallel: dict[str, Any]) -> None:
    _parity(4, parallel, trainer={"gradient_clip_val": 0.05}, clip=0.05)


def test_clipping_by_value_covers_all_meshes() -> None:
    trainer = {"gradient_clip_val": 0.002, "gradient_clip_algorithm": "value"}
    _parity(2, {"expert_parallel_size": 2}, trainer=trainer, clip_value=0.002)


@pytest.mark.parametrize(
    "model", [{"aux_loss_coef": 0.1}, {"router": "sigmoid", "scaling": 2.0}], ids=["aux", "sigmoid"]
)
@pytest.mark.parametrize("parallel", [{"expert_parallel_size": 1}, {"expert_parallel_size": 2}], ids=["ep1", "ep2"])
def test_router_variants_do_not_depend_on_the_layout(model: dict[str, Any], parallel: dict[str, Any]) -> None:
    _parity(2, parallel, model=model)


def test_experts_that_do_not_divide_over_the_rest_of_the_ranks_are_sharded_elsewhere() -> None:
    _parity(4, {"expert_parallel_size": 2}, model={"experts": 6})  # 3 home experts over 2 ranks
