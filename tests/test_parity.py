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


# One row a run on 4 ranks; every pair of values of two features occurs in some row.
#            expert replicas accumulate recompute sync   tied
PAIRWISE = [
    (1, 1, 1, True, True, False),
    (1, 2, 2, False, False, True),
    (2, 1, 2, True, False, True),
    (2, 2, 1, False, True, True),
    (2, 1, 1, False, False, False),
    (1, 2, 2, True, True, False),
    (2, 2, 2, True, True, False),
    (4, 1, 2, False, True, False),
    (4, 1, 1, True, False, True),
]


@pytest.mark.parametrize(("expert", "replicas", "accumulate", "recompute", "sync", "tied"), PAIRWISE)
def test_features_combine_in_pairs(
    expert: int, replicas: int, accumulate: int, recompute: bool, sync: bool, tied: bool
) -> None:
    _parity(
        4,
        {"expert_parallel_size": expert, "replicate_size": replicas},
        accumulate=accumulate,
        recompute=recompute,
        fsdp={"sync_each_microbatch": sync},
        model={"tied": tied},
        trainer={"gradient_clip_val": 0.1},
        clip=0.1,
    )


def test_the_pairwise_table_is_complete() -> None:
    columns = list(zip(*PAIRWISE, strict=True))
    impossible = {(4, 2)}  # expert size 4 needs all four ranks in one replica
    for i, first in enumerate(columns):
        for j in range(i + 1, len(columns)):
            wanted = {(a, b) for a in set(first) for b in set(columns[j])}
            missing = wanted - set(zip(first, columns[j], strict=True)) - (impossible if (i, j) == (0, 1) else set())
            assert not missing, (i, j, missing)


def never_choose_the_last_expert(module: Any) -> None:
    """Rows of opposite sign: softmax never ranks the last expert among the first two of four."""
    import torch

    with torch.no_grad():
        for block in module.blocks:
            block.norm.bias.fill_(0.0)
            block.moe.router.weight[-1] = -50 * block.moe.router.weight[:-1].abs().sum(0)


def all_to_experts_of_one_rank(module: Any) -> None:
    """A zero router: ties go to the lowest ids, so every token of every rank chooses experts 0 and 1."""
    import torch

    with torch.no_grad():
        for block in module.blocks:
            block.moe.router.weight.zero_()


@pytest.mark.parametrize("prepare", [never_choose_the_last_expert, all_to_experts_of_one_rank])
@pytest.mark.parametrize("expert", [1, 2, 4])
def test_experts_without_tokens_change_neither_the_step_nor_its_collectives(prepare: Any, expert: int) -> None:
    batches = make_batches(8, 2)
    strategy = {"parallel": ParallelConfig(expert_parallel_size=expert)}
    results = run_on_ranks(4, fit, batches, strategy, None, None, None, True, prepare, timeout_s=40)
    expected = train_alone(batches, prepare=prepare)
    for result in results:
        assert result["gradients"][0].keys() == expected["gradients"][0].keys()  # zero and not None
        assert_same_training(result, expected)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_rank_without_any_valid_label_and_a_micro_batch_without_any(accumulate: int) -> None:
    batches = make_batches(4, 2 * accumulate)
    for batch in batches:
        batch["labels"][:2] = -100  # rank 0
    batches[0]["labels"][:] = -100  # everywhere
    results = run_on_ranks(2, fit, batches, {}, None, {"accumulate_grad_batches": accumulate})
    for result in results:
        assert_same_training(result, train_alone(batches, accumulate=accumulate))


def test_microbatch_normalization_is_the_mean_of_means() -> None:
    from lightning_longmoe.config import BatchConfig

    batches = make_batches(4, 2)
    strategy = {"batch": BatchConfig(normalize="microbatch")}
    ours = run_on_ranks(2, fit, batches, strategy, None, {"accumulate_grad_batches": 2})[0]["gradients"][0]
    single = [train_alone([batch])["gradients"][0] for batch in batches]
    for name, value in ours.items():
        assert float((value - (single[0][name] + single[1][name]) / 2).abs().max()) < 1e-13, name
