"""From the expert ids of every rank to the plan of one layer and forward: one exchange of counts, one device read.

The number of chunks depends on the largest token count of a rank, so that count is gathered first; it stays on the
device, where the chunk of each token is computed from it. Counts are gathered for ``bound`` chunks, a number that all
ranks know; only where more are needed is the exchange done a second time, and the bound stays raised.

With the token counts go E and a checksum of all settings, which decide how large later messages are, and whether a
rank refuses its arguments. On the CPU they are read at once; on a device, where reading would wait for it, when this
rank meets settings for the first time. So are expert ids that do not exist found in the gathered numbers: every rank
raises, none hangs.
"""

from __future__ import annotations

import warnings
import zlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_longmoe.config import PipelinedLLEP
from lightning_longmoe.dispatch.plan import DispatchPlan, Ints, count_chunks, plan_dispatch
from lightning_longmoe.dispatch.tables import RankTables, rank_tables
from lightning_longmoe.dispatch.transport import AllGather, Steps, ToHost
from lightning_longmoe.runtime.ledger import Arena

FIRST_BOUND = 16
_HEADER = 4
_REFUSED = -1
"""In the place of E: the rank refuses its arguments."""


@dataclass(frozen=True)
class Needs:
    """Which gradients at least one rank of the group wants."""

    x: bool = False
    expert_weights: bool = False
    gate_up_proj: bool = False
    down_proj: bool = False
    gate_up_bias: bool = False
    down_bias: bool = False

    def as_bits(self) -> int:
        return sum(flag << i for i, flag in enumerate(vars(self).values()))

    @staticmethod
    def from_bits(bits: int) -> Needs:
        return Needs(*(bool(bits >> i & 1) for i in range(6)))


