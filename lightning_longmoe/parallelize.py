"""The one ordered list of what is done to a module, top to bottom: `parallelize`.

Each step says in the returned `Takeover` what it took by module name and what it left plain, and why; rank 0 prints it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard

from lightning_longmoe import _compat
from lightning_longmoe.boundaries import BoundaryOffloader
from lightning_longmoe.config import (
    BoundaryOffload,
    ContextConfig,
    FSDPConfig,
    ParallelConfig,
    PipelinedLLEP,
    RecomputeConfig,
    RingDTP,
)
from lightning_longmoe.context.takeover import ContextChoice, choose_context, connect_context
from lightning_longmoe.dispatch.pipelined import PipelinedDispatch
from lightning_longmoe.dispatch.plain import PlainDispatch
from lightning_longmoe.layout import Layout, plan_layout
from lightning_longmoe.models.experts import Experts
from lightning_longmoe.models.head import CausalLMHead
from lightning_longmoe.models.moe import Router
from lightning_longmoe.precision import LongMoEPrecision
from lightning_longmoe.recompute import recompute_blocks
from lightning_longmoe.reuse import new_parts, owners, refuse_other_strategies
from lightning_longmoe.runtime.meshes import Meshes
from lightning_longmoe.runtime.reduction import TokenReduction
from lightning_longmoe.vocabulary_takeover import (
    join_names,
    refuse_setting,
    spread_modules,
    spread_vocabulary,
    vocabulary_outside,
    vocabulary_placement,
    vocabulary_size,
)

STEP_METHODS = ("training_step", "validation_step", "test_step", "predict_step")
EPOCH_METHODS = ("on_train_epoch_end", "on_validation_epoch_end", "on_test_epoch_end", "on_predict_epoch_end")
"""Hooks in which projects run the module too, to sample from it; all ranks run them."""

Placement = Callable[[int], Callable[[nn.Parameter], Shard]]
"""From the number of FSDP2 shards to the dimension along which a parameter is split."""


@dataclass
class Takeover:
    """What was done to a module: lines of (what, where, how) for the start-up table.

    Attributes:
        rows: operator, module names, and a remark or the reason why something stayed plain.
        decisions: what "auto" came to, by the name of the strategy's argument; saved in checkpoints.
        reduction: what every head and MoE layer got to sum over all ranks.
        context: how sequences are split; None where they are whole.
        offloader: what holds the boundaries of recomputed blocks; None where they stay on the device.
    """

    rows: list[tuple[str, str, str]] = field(default_factory=list)
    decisions: dict[str, str] = field(default_factory=dict)
    reduction: TokenReduction = field(default_factory=TokenReduction)
    context: ContextChoice | None = None
    offloader: BoundaryOffloader | None = None


@dataclass
class Parallelized:
    """What a module carries once it was parallelised, so that a second run finds it.

    Attributes:
        meshes: the groups it is sharded over.
        takeover: what was done to it.
        parts: the modules that held its parameters.
    """

    meshes: Meshes
    takeover: Takeover
    parts: WeakSet[nn.Module]


def parallelized(module: nn.Module) -> Parallelized | None:
    """What an earlier `parallelize` left on ``module``; None when there was none."""
    return getattr(module, "_longmoe_parallelized", None)


def parallelize(
    module: nn.Module,
    meshes: Meshes,
    fsdp: FSDPConfig,
    recompute: RecomputeConfig,
    dispatch: PipelinedLLEP | Literal["auto"] | None,
    context: ContextConfig,
    vocabulary: RingDTP | Literal["auto"] | None,
    boundaries: BoundaryOffload | Literal["auto"] | None,
    precision: LongMoEPrecision,
    host_limit_bytes: int | None = None,
) -> Takeover:
    """Shard ``module`` (a LightningModule) in place.

    Args:
        module: on the CPU, on the meta device, or with parts that ``configure_model`` already sharded.
        meshes: the groups.
        fsdp: units and policy.
        recompute: activation checkpointing.
        dispatch: how tokens travel to their experts.
        context: how attention sees over the ranks that share a sequence.
        vocabulary: how the vocabulary is spread.
        boundaries: where the inputs of recomputed blocks wait.
        precision: gives the mixed-precision policy.
        host_limit_bytes: host memory that this rank may fill.

    Raises:
        ValueError: a setting does not fit the module, or a parameter ends up outside every group.
    """
    _compat.let_anomaly_detection_see_dtensors()
    takeover = Takeover(reduction=TokenReduction(meshes.world_group, meshes.layout.world_size))
    refuse_foreign_wrappers(module)
    blocks = find_blocks(module, fsdp.blocks)
    _connect_context(module, meshes, context, takeover)
    _shard_experts(module, meshes, dispatch, takeover)
    _spread_vocabulary(module, meshes, vocabulary, precision, takeover)
    _recompute_blocks(module, blocks, recompute, boundaries, meshes.shard.device_type, host_limit_bytes, takeover)
    _fully_shard_all(module, blocks, meshes, fsdp, precision, takeover)
    _connect_reduction(module, takeover)
    module._longmoe_parallelized = Parallelized(meshes, takeover, owners(module))  # type: ignore[assignment]
    refuse_other_strategies(module)  # type: ignore[arg-type]
    return takeover


def refuse_foreign_wrappers(module: nn.Module) -> None:
    """Raise ValueError for a module that another system already distributes."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.nn.parallel import DistributedDataParallel

    for name, child in module.named_modules():
        if isinstance(child, (FullyShardedDataParallel, DistributedDataParallel, nn.DataParallel)):
            raise ValueError(
                f"{name or 'the module'!r} is already wrapped in {type(child).__name__}. LongMoEStrategy shards plain"
                " modules itself, and respects `torch.distributed.fsdp.fully_shard` in `configure_model`:"
                f" remove the {type(child).__name__} wrapper."
            )
        for parameter_name, parameter in child.named_parameters(recurse=False):
            if parameter.ndim == 0:
                raise ValueError(
                    f"Parameter '{name}.{parameter_name}' is a scalar, which FSDP2 cannot shard:"
                    " give it the shape [1]."
                )


