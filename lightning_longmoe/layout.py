"""Which ranks form which groups, from the world size and the sizes asked for. Pure arithmetic, no process group.

Ranks are laid out along *axes*. A *mesh* is an ordered list of axes whose sizes multiply to the world size; the last
varies fastest, so that its groups are neighbours, as a rule on one node. Four meshes lie over the same ranks
(`Layout.meshes`) and their groups overlap; sizes of different meshes are not multiplied with each other.

============  =============================================  ========================================================
mesh          axes, outermost first                          what it is for
============  =============================================  ========================================================
"dense"       replicate, shard                               parameters: sharded within ``shard``, copied between
"expert"      replicate, expert_shard, expert                experts: spread over ``expert``, each sharded further
"vocabulary"  replicate, vocabulary_shard, vocabulary        rows of the vocabulary projection, likewise
"batch"       data, context                                  sequences: other ones per ``data``, parts per ``context``
============  =============================================  ========================================================

Glossary: a *group of an axis* is a set of ranks that differ in their index on that axis only. Ranks of one ``context``
group hold parts of the same sequences, so they share a data index, which is what a sampler is asked with.

A context group may reach over two replicas (``replicate_size=4, context_parallel_size=2`` on four ranks: copies of a
small model, with long sequences): gradients are averaged over all ranks anyway. Expert and vocabulary groups may not:
they hold one copy of a parameter together, and each replica has its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lightning_longmoe.config import ParallelConfig

MESHES: dict[str, tuple[str, ...]] = {
    "dense": ("replicate", "shard"),
    "expert": ("replicate", "expert_shard", "expert"),
    "vocabulary": ("replicate", "vocabulary_shard", "vocabulary"),
    "batch": ("data", "context"),
}
KINDS: dict[str, str] = {axis: mesh for mesh, axes in reversed(MESHES.items()) for axis in axes}
"""Each kind of group, and a mesh of which it is an axis."""

_MOST_GROUPS_SHOWN = 4
_MOST_RANKS_SHOWN = 4


class Coordinates(NamedTuple):
    """The index of one rank on every axis."""

    replicate: int
    shard: int
    expert_shard: int
    expert: int
    vocabulary_shard: int
    vocabulary: int
    data: int
    context: int


@dataclass(frozen=True)
class Layout:
    """Sizes of all groups of one world; made by `plan_layout`, which checks them."""

    world_size: int
    ranks_per_node: int
    replicate_size: int
    """Copies of the sharded model."""
    shard_size: int
    """Ranks that share one copy of the parameters."""
    expert_size: int
    """Ranks that hold all experts once."""
    context_size: int
    """Ranks that share the same sequences."""
    vocabulary_size: int
    """Ranks that hold the vocabulary projection once."""

    @property
    def data_size(self) -> int:
        """Context groups: how many ranks' worth of different data there is."""
        return self.world_size // self.context_size

    @property
    def expert_shard_size(self) -> int:
        """Ranks of one replica that hold the same experts, each of them a part."""
        return self.shard_size // self.expert_size

    @property
    def vocabulary_shard_size(self) -> int:
        """Ranks of one replica that hold the same rows of the vocabulary projection, each of them a part."""
        return self.shard_size // self.vocabulary_size

    def size(self, kind: str) -> int:
        """Ranks in a group of ``kind`` (one of `KINDS`)."""
        if kind not in KINDS:
            raise ValueError(f"There is no group {kind!r}. Choose one of {sorted(KINDS)}.")
        return getattr(self, f"{kind}_size")

    def meshes(self) -> dict[str, dict[str, int]]:
        """Axes and sizes of every mesh, outermost axis first: rank order is row-major order."""
        return {mesh: {axis: self.size(axis) for axis in axes} for mesh, axes in MESHES.items()}

    def coordinates(self, rank: int) -> Coordinates:
        """Where ``rank`` is on every axis."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank={rank} is not in this world of {self.world_size} ranks.")
        return Coordinates(**{kind: self._index(kind, rank) for kind in KINDS})

    def ranks_of(self, kind: str, rank: int) -> tuple[int, ...]:
        """The ranks of that group of ``kind`` which holds ``rank``, in the order of their index in the group."""
        stride = self._stride(kind)
        first = rank - stride * self._index(kind, rank)
        return tuple(range(first, first + stride * self.size(kind), stride))

    def groups(self, kind: str) -> list[tuple[int, ...]]:
        """All groups of ``kind``, sorted: every rank is in exactly one."""
        firsts = (rank for rank in range(self.world_size) if self._index(kind, rank) == 0)
        return [self.ranks_of(kind, rank) for rank in firsts]

    def table(self) -> list[tuple[str, str, str]]:
        """Rows of (name, size, who) for the start-up table, such as ``("expert", "8", "0-7 | 8-15")``."""
        return [(kind, str(self.size(kind)), _describe_groups(self.groups(kind))) for kind in Coordinates._fields]

    def _index(self, kind: str, rank: int) -> int:
        return rank // self._stride(kind) % self.size(kind)

    def _stride(self, kind: str) -> int:
        """How far apart neighbours of one group are: the sizes of the axes further inside, multiplied."""
        self.size(kind)  # names the kinds if this is none
        axes = MESHES[KINDS[kind]]
        return math.prod(self.size(axis) for axis in axes[axes.index(kind) + 1 :])


def _describe_groups(groups: list[tuple[int, ...]]) -> str:
    shown = " | ".join(_describe_ranks(ranks) for ranks in groups[:_MOST_GROUPS_SHOWN])
    return shown + (f" | ... ({len(groups)} groups)" if len(groups) > _MOST_GROUPS_SHOWN else "")


def _describe_ranks(ranks: tuple[int, ...]) -> str:
    if len(ranks) > 1 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"{ranks[0]}-{ranks[-1]}"
    if len(ranks) > _MOST_RANKS_SHOWN:
        return f"{ranks[0]},{ranks[1]},..,{ranks[-1]}"
    return ",".join(map(str, ranks))


def plan_layout(
    parallel: ParallelConfig,
    *,
    world_size: int,
    ranks_per_node: int,
    expert_counts: Sequence[int] = (),
    vocab_size: int | None = None,
) -> Layout:
    """Check the sizes of ``parallel`` against the world and the model, and resolve every "auto".

    "auto" expert parallelism is the largest size that divides every expert count, the ranks of a node and the ranks
    that share one copy of the model; 1 without experts. "auto" vocabulary parallelism is the largest size that divides
    both numbers of ranks and leaves no rank without a row of the vocabulary.

    Args:
        parallel: the sizes asked for.
        world_size: ranks of the world.
        ranks_per_node: ranks of one node; a world smaller than a node counts as one node.
        expert_counts: experts of each MoE layer; empty where there are none.
        vocab_size: rows of the vocabulary projection; None where unknown.

    Raises:
        ValueError: a size does not fit; the text holds all numbers, the rule, and the nearest sizes that would fit.
    """
    ranks_per_node = min(ranks_per_node, world_size)
    given = _describe_given(parallel, world_size, ranks_per_node, expert_counts, vocab_size)
    _check_world(world_size, ranks_per_node, expert_counts, vocab_size, given)
    world = f"the world size ({world_size})"
    _check_divides("replicate_size", parallel.replicate_size, {world: [world_size]}, given)
    _check_divides("context_parallel_size", parallel.context_parallel_size, {world: [world_size]}, given)
    shard_size = world_size // parallel.replicate_size
    shard = {
        f"the ranks that share one copy of the model (world_size {world_size} / replicate_size"
        f" {parallel.replicate_size} = {shard_size})": [shard_size]
    }
    expert_size = _expert_size(parallel, shard_size, ranks_per_node, expert_counts)
    experts = {f"every layer's number of experts {sorted(set(expert_counts))}": list(expert_counts)}
    _check_divides("expert_parallel_size", expert_size, {**shard, **(experts if expert_counts else {})}, given)
    vocabulary_size = _vocabulary_size(parallel, shard_size, ranks_per_node, vocab_size)
    _check_divides("vocabulary_parallel_size", vocabulary_size, shard, given)
    return Layout(
        world_size=world_size,
        ranks_per_node=ranks_per_node,
        replicate_size=parallel.replicate_size,
        shard_size=shard_size,
        expert_size=expert_size,
        context_size=parallel.context_parallel_size,
        vocabulary_size=vocabulary_size,
    )


def _expert_size(parallel: ParallelConfig, shard_size: int, ranks_per_node: int, expert_counts: Sequence[int]) -> int:
    if isinstance(parallel.expert_parallel_size, int):
        return parallel.expert_parallel_size
    return math.gcd(shard_size, ranks_per_node, *expert_counts) if expert_counts else 1


def _vocabulary_size(parallel: ParallelConfig, shard_size: int, ranks_per_node: int, vocab_size: int | None) -> int:
    if isinstance(parallel.vocabulary_parallel_size, int):
        return parallel.vocabulary_parallel_size
    most = shard_size if vocab_size is None else vocab_size
    return max(size for size in _divisors(math.gcd(ranks_per_node, shard_size)) if size <= most)


def _describe_given(
    parallel: ParallelConfig, world_size: int, ranks_per_node: int, expert_counts: Sequence[int], vocab_size: int | None
) -> str:
    return (
        f"Given: world_size={world_size}, ranks_per_node={ranks_per_node}, replicate_size={parallel.replicate_size},"
        f" expert_parallel_size={parallel.expert_parallel_size},"
        f" context_parallel_size={parallel.context_parallel_size},"
        f" vocabulary_parallel_size={parallel.vocabulary_parallel_size}, experts={sorted(set(expert_counts))},"
        f" vocab_size={vocab_size}."
    )


def _check_world(
    world_size: int, ranks_per_node: int, expert_counts: Sequence[int], vocab_size: int | None, given: str
) -> None:
    if world_size < 1 or ranks_per_node < 1 or world_size % ranks_per_node:
        raise ValueError(
            f"{world_size} ranks cannot be {ranks_per_node} on every node: both must be at least 1, and the ranks of a"
            f" node must divide the world size. {given}"
        )
    if any(count < 1 for count in expert_counts) or (vocab_size is not None and vocab_size < 1):
        raise ValueError(f"Every number of experts and the vocabulary's size must be at least 1. {given}")


def _check_divides(name: str, size: int, rules: dict[str, list[int]], given: str) -> None:
    """Raise unless ``size`` divides all numbers of all rules. A rule: what the numbers are, and the numbers."""
    numbers = [number for rule in rules.values() for number in rule]
    if all(number % size == 0 for number in numbers):
        return
    fitting = _divisors(math.gcd(*numbers))
    nearest = [max(fit for fit in fitting if fit < size), *[fit for fit in fitting if fit > size][:1]]
    raise ValueError(
        f"{name}={size} does not fit: it must divide {' and '.join(rules)}."
        f" Nearest sizes that fit: {' and '.join(map(str, nearest))}. {given}"
    )


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