@dataclass(frozen=True, eq=False)
class LayerPlan:
    """The plan of one layer and forward with what its backward, or a replay, must not take from anywhere else.

    Attributes:
        plan: of the group; the same on every rank.
        tables: this rank's part.
        expert_ids: [N, K] of the first forward.
        needs: gradients wanted in the group.
        most_tokens: N of the rank with the most.
    """

    plan: DispatchPlan
    tables: RankTables
    expert_ids: Tensor
    needs: Needs
    most_tokens: int

    @cached_property
    def bound_rows(self) -> int:
        """Rows that no receive of a chunk exceeds, whatever the router: Ep · K · ceil(N_max / n)."""
        tokens_per_chunk = -(-self.most_tokens // self.plan.chunks)
        return self.plan.ranks * self.expert_ids.size(1) * tokens_per_chunk


class ChunkBound:
    """The number of chunks that counts are gathered for, which grows alike on all ranks, and what they agree on."""

    def __init__(self) -> None:
        self.value = FIRST_BOUND
        self.agreed: set[int] = set()  # checksums of settings that all ranks had in common

    @classmethod
    def of(cls, group: dist.ProcessGroup | None) -> ChunkBound:
        """The bound of calls that share nothing but their group, so that each does not learn it anew."""
        return cls() if group is None else _of_groups.setdefault(group, cls())

    def under(self, config: PipelinedLLEP) -> int:
        return self.value if config.max_chunks is None else min(self.value, config.max_chunks)


_of_groups: WeakKeyDictionary[dist.ProcessGroup, ChunkBound] = WeakKeyDictionary()


def plan_layer(
    arena: Arena,
    rank: int,
    ranks: int,
    expert_ids: Tensor,
    experts: int,
    needs: Needs,
    *,
    config: PipelinedLLEP,
    bound: ChunkBound,
    settings: str = "",
) -> Steps[LayerPlan]:
    """Exchange counts and plan.

    Args:
        arena: books the messages.
        rank, ranks: of this process in the group.
        expert_ids: [N, K] int64 of this rank.
        experts: E of the group.
        needs: gradients that this rank wants.
        config: of the operator; the same on all ranks.
        bound: kept from layer to layer.
        settings: everything else that must be the same on all ranks, in words.

    Raises:
        ValueError: an expert id is out of range on some rank, ranks differ in K, E or settings, or one of them refuses
            its arguments.
        RuntimeError: some ranks want gradients and others want none.
    """
    header = [expert_ids.size(0), expert_ids.size(1), experts, needs.as_bits()]
    while True:
        chunks = bound.under(config)
        message = yield from _gather(arena, ranks, expert_ids, header, chunks, config, bound, settings)
        _check_headers(message[:, :_HEADER])
        most_tokens = int(message[:, 0].max())
        wanted = count_chunks(most_tokens, config)
        if wanted <= chunks:
            break
        bound.value = wanted
    counts = message[:, _HEADER:].reshape(ranks, chunks, experts)[:, :wanted]
    _check_counts(counts, message[:, 0], expert_ids.size(1), experts)
    bits = int(np.bitwise_or.reduce(message[:, 3]))
    plan = plan_dispatch(counts, config=config)
    return LayerPlan(plan, rank_tables(plan, rank), expert_ids, Needs.from_bits(bits), most_tokens)


def tell_refusal(arena: Arena, ranks: int) -> Steps[None]:
    """Take part in the first message, so that the other ranks do not wait for one that refuses its arguments."""
    first = arena.take("counts", (ranks, 3), torch.int64)
    yield AllGather(first, torch.tensor([0, _REFUSED, 0], device=arena.device))
    arena.release(first)


def _agree(arena: Arena, ranks: int, header: list[int], bound: ChunkBound, settings: str) -> Steps[Tensor]:
    """[Ep, 3] int64 on the device: tokens, E and settings of every rank, compared where that costs no wait."""
    experts, checksum = header[2], zlib.crc32(settings.encode())
    first = arena.take("counts", (ranks, 3), torch.int64)
    yield AllGather(first, torch.tensor([header[0], experts, checksum], device=arena.device))
    if ranks == 1 or arena.dry or (arena.device.type != "cpu" and checksum in bound.agreed):
        return first
    _check_agreement(first.tolist(), settings)
    bound.agreed.add(checksum)
    return first


def _check_agreement(rows: list[list[int]], settings: str) -> None:
    refused = [rank for rank, (_, experts, _) in enumerate(rows) if experts == _REFUSED]
    if refused:
        raise ValueError(f"Ranks {refused} of an expert group refused their arguments; their own messages say why.")
    counts = [experts for _, experts, _ in rows]
    if len(set(counts)) > 1:
        raise ValueError(f"The ranks of an expert group must agree on experts of the group; they have {counts}.")
    sums = [checksum for *_, checksum in rows]
    if len(set(sums)) > 1:
        alike = [[rank for rank, other in enumerate(sums) if other == one] for one in dict.fromkeys(sums)]
        raise ValueError(
            f"The ranks of an expert group must be called with the same settings; ranks {' and '.join(map(str, alike))}"
            f" differ. This rank: {settings}."
        )


def _gather(
    arena: Arena,
    ranks: int,
    expert_ids: Tensor,
    header: list[int],
    chunks: int,
    config: PipelinedLLEP,
    bound: ChunkBound,
    settings: str,
) -> Steps[Any]:
    """[Ep, 4 + chunks · E] int32 on the host: header and counts of every rank."""
    experts = header[2]
    first = yield from _agree(arena, ranks, header, bound, settings)
    tokens = first[:, 0]
    message = arena.take("counts", (_HEADER + chunks * experts,), torch.int32)
    for slot, value in zip(message[:_HEADER].unbind(), header, strict=True):
        slot.fill_(value)
    with arena.transient("counts", 5 * expert_ids.numel() * 8 + (chunks + 1) * experts * 8):
        message[_HEADER:] = _count(expert_ids, _chunk_of_token(tokens, header[0], chunks, config), experts, chunks)
    gathered = arena.take("counts", (ranks, message.numel()), torch.int32)
    yield AllGather(gathered, message)
    host = yield ToHost(gathered)  # the one wait for the device in this layer
    arena.release(first, message, gathered)
    return host.astype(np.int64)


def _chunk_of_token(tokens: Tensor, own: int, bound: int, config: PipelinedLLEP) -> Tensor:
    """[N] t mod n; chunks past the bound count as one. n is known to the device alone."""
    chunks = tokens.max().add(config.tokens_per_chunk - 1).floor_divide(config.tokens_per_chunk)
    chunks = chunks.clamp(1, config.max_chunks)
    return torch.arange(own, device=tokens.device).remainder(chunks).clamp(max=bound)


def _count(expert_ids: Tensor, chunk_of_token: Tensor, experts: int, chunks: int) -> Tensor:
    """[chunks · E] int64 rows; ids out of range are left out. Not bincount: that one waits for the device."""
    cells = chunk_of_token.unsqueeze(1) * experts + expert_ids
    cells = cells.where((expert_ids >= 0) & (expert_ids < experts), chunks * experts).reshape(-1)
    counts = cells.new_zeros((chunks + 1) * experts)
    return counts.scatter_add_(0, cells, torch.ones_like(cells))[: chunks * experts]


def _check_headers(headers: Ints) -> None:
    for column, name in ((1, "experts a token"), (2, "experts of the group")):
        values = headers[:, column]
        if (values != values[0]).any():
            raise ValueError(f"The ranks of an expert group must agree on {name}; they have {values.tolist()}.")
    wants = headers[:, 3] != 0
    if wants.any() and not wants.all():
        raise RuntimeError(
            f"Ranks {np.flatnonzero(wants).tolist()} of an expert group want gradients of a layer and ranks"
            f" {np.flatnonzero(~wants).tolist()} want none (no_grad, or all of its inputs frozen): the backward would"
            " hang. Run the layer the same way on all ranks."
        )


def _check_counts(counts: Ints, tokens: Ints, top_k: int, experts: int) -> None:
    chunks = counts.shape[1]
    expected = (tokens[:, None] - np.arange(chunks) + chunks - 1) // chunks * top_k
    wrong = (counts.sum(2) != expected).any(1)
    if wrong.any():
        raise ValueError(f"Ranks {np.flatnonzero(wrong).tolist()} have expert ids outside 0 to {experts - 1}.")


_said: set[PipelinedLLEP] = set()
"""Configs whose ceiling was reported. With `_of_groups` the global state of this room: calls share nothing else."""


def say_when_the_ceiling_binds(plan: LayerPlan, config: PipelinedLLEP, row_bytes: int) -> None:
    """Warn, once for each config, when ``max_chunks`` makes chunks larger than ``tokens_per_chunk``."""
    tokens = -(-plan.most_tokens // plan.plan.chunks)
    if tokens <= config.tokens_per_chunk or config in _said:
        return
    _said.add(config)
    top_k = plan.expert_ids.size(1)
    asked, given = (n * top_k * row_bytes / 2**20 for n in (config.tokens_per_chunk, tokens))
    warnings.warn(
        f"PipelinedLLEP: max_chunks={config.max_chunks} makes chunks of {tokens} tokens out of {plan.most_tokens}, more"
        f" than tokens_per_chunk={config.tokens_per_chunk}: buffers of {given:.1f} MiB instead of {asked:.1f} MiB."
        " max_chunks=None lifts the ceiling."
    )