# ---------------------------------------------------------------------------------------------------------------------
# Finding blocks and experts
# ---------------------------------------------------------------------------------------------------------------------
def find_blocks(module: nn.Module, names: Iterable[str] | None) -> dict[str, nn.Module]:
    """The decoder blocks by qualified name.

    Args:
        module: where to look.
        names: class names; None takes every submodule's ``_no_split_modules``, else the elements of the outermost
            ``nn.ModuleList``.

    Raises:
        ValueError: a class name of ``names`` is not in the module.
    """
    wanted = set(names) if names is not None else _declared_blocks(module)
    if wanted:
        found = {name: child for name, child in module.named_modules() if _compat.plain_class(child).__name__ in wanted}
        missing = wanted - {_compat.plain_class(child).__name__ for child in found.values()}
        if names is not None and missing:
            present = sorted({_compat.plain_class(child).__name__ for child in module.modules() if child is not module})
            raise ValueError(f"No module of class {sorted(missing)} found. Classes of this module: {present}.")
        return _outermost(found)
    lists = _outermost({name: child for name, child in module.named_modules() if isinstance(child, nn.ModuleList)})
    return {
        f"{name}.{index}": element
        for name, children in lists.items()
        for index, element in children.named_children()
        if any(True for _ in element.parameters()) and not isinstance(element, (nn.ModuleList, nn.ModuleDict))
    }


def _declared_blocks(module: nn.Module) -> set[str]:
    return {name for child in module.modules() for name in (getattr(child, "_no_split_modules", None) or ())}


def _outermost(modules: dict[str, nn.Module]) -> dict[str, nn.Module]:
    return {name: m for name, m in modules.items() if not any(name.startswith(f"{other}.") for other in modules)}


def expert_counts(module: nn.Module) -> list[int]:
    """The number of experts of each expert stack that we sharded or can still shard."""
    free = {id(child) for _, child in _free_experts(module)}
    stacks = [child for child in module.modules() if isinstance(child, Experts)]
    return [child.num_experts for child in stacks if id(child) in free or child.dispatch is not None]


def _free_experts(module: nn.Module) -> list[tuple[str, Experts]]:
    """Expert stacks whose parameters nobody has sharded yet."""
    return [
        (name, child)
        for name, child in module.named_modules()
        if isinstance(child, Experts) and not any(isinstance(p, DTensor) for p in child.parameters())
    ]


# ---------------------------------------------------------------------------------------------------------------------
# The steps
# ---------------------------------------------------------------------------------------------------------------------
def _connect_context(module: nn.Module, meshes: Meshes, config: ContextConfig, takeover: Takeover) -> None:
    choice = choose_context(module, config, meshes.layout)
    group = None if meshes.context is None else meshes.context.get_group()
    names = connect_context(module, choice, group)
    takeover.context = choice
    takeover.decisions["context"] = "whole sequences" if choice is None else choice.kind
    if choice is not None:
        lanes = "" if choice.ulysses_size is None else f", {choice.ulysses_size} of them exchange heads"
        how = f"{choice.kind} over {choice.size} ranks{lanes} ({choice.why})"
        takeover.rows.append(("context", join_names(names), how))


