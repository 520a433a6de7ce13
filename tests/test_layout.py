"""Groups of ranks as plain arithmetic."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest

from lightning_longmoe.config import ParallelConfig
from lightning_longmoe.layout import KINDS, MESHES, Layout, plan_layout


def _plan(world_size: int, ranks_per_node: int = 8, experts: tuple[int, ...] = (), **sizes: Any) -> Layout:
    vocab_size = sizes.pop("vocab_size", None)
    parallel = ParallelConfig(**sizes)
    return plan_layout(
        parallel,
        world_size=world_size,
        ranks_per_node=ranks_per_node,
        expert_counts=experts,
        vocab_size=vocab_size,
    )


SIXTEEN = {
    "replicate_size": 2,
    "expert_parallel_size": 4,
    "context_parallel_size": 2,
    "vocabulary_parallel_size": 8,
}


def test_a_world_of_one_rank_has_groups_of_one() -> None:
    layout = _plan(1, experts=(8,))
    assert all(layout.size(kind) == 1 and layout.groups(kind) == [(0,)] for kind in KINDS)
    assert layout.coordinates(0) == (0,) * 8


def test_groups_of_sixteen_ranks() -> None:
    layout = _plan(16, experts=(12, 4), **SIXTEEN)
    assert layout.groups("shard") == [tuple(range(8)), tuple(range(8, 16))]
    assert layout.groups("replicate") == [(rank, rank + 8) for rank in range(8)]
    assert layout.groups("expert") == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11), (12, 13, 14, 15)]
    assert layout.groups("expert_shard") == [(0, 4), (1, 5), (2, 6), (3, 7), (8, 12), (9, 13), (10, 14), (11, 15)]
    assert layout.groups("context") == [(rank, rank + 1) for rank in range(0, 16, 2)]
    assert layout.groups("data") == [tuple(range(0, 16, 2)), tuple(range(1, 16, 2))]
    assert layout.groups("vocabulary") == layout.groups("shard")
    assert (layout.data_size, layout.expert_shard_size, layout.vocabulary_shard_size) == (8, 2, 1)


def test_coordinates_of_one_rank() -> None:
    where = _plan(16, experts=(4,), **SIXTEEN).coordinates(13)
    assert (where.replicate, where.shard) == (1, 5)
    assert (where.expert_shard, where.expert) == (1, 1)
    assert (where.vocabulary_shard, where.vocabulary) == (0, 5)
    assert (where.data, where.context) == (6, 1)


@pytest.mark.parametrize(("world_size", "ranks_per_node"), [(1, 1), (6, 3), (8, 8), (16, 8), (24, 8)])
def test_every_rank_is_in_one_group_of_each_kind_at_its_own_index(world_size: int, ranks_per_node: int) -> None:
    divisors = [size for size in range(1, world_size + 1) if world_size % size == 0]
    for replicate, context in itertools.product(divisors, divisors):
        layout = _plan(
            world_size, ranks_per_node, experts=(48,), replicate_size=replicate, context_parallel_size=context
        )
        for kind in KINDS:
            groups = layout.groups(kind)
            assert sorted(rank for group in groups for rank in group) == list(range(world_size))
            for group in groups:
                for index, rank in enumerate(group):
                    assert layout.coordinates(rank)._asdict()[kind] == index
                    assert layout.ranks_of(kind, rank) == group


def test_rank_order_is_row_major_on_every_mesh() -> None:
    layout = _plan(16, experts=(4,), **SIXTEEN)
    for mesh, axes in layout.meshes().items():
        assert tuple(axes) == MESHES[mesh]
        assert math.prod(axes.values()) == 16
        for rank, indices in enumerate(itertools.product(*(range(size) for size in axes.values()))):
            where = layout.coordinates(rank)._asdict()
            assert tuple(where[axis] for axis in axes) == indices


def test_ranks_of_one_context_group_share_their_data() -> None:
    layout = _plan(8, context_parallel_size=4)
    assert [layout.coordinates(rank).data for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [layout.coordinates(rank).context for rank in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3]


def test_a_context_group_may_reach_over_replicas() -> None:
    layout = _plan(4, replicate_size=4, context_parallel_size=2)
    assert layout.groups("context") == [(0, 1), (2, 3)]
    assert layout.groups("shard") == [(0,), (1,), (2,), (3,)]


@pytest.mark.parametrize(
    ("world_size", "ranks_per_node", "experts", "replicate", "expected"),
    [
        (8, 8, (), 1, 1),
        (8, 8, (64,), 1, 8),
        (8, 8, (12,), 1, 4),
        (8, 8, (12, 6), 1, 2),
        (16, 8, (64,), 1, 8),
        (16, 8, (64,), 4, 4),
        (6, 3, (8,), 1, 1),
        (2, 8, (3,), 1, 1),
        (2, 8, (8,), 1, 2),
    ],
)
def test_auto_expert_size_is_the_largest_common_divisor(
    world_size: int, ranks_per_node: int, experts: tuple[int, ...], replicate: int, expected: int
) -> None:
    assert _plan(world_size, ranks_per_node, experts, replicate_size=replicate).expert_size == expected


def test_auto_vocabulary_size_is_a_node_within_one_replica() -> None:
    assert _plan(16).vocabulary_size == 8
    assert _plan(16, replicate_size=8).vocabulary_size == 2
    assert _plan(6, 3, replicate_size=3).vocabulary_size == 1
    assert _plan(8, vocab_size=5).vocabulary_size == 4


def test_groups_of_different_meshes_overlap() -> None:
    layout = _plan(4, experts=(8,), expert_parallel_size=4, context_parallel_size=4, vocabulary_parallel_size=4)
    assert layout.groups("expert") == layout.groups("context") == layout.groups("vocabulary") == [(0, 1, 2, 3)]


@pytest.mark.parametrize(
    ("world_size", "experts", "sizes", "texts"),
    [
        (2, (8,), {"expert_parallel_size": 3}, ["expert_parallel_size=3", "world_size 2", "[8]", "sizes that fit: 2."]),
        (2, (3,), {"expert_parallel_size": 2}, ["expert_parallel_size=2", "[3]", "sizes that fit: 1."]),
        (8, (8, 12), {"expert_parallel_size": 8}, ["[8, 12]", "sizes that fit: 4."]),
        (4, (8,), {"expert_parallel_size": 8}, ["expert_parallel_size=8", "world_size 4", "sizes that fit: 4."]),
        (8, (8,), {"expert_parallel_size": 8, "replicate_size": 2}, ["8 / replicate_size 2 = 4", "that fit: 4."]),
        (8, (), {"replicate_size": 3}, ["replicate_size=3", "the world size (8)", "sizes that fit: 2 and 4."]),
        (2, (), {"replicate_size": 4}, ["replicate_size=4", "world_size=2", "sizes that fit: 2."]),
        (6, (), {"context_parallel_size": 4}, ["context_parallel_size=4", "sizes that fit: 3 and 6."]),
        (1, (), {"context_parallel_size": 2}, ["context_parallel_size=2", "world_size=1", "sizes that fit: 1."]),
        (8, (), {"vocabulary_parallel_size": 3}, ["vocabulary_parallel_size=3", "sizes that fit: 2 and 4."]),
    ],
)
def test_a_size_that_does_not_fit_is_refused_with_numbers_rule_and_nearest_sizes(
    world_size: int, experts: tuple[int, ...], sizes: dict[str, int], texts: list[str]
) -> None:
    with pytest.raises(ValueError, match="must divide") as caught:
        _plan(world_size, experts=experts, **sizes)
    message = str(caught.value)
    assert [text for text in texts if text not in message] == []
    assert f"Given: world_size={world_size}, ranks_per_node={min(8, world_size)}, replicate_size=" in message
    assert f"experts={sorted(experts)}" in message


def test_impossible_worlds_and_models_are_refused() -> None:
    with pytest.raises(ValueError, match="12 ranks cannot be 8 on every node"):
        _plan(12)
    with pytest.raises(ValueError, match="0 ranks cannot be"):
        _plan(0)
    with pytest.raises(ValueError, match="experts .* at least 1"):
        _plan(2, experts=(0,))
    with pytest.raises(ValueError, match="no group 'node'"):
        _plan(2).groups("node")
    with pytest.raises(ValueError, match="rank=2 is not in this world of 2"):
        _plan(2).coordinates(2)


def test_the_table_names_the_ranks_of_each_group() -> None:
    rows = {name: (size, who) for name, size, who in _plan(16, experts=(4,), **SIXTEEN).table()}
    assert rows["shard"] == ("8", "0-7 | 8-15")
    assert rows["expert"] == ("4", "0-3 | 4-7 | 8-11 | 12-15")
    assert rows["replicate"] == ("2", "0,8 | 1,9 | 2,10 | 3,11 | ... (8 groups)")
    assert rows["data"] == ("8", "0,2,..,14 | 1,3,..,15")
    assert set(rows) == set(KINDS)


def test_layouts_of_equal_sizes_are_equal_and_hashable() -> None:
    assert len({_plan(8), _plan(8), _plan(8, context_parallel_size=2)}) == 2
