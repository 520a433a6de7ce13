"""Which attention modules are given attention over a context group, and of which kind.

A module takes part by an attribute ``context_attention``, None until it is set: a function of query [B, Hq, N, D], key
and value [B, Hk, N, D], and ``document_ids`` [B, N] or None, that returns [B, Hq, N, Dv]. It also tells its
``num_heads`` and ``num_kv_heads``. Our `Attention` does; so may a user's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor, nn

from lightning_longmoe.config import ContextConfig
from lightning_longmoe.context.attention import context_attention
from lightning_longmoe.context.order import Kind, arrange
from lightning_longmoe.context.ulysses import check_heads

if TYPE_CHECKING:
    from lightning_longmoe.layout import Layout

SLOT = "context_attention"


@dataclass(frozen=True)
class ContextChoice:
    """How sequences are split in a run.

    Attributes:
        size: context ranks.
        kind: of the attention.
        ulysses_size: lanes of a hybrid; None else.
        why: in words.
    """

    size: int
    kind: Kind
    ulysses_size: int | None
    why: str


class ContextCall:
    """What a module's slot holds: causal attention over the group."""

    def __init__(self, group: dist.ProcessGroup, choice: ContextChoice) -> None:
        self.group, self.choice = group, choice

    def __deepcopy__(self, memo: dict[int, object]) -> ContextCall:
        return self

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, document_ids: Tensor | None = None) -> Tensor:
        return context_attention(
            query,
            key,
            value,
            group=self.group,
            kind=self.choice.kind,
            ulysses_size=self.choice.ulysses_size,
            document_ids=document_ids,
        )


def attentions(module: nn.Module) -> dict[str, nn.Module]:
    """Modules with a slot, by qualified name."""
    return {name: child for name, child in module.named_modules() if hasattr(child, SLOT)}


def choose_context(module: nn.Module, config: ContextConfig, layout: Layout) -> ContextChoice | None:
    """The kind for all attention modules of ``module``; None where sequences stay whole.

    Raises:
        ValueError: sequences are to be split and no module can take part, or the kind does not fit their heads.
    """
    size = layout.context_size
    if size == 1:
        return None
    found = attentions(module)
    if not found:
        raise ValueError(
            f"ParallelConfig(context_parallel_size={size}) splits sequences, and the module has no attention that sees"
            " over ranks. Use lightning_longmoe's CausalLMModule or Attention, or give your attention an attribute"
            " `context_attention = None` (with `num_heads` and `num_kv_heads`) and call it where it is set; or use"
            " context_parallel_size=1."
        )
    heads = [(int(child.num_heads), int(child.num_kv_heads)) for child in found.values()]  # type: ignore[arg-type]
    if config.kind == "auto":
        return _choose(size, math.gcd(size, layout.ranks_per_node), heads)
    lanes = None if config.ulysses_size == "auto" else config.ulysses_size
    arrangement = arrange(size, config.kind, lanes)
    for query, kv in heads:
        check_heads(query, kv, arrangement.lanes)
    return ContextChoice(size, config.kind, arrangement.lanes if config.kind == "hybrid" else None, "as configured")


def _choose(size: int, in_node: int, heads: list[tuple[int, int]]) -> ContextChoice:
    fitting = [lanes for lanes in range(1, in_node + 1) if in_node % lanes == 0 and _fits(lanes, heads)]
    lanes = max(fitting)
    if lanes == size:
        return ContextChoice(size, "ulysses", None, f"auto: {size} ranks of one node, and heads for each")
    if lanes > 1:
        return ContextChoice(size, "hybrid", lanes, f"auto: heads for {lanes} ranks of a node, a ring over the rest")
    return ContextChoice(size, "ring", None, "auto: heads cannot be dealt out over ranks of one node")


def _fits(lanes: int, heads: list[tuple[int, int]]) -> bool:
    """Whether heads can be dealt out without copies of key/value heads."""
    try:
        for query, kv in heads:
            check_heads(query, kv, lanes)
    except ValueError:
        return False
    return all(kv % lanes == 0 for _, kv in heads)


def connect_context(module: nn.Module, choice: ContextChoice | None, group: dist.ProcessGroup | None) -> list[str]:
    """Fill all slots; returns the names of the modules."""
    found = attentions(module)
    for child in found.values():
        setattr(child, SLOT, None if choice is None or group is None else ContextCall(group, choice))
    return list(found)