def _shard_experts(
    module: nn.Module, meshes: Meshes, setting: PipelinedLLEP | Literal["auto"] | None, takeover: Takeover
) -> None:
    """Leave each rank its home experts, as ``Shard(0)`` DTensors on the expert mesh, and connect the dispatch."""
    stacks = _free_experts(module)
    config, why = _choose_dispatch(setting, meshes.layout.expert_size, bool(stacks))
    takeover.decisions["dispatch"] = "plain" if config is None else "PipelinedLLEP"
    group = None
    if meshes.expert is not None:
        group = meshes.expert.get_group()
        for _, experts in stacks:
            _keep_home_experts(experts, meshes.expert)
            experts.gradient_scale = 1.0 / meshes.layout.expert_size
    for _, experts in stacks:
        if config is not None:
            experts.dispatch = PipelinedDispatch(group, config)
        elif group is not None:
            experts.dispatch = PlainDispatch(group)
    if stacks:
        takeover.rows.append(("dispatch", join_names([name for name, _ in stacks]), why))
    held = [name for name, child in module.named_modules() if isinstance(child, Experts)]
    if len(stacks) < len(held):
        plain = sorted(set(held) - {name for name, _ in stacks})
        takeover.rows.append(("experts", join_names(plain), "plain: `configure_model` sharded them already"))


def _choose_dispatch(
    setting: PipelinedLLEP | Literal["auto"] | None, size: int, experts: bool
) -> tuple[PipelinedLLEP | None, str]:
    """The operator's config, or None for the plain dispatch, and why.

    Raises:
        ValueError: an explicit config, and no experts to apply it to.
    """
    where = f"over {size} ranks" if size > 1 else "on each rank for itself"
    if isinstance(setting, PipelinedLLEP):
        if not experts:
            raise ValueError(
                "dispatch=PipelinedLLEP(...) cannot apply: the module has no MoELayer or Experts that `configure_model`"
                " left unsharded. Use dispatch='auto' or None."
            )
        return setting, f"PipelinedLLEP {where}: {_describe(setting)}"
    if setting == "auto" and size > 1:
        config = PipelinedLLEP()
        return config, f"PipelinedLLEP {where} (auto: experts are spread): {_describe(config)}"
    reason = "dispatch=None" if setting is None else "auto: expert parallel size 1"
    return None, f"plain, unchunked, {where} ({reason})"


def _describe(config: PipelinedLLEP) -> str:
    most = "" if config.max_chunks is None else f", at most {config.max_chunks} chunks"
    return f"chunks of {config.tokens_per_chunk} tokens{most}, depth {config.depth}"


def _keep_home_experts(experts: Experts, mesh: DeviceMesh) -> None:
    for name, parameter in list(experts.named_parameters(recurse=False)):
        local = parameter.detach().chunk(mesh.size())[mesh.get_local_rank()].clone()
        home = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
        setattr(experts, name, nn.Parameter(home, requires_grad=parameter.requires_grad))


def _spread_vocabulary(
    module: nn.Module,
    meshes: Meshes,
    setting: RingDTP | Literal["auto"] | None,
    precision: LongMoEPrecision,
    takeover: Takeover,
) -> None:
    """Leave each rank its rows of heads and embeddings, and connect the ring."""

    def lookup_dtype(dtype: torch.dtype) -> torch.dtype | None:
        return precision.policy(dtype, dtype, keep_dtype=False, cast=True).param_dtype

    decision, rows = spread_vocabulary(module, meshes, setting, lookup_dtype)
    takeover.decisions["vocabulary"] = decision
    takeover.rows += rows


def _recompute_blocks(
    module: nn.Module,
    blocks: dict[str, nn.Module],
    config: RecomputeConfig,
    boundaries: BoundaryOffload | Literal["auto"] | None,
    device_type: str,
    host_limit_bytes: int | None,
    takeover: Takeover,
) -> None:
    chosen = blocks if config.blocks is None else find_blocks(module, config.blocks)
    takeover.offloader, rows = recompute_blocks(chosen, config, boundaries, device_type, host_limit_bytes)
    takeover.decisions["boundaries"] = "plain" if takeover.offloader is None else "BoundaryOffload"
    takeover.rows += [(operator, join_names(list(chosen)), remark) for operator, remark in rows]


