"""Spreading a module's vocabulary over ranks: heads, embeddings tied to them, and embeddings of the same vocabulary.

A *family* is one weight [V, H] with all modules that use it. Its rows become a ``Shard(0)`` DTensor on the vocabulary
mesh, so that no rank gathers the whole weight, for the loss or for the lookup. Where ranks are left over, an untied
weight is sharded further with FSDP2; a tied one is copied, since FSDP2 knows no unit of two modules that run apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from lightning_longmoe import _compat
from lightning_longmoe.config import RingDTP
from lightning_longmoe.models.head import CausalLMHead
from lightning_longmoe.runtime.meshes import Meshes
from lightning_longmoe.vocabulary.projection import (
    RingProjection,
    is_taken_over,
    take_over_embedding,
    why_not_taken_over,
)
from lightning_longmoe.vocabulary.ring import warm_up
from lightning_longmoe.vocabulary.spans import VocabularySplit

Setting = RingDTP | Literal["auto"] | None


@dataclass(frozen=True, eq=False)
class Family:
    """One weight over the vocabulary, and the modules that use it.

    Attributes:
        vocab_size: V.
        heads: by qualified name; empty for an embedding that only has the vocabulary of some head.
        embeddings: by qualified name.
        refusal: why the weight must stay whole; None where it need not.
    """

    vocab_size: int
    heads: dict[str, CausalLMHead]
    embeddings: dict[str, nn.Embedding]
    refusal: str | None

    @property
    def tied(self) -> bool:
        return len(self.heads) + len(self.embeddings) > 1

    @property
    def names(self) -> list[str]:
        return [*self.heads, *self.embeddings]


def find_families(module: nn.Module) -> list[Family]:
    """Families whose weights nobody has sharded yet: those of heads, then embeddings of the same vocabularies."""
    owners: dict[int, dict[str, nn.Module]] = {}
    for name, child in module.named_modules():
        for parameter in child._parameters.values():
            if parameter is not None and not isinstance(parameter, DTensor):
                owners.setdefault(id(parameter), {})[name] = child
    of_weights = [
        owners[id(child.weight)]
        for child in module.modules()
        if isinstance(child, (CausalLMHead, nn.Embedding)) and id(child.weight) in owners
    ]
    families = [_family(users) for users in {id(users): users for users in of_weights}.values()]
    with_heads = [family for family in families if family.heads]
    vocabularies = {family.vocab_size for family in with_heads if family.refusal is None}
    return with_heads + [
        family
        for family in families
        if not family.heads and family.vocab_size in vocabularies and family.refusal is None
    ]


def _family(users: dict[str, nn.Module]) -> Family:
    heads = {name: child for name, child in users.items() if isinstance(child, CausalLMHead)}
    embeddings = {name: child for name, child in users.items() if isinstance(child, nn.Embedding)}
    sizes = {child.vocab_size for child in heads.values()} | {child.num_embeddings for child in embeddings.values()}
    others = [name for name in users if name not in heads and name not in embeddings]
    refusal = None
    if others:
        refusal = f"{others[0]!r} uses its weight as well"
    for name, embedding in embeddings.items():
        if _compat.plain_class(embedding).forward is not nn.Embedding.forward:
            refusal = f"{name!r} has a forward of its own"
        elif why_not_taken_over(embedding) is not None:
            refusal = f"{name!r}: {why_not_taken_over(embedding)}"
    return Family(max(sizes), heads, embeddings, refusal)


def vocabulary_size(module: nn.Module) -> int | None:
    """V of the smallest vocabulary that is spread or can be; None without any."""
    free = [family.vocab_size for family in find_families(module) if family.refusal is None]
    heads = [child for child in module.modules() if isinstance(child, CausalLMHead)]
    taken = [head.vocab_size for head in heads if head.projection is not None]
    return min([*free, *taken], default=None)


def refuse_setting(module: nn.Module, setting: Setting, size: int | Literal["auto"], world_size: int) -> None:
    """Raise ValueError for a config that cannot apply to this module, before any group is made.

    Args:
        module: before sharding, or as an earlier run left it.
        setting: the strategy's ``vocabulary``.
        size: ``ParallelConfig.vocabulary_parallel_size``.
        world_size: of all ranks.
    """
    spread = size != "auto" and size > 1
    if setting is None and spread:
        raise ValueError(
            f"ParallelConfig(vocabulary_parallel_size={size}) cannot apply with vocabulary=None, which keeps the"
            " projection whole. Use vocabulary='auto' or RingDTP(...), or vocabulary_parallel_size='auto'."
        )
    if vocabulary_size(module) is None and (spread or isinstance(setting, RingDTP)):
        what = "vocabulary=RingDTP(...)" if isinstance(setting, RingDTP) else f"vocabulary_parallel_size={size}"
        refusals = [f"{family.names[0]!r}: {family.refusal}" for family in find_families(module)]
        why = "; ".join(refusals) or "it has no CausalLMHead that `configure_model` left unsharded"
        raise ValueError(f"{what} cannot apply to this module: {why}. Use vocabulary='auto' or None.")
    if isinstance(setting, RingDTP) and size == 1 and world_size > 1:
        raise ValueError(
            "vocabulary=RingDTP(...) cannot apply with ParallelConfig(vocabulary_parallel_size=1): there is no ring of"
            " one rank among several. Use a larger size or 'auto', or vocabulary='auto' or None."
        )


def spread_vocabulary(
    module: nn.Module,
    meshes: Meshes,
    setting: Setting,
    lookup_dtype: Callable[[torch.dtype], torch.dtype | None],
) -> tuple[str, list[tuple[str, str, str]]]:
    """Leave each rank its rows of every family, and connect heads and embeddings to the ring.

    Args:
        module: changed in place.
        meshes: the groups; without a vocabulary mesh the weights stay as they are.
        setting: an explicit config applies in a world of one rank too.
        lookup_dtype: from the dtype of a weight outside of FSDP2 to that of the rows that its lookup returns.

    Returns:
        what "auto" came to, and rows for the start-up table.
    """
    families = find_families(module)
    heads = [name for name, child in module.named_modules() if isinstance(child, CausalLMHead)]
    alone = meshes.layout.world_size == 1 and isinstance(setting, RingDTP)
    if meshes.vocabulary is None and not alone:
        reason = "vocabulary=None" if setting is None else _why_auto_is_off(meshes, families, heads)
        return "plain", [("vocabulary", join_names(heads), f"plain: whole on each rank ({reason})")] if heads else []
    config = setting if isinstance(setting, RingDTP) else RingDTP()
    rows = []
    taken = [family for family in families if family.refusal is None]
    for family in taken:
        _connect(family, meshes, config, lookup_dtype)
    names = [name for family in taken for name in family.names]
    size = meshes.layout.vocabulary_size
    where = "on one rank" if meshes.vocabulary is None else f"over {size} ranks{_rest(meshes, taken)}"
    why = "auto: there is a head and more than one rank" if setting == "auto" else "as configured"
    tiles = f"tiles of {config.token_tile} tokens x {config.vocab_tile} rows"
    rows.append(("vocabulary", join_names(names), f"RingDTP {where} ({why}): mode {config.mode}, {tiles}"))
    rows += [("vocabulary", join_names(f.names), f"plain: {f.refusal}") for f in families if f.refusal is not None]
    if meshes.vocabulary is not None:
        on_cpu = meshes.vocabulary.device_type == "cpu"
        device = torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())
        warm_up(meshes.vocabulary.get_group(), device)
    return "RingDTP", rows


def _why_auto_is_off(meshes: Meshes, families: list[Family], heads: list[str]) -> str:
    refusals = [family.refusal for family in families if family.refusal is not None]
    if meshes.layout.world_size == 1:
        return "auto: one rank"
    if refusals:
        return f"auto: {refusals[0]}"
    if heads and not families:
        return "auto: `configure_model` sharded it already"
    return "auto: vocabulary parallel size 1"


def _rest(meshes: Meshes, families: list[Family]) -> str:
    if meshes.vocabulary_shard is None:
        return ""
    how = "copied" if all(family.tied for family in families) else "sharded with FSDP2"
    return f", {how} over the other {meshes.layout.vocabulary_shard_size}"


def _connect(
    family: Family, meshes: Meshes, config: RingDTP, lookup_dtype: Callable[[torch.dtype], torch.dtype | None]
) -> None:
    mesh = meshes.vocabulary
    group = None if mesh is None else mesh.get_group()
    for head in family.heads.values():
        head.projection = RingProjection(group, family.vocab_size, config)
    if mesh is None:
        return
    scale = 1.0 / mesh.size()
    users: list[nn.Module] = [*family.heads.values(), *family.embeddings.values()]
    weight = _own_rows(users[0].weight, mesh)  # type: ignore[arg-type]
    for user in users:
        user.weight = weight
    for head in family.heads.values():
        head.gradient_scale = scale
        if head.bias is not None:
            head.bias = _own_rows(head.bias, mesh)
    outside = meshes.vocabulary_shard is None or family.tied
    for embedding in family.embeddings.values():
        dtype = lookup_dtype(weight.dtype) if outside else None
        take_over_embedding(embedding, group, gradient_scale=scale, dtype=dtype)


def _own_rows(parameter: nn.Parameter, mesh: DeviceMesh) -> nn.Parameter:
    """This rank's rows as a DTensor of the whole; the last ranks may have fewer, or none."""
    split = VocabularySplit(parameter.size(0), mesh.size())
    rank = mesh.get_local_rank()
    start = split.start(rank)
    local = parameter.detach()[start : start + split.rows(rank)].clone()
    rows = DTensor.from_local(
        local, mesh, [Shard(0)], run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
    return nn.Parameter(rows, requires_grad=parameter.requires_grad)


def spread_modules(module: nn.Module) -> list[nn.Module]:
    """Heads and embeddings whose rows are spread."""
    return [
        child
        for child in module.modules()
        if (isinstance(child, CausalLMHead) and child.projection is not None and isinstance(child.weight, DTensor))
        or (isinstance(child, nn.Embedding) and is_taken_over(child))
    ]


def vocabulary_outside(module: nn.Module, meshes: Meshes) -> list[nn.Parameter]:
    """Spread parameters that stay out of ``fully_shard``: the ring is the whole shard group, or the weight is tied."""
    if meshes.vocabulary is None:
        return []
    spread = spread_modules(module)
    users: dict[int, int] = {}
    for child in spread:
        users[id(child.weight)] = users.get(id(child.weight), 0) + 1
    chosen = [
        parameter
        for child in spread
        for parameter in child.parameters(recurse=False)
        if meshes.vocabulary_shard is None or users[id(child.weight)] > 1
    ]
    return list({id(parameter): parameter for parameter in chosen}.values())


def vocabulary_placement(shards: int) -> Callable[[nn.Parameter], Shard]:
    """FSDP2 splits spread rows further: along the rows where that is even on all ranks, else along the columns."""

    def placement(parameter: nn.Parameter) -> Shard:
        assert isinstance(parameter, DTensor)
        by_rows = parameter.size(0) % (parameter.device_mesh.size() * shards) == 0
        if by_rows or parameter.ndim == 1 or parameter.size(1) % shards:
            return Shard(0)
        return Shard(1)

    return placement


def join_names(names: Iterable[str]) -> str:
    """Module names for a table: three of them, and how many more."""
    names = list(names)
    shown = ", ".join(names[:3])
    return shown + (f", ... ({len(names)} in all)" if len(names) > 3 else "")