def _fully_shard_all(
    module: nn.Module,
    blocks: dict[str, nn.Module],
    meshes: Meshes,
    fsdp: FSDPConfig,
    precision: LongMoEPrecision,
    takeover: Takeover,
) -> None:
    """Apply ``fully_shard`` inside out: experts, routers, blocks, embeddings and heads, then the whole module."""
    outside = set(parameters_outside(module, meshes))
    taken = outside | _sharded_by_user(module)
    reduce_dtype = getattr(torch, fsdp.reduce_dtype)

    def shard(
        child: nn.Module, owners: DeviceMesh | None = None, placement: Placement | None = None, keep_dtype: bool = False
    ) -> None:
        """``owners``: the mesh for what a group owns together, split further as ``placement`` says."""
        parameters = [p for p in child.parameters() if p not in taken]
        if isinstance(child, FSDPModule) or not (parameters or child is module):
            return  # the module itself becomes the root, with or without parameters of its own
        dtype = next(iter(parameters or child.parameters())).dtype
        mesh = meshes.shard if owners is None else owners
        cast = not isinstance(child, Experts)
        fully_shard(
            child,
            mesh=mesh,
            reshard_after_forward=fsdp.reshard_after_forward,
            mp_policy=precision.policy(reduce_dtype, dtype, keep_dtype=keep_dtype, cast=cast),
            shard_placement_fn=None if placement is None else placement(mesh.size(mesh.ndim - 1)),
            ignored_params=outside or None,
        )

    spread = set(spread_modules(module))
    for child in module.modules():
        if isinstance(child, Experts):
            shard(child, meshes.expert_shard, _expert_placement)
        elif isinstance(child, Router) and precision.precision == "bf16-mixed":
            shard(child, keep_dtype=True)  # a unit of its own, or its weight would be gathered in bfloat16
        elif child in spread and meshes.vocabulary_shard is not None:
            shard(child, meshes.vocabulary_shard, vocabulary_placement)
    for block in blocks.values():
        shard(block)
    for child in module.modules():
        if isinstance(child, CausalLMHead):
            if child.tied_to is None:  # a tied head shares the embedding's parameter: both stay in the root's group
                shard(child)
        elif isinstance(child, nn.Embedding) and not _is_tied(module, child):
            shard(child)
    shard(module)
    _enter_steps_through_root(module)
    sharded = [n for n, m in module.named_modules() if isinstance(m, FSDPModule)]
    units = join_names(name or "root" for name in sharded)
    takeover.rows.append(("fsdp", units, f"over {meshes.shard.size()} ranks"))


def _sharded_by_user(module: nn.Module) -> set[nn.Parameter]:
    """Parameters that are DTensors, and not because they are experts or vocabulary rows of ours."""
    ours = {p for m in module.modules() if isinstance(m, Experts) and m.dispatch is not None for p in m.parameters()}
    ours |= {p for m in spread_modules(module) for p in m.parameters(recurse=False)}
    return {p for p in module.parameters() if p not in ours and isinstance(p, DTensor)}


def _is_tied(module: nn.Module, embedding: nn.Embedding) -> bool:
    owners = [m for m in module.modules() if any(p is embedding.weight for p in m._parameters.values())]
    return len(owners) > 1


def _expert_placement(shards: int) -> Callable[[nn.Parameter], Shard]:
    """FSDP2 splits experts along the first dimension that divides evenly: experts, then hidden, then the FFN."""

    def placement(parameter: nn.Parameter) -> Shard:
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        for dim in (0, *range(local.ndim - 1, 0, -1)):
            if local.shape[dim] % shards == 0:
                return Shard(dim)
        return Shard(0)

    return placement


def _enter_steps_through_root(module: nn.Module) -> None:
    """Lightning calls ``training_step`` and not ``forward``: let the root's hooks run around steps and epoch hooks."""
    from lightning.pytorch.utilities.model_helpers import is_overridden

    if not isinstance(module, FSDPModule):
        return
    for method in (*STEP_METHODS, *EPOCH_METHODS):
        if is_overridden(method, module):  # type: ignore[arg-type]
            register_fsdp_forward_method(module, method)


def _connect_reduction(module: nn.Module, takeover: Takeover) -> None:
    heads = [name for name, child in module.named_modules() if isinstance(child, CausalLMHead)]
    for child in module.modules():
        if isinstance(child, (CausalLMHead, Router)):
            child.reduction = takeover.reduction
    if heads:
        how = "in tiles" if takeover.decisions.get("vocabulary") == "RingDTP" else "token-chunked"
        takeover.rows.append(("loss", join_names(heads), f"mean over the valid targets of all ranks; {how}"))
    else:
        takeover.rows.append(("loss", "-", "the module's own: no CausalLMHead found, a mean of each rank's value"))


def check_run(module: nn.Module) -> None:
    """Raise ValueError where a run begins with a module that is not wholly what `parallelize` made.

    A second run may bring parts that the first never saw: added or replaced by the user, or made anew by a
    ``configure_model`` that does not ask whether they are there.
    """
    done = parallelized(module)
    assert done is not None
    reduction = done.takeover.reduction
    strangers = [
        name
        for name, child in module.named_modules()
        if (isinstance(child, (CausalLMHead, Router)) and child.reduction is not reduction)
        or (isinstance(child, Experts) and child not in done.parts)
    ] or new_parts(module, done.parts)
    if strangers:
        raise ValueError(
            f"{strangers[:10]} came into the module after it was sharded, and nothing connects them to the other ranks."
            " Replace parts before the first run; in `configure_model` return where they are there already"
            " (`if self.model is not None: return`). To go on with other parts, load a checkpoint into a fresh module."
        )
    check_every_parameter_is_sharded(module)


def check_every_parameter_is_sharded(module: nn.Module) -> None:
    """Raise ValueError that names parameters which no group owns: they would diverge between ranks silently."""
    plain = [name for name, parameter in module.named_parameters() if not isinstance(parameter, DTensor)]
    if plain:
        raise ValueError(
            f"{len(plain)} parameters are outside every group and would diverge between ranks: {plain[:10]}."
            " Register them before the first run, in `__init__` or in a `configure_model` that returns where the module"
            " is built already, or shard them with"
            " `fully_shard(..., mesh=self.device_mesh['data_parallel'])` in `configure_model`."
        )


def parameters_outside(module: nn.Module, meshes: Meshes) -> list[nn.Parameter]:
    """Parameters that stay out of ``fully_shard``: experts and vocabulary rows whose group is the whole shard group."""
    return [*experts_outside(module, meshes), *vocabulary_outside(module, meshes)]


def experts_outside(module: nn.Module, meshes: Meshes) -> list[nn.Parameter]:
    """Those of them that are experts."""
    if meshes.expert is None or meshes.expert_shard is not None:
        return []
    ours = [child for child in module.modules() if isinstance(child, Experts) and child.dispatch is not None]
    return [parameter for child in ours for parameter in child.parameters()]


def average_outside(module: nn.Module, meshes: Meshes) -> None:
    """Average gradients of parameters outside ``fully_shard`` over the ranks that hold the same part of them."""
    average_over_replicas(experts_outside(module, meshes), meshes.replicate_group)
    copies = meshes.vocabulary_copies
    average_over_replicas(vocabulary_outside(module, meshes), None if copies is None else copies.get_group())


def reshard(module: nn.Module) -> None:
    """Free gathered parameters: after an evaluation the root still holds them, and an optimizer would pick those up."""
    for child in module.modules():
        if isinstance(child, FSDPModule):
            child.reshard()


def average_over_replicas(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup | None) -> None:
    """Average the gradients of parameters outside ``fully_shard`` over the replicas.

    Repeating it is harmless: what is already equal on all replicas stays as it is.
    """
    if group is None:
        return
    size = dist.get_world_size(group)
    for parameter in parameters:
        if parameter.grad is not None:
            local = _compat.local_tensor(parameter.grad)
            dist.all_reduce(local, group=group)
            local.div_(size)


def layout_for(
    module: nn.Module,
    parallel: ParallelConfig,
    vocabulary: RingDTP | Literal["auto"] | None,
    world_size: int,
    ranks_per_node: int,
) -> Layout:
    """The layout that ``parallel`` asks for, given the experts and the vocabulary of ``module``.

    Raises:
        ValueError: a size does not fit, or experts or a vocabulary are to be spread and the module has none.
    """
    counts = expert_counts(module)
    size = parallel.expert_parallel_size
    if size != "auto" and size > 1 and not counts:
        held = any(isinstance(child, Experts) for child in module.modules())
        why = "`configure_model` has sharded all of them already" if held else "no MoELayer or Experts module was found"
        raise ValueError(
            f"ParallelConfig(expert_parallel_size={size}) cannot apply to this module: {why}."
            " Use 1 or 'auto', or leave the experts to the strategy."
        )
    refuse_setting(module, vocabulary, parallel.vocabulary_parallel_size, world_size)
    vocab_size = vocabulary_size(module)
    if vocabulary is None or vocab_size is None:
        parallel = dataclasses.replace(parallel, vocabulary_parallel_size=1)
    layout = plan_layout(
        parallel,
        world_size=world_size,
        ranks_per_node=ranks_per_node,
        expert_counts=counts,
        vocab_size=vocab_size,
    )
    refuse_setting(module, vocabulary, layout.vocabulary_size, world_size)
    return layout
