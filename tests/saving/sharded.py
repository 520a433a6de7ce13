"""A tiny module with experts, sharded by hand in several layouts, with values that tell which expert they belong to."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from lightning_longmoe import saving
from lightning_longmoe.runtime.pieces import piece_of

STEPS = 2


class Stack(nn.Module):
    """``experts`` matrices; expert i is filled with i + 1."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        values = torch.arange(1.0, experts + 1).view(-1, 1, 1)
        self.weight = nn.Parameter(values.repeat(1, 2, 3))
        self.bias = nn.Parameter(values.view(-1, 1).repeat(1, 2))


class Tiny(nn.Module):
    """Experts, a layer with fewer rows than ranks, tied embeddings, buffers, a bfloat16 weight."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Embedding(7, 4)
        self.experts = Stack(experts)
        self.narrow = nn.Linear(4, 3)
        self.rounded = nn.Linear(4, 2, bias=False).bfloat16()
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scratch", torch.zeros(2), persistent=False)


@dataclasses.dataclass(frozen=True)
class Layout:
    """How `shard` shards: experts over how many ranks, inside ``fully_shard`` over the rest or not; replicas."""

    expert_size: int = 1
    experts_inside: bool = True
    replicas: int = 1


def shard(module: Tiny, layout: Layout) -> Tiny:
    world = dist.get_world_size()
    outside: set[nn.Parameter] = set()
    if layout.expert_size > 1:
        rest = world // layout.expert_size
        mesh = init_device_mesh("cpu", (rest, layout.expert_size), mesh_dim_names=("rest", "expert"))
        for name, parameter in list(module.experts.named_parameters()):
            split = nn.Parameter(distribute_tensor(parameter.detach(), mesh["expert"], [Shard(0)]))
            setattr(module.experts, name, split)
        if layout.experts_inside and rest > 1:
            fully_shard(module.experts, mesh=mesh["rest"])
        else:
            outside = set(module.experts.parameters())
    if layout.replicas > 1:
        size = (layout.replicas, world // layout.replicas)
        mesh = init_device_mesh("cpu", size, mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh("cpu", (world,))
    fully_shard(module.rounded, mesh=mesh)  # a unit has one data type
    fully_shard(module, mesh=mesh, ignored_params=outside)
    return module


def build(layout: Layout, experts: int = 4) -> tuple[Tiny, torch.optim.Optimizer]:
    module = shard(Tiny(experts), layout)
    return module, make_optimizer(module)


def make_optimizer(module: Tiny, lr: float = 0.1) -> torch.optim.Optimizer:
    """Two param groups."""
    first = list(module.experts.parameters())
    rest = [p for p in module.parameters() if all(p is not q for q in first)]
    groups = [{"params": rest, "lr": lr, "betas": (0.8, 0.9)}, {"params": first, "weight_decay": 0.5}]
    return torch.optim.AdamW(groups, lr=lr / 2)


def train(module: Tiny, optimizer: torch.optim.Optimizer, steps: int = STEPS) -> None:
    """Steps whose gradients depend on values alone, elementwise, so that every layout computes the same bits."""
    for _ in range(steps):
        for name, parameter in module.named_parameters():
            if not name.startswith("norm"):  # never gets a gradient
                parameter.grad = parameter.detach() * 0.5
        optimizer.step()


def whole(tensor: Tensor) -> Tensor:
    """The tensor put together from every rank's part (``full_tensor`` is wrong for uneven strided shards)."""
    piece = piece_of(tensor)
    mine = None if piece is None else (piece.offset, piece.local.clone())
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, mine)
    result = torch.full(tensor.shape, -1, dtype=tensor.dtype)
    for part in parts:
        if part is not None:
            offset, local = part
            result[tuple(slice(o, o + n) for o, n in zip(offset, local.shape, strict=True))] = local
    return result


def contents(module: Tiny, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """All values by name, gathered, and the optimizer's settings."""
    state = saving.optimizer_state(module, optimizer)
    model = {name: whole(value) for name, value in saving.model_state(module).items()}
    moments = {
        f"{fqn}.{name}": whole(value) if isinstance(value, Tensor) else value
        for fqn, values in state["state"].items()
        for name, value in values.items()
    }
    return {"model": model, "optimizer": moments, "groups": state["param_groups"]}


def checkpoint_of(module: nn.Module, *optimizers: torch.optim.Optimizer, **rest: Any) -> dict[str, Any]:
    return {
        "epoch": 3,
        "global_step": 17,
        "pytorch-lightning_version": "2.6.6",
        "loops": {"fit_loop": {"state_dict": {}}},
        "lr_schedulers": [{"last_epoch": 2, "_last_lr": [0.1]}],
        "callbacks": {"EarlyStopping": {"best_score": torch.tensor(0.25)}},
        "state_dict": saving.model_state(module),
        "optimizer_states": [saving.optimizer_state(module, optimizer) for optimizer in optimizers],
        **rest,
    }


def control() -> dist.ProcessGroup:
    return dist.new_group(backend="gloo")


def save(path: Path, layout: Layout, sharded: bool = True, experts: int = 4) -> dict[str, Any]:
    """Train, save, and return what was saved, gathered."""
    module, optimizer = build(layout, experts)
    train(module, optimizer)
    group = control()
    rng = saving.gather_per_rank(torch.tensor([dist.get_rank()]), group, timeout_s=10)
    checkpoint = checkpoint_of(module, optimizer, longmoe={"layout": {"world": dist.get_world_size()}, "rng": rng})
    write = saving.save_sharded if sharded else saving.save_single_file
    write(path, checkpoint, module, control_group=group)
    return contents(module, optimizer)


def load(path: Path, layout: Layout, experts: int = 4, more_steps: int = 0) -> dict[str, Any]:
    """Load into a module of other values and an optimizer of other settings, and return what is there."""
    module, optimizer = build(layout, experts)
    with torch.no_grad():
        for value in saving.model_state(module).values():
            value.zero_()
    for group in optimizer.param_groups:
        group["lr"] = 123.0
    rest = saving.load(path, module, [optimizer], control_group=control())
    train(module, optimizer, more_steps)
    return {**contents(module, optimizer), "rest": rest}


def reference(experts: int = 4, steps: int = STEPS) -> dict[str, Any]:
    """The same training in one process without any sharding."""
    module = Tiny(experts)
    optimizer = make_optimizer(module)
    train(module, optimizer, steps)
    names = {id(p): name for name, p in module.named_parameters()}
    moments = {f"{names[id(p)]}.{n}": v for p, values in optimizer.state.items() for n, v in values.items()}
    return {"model": module.state_dict(), "optimizer": moments}


def assert_equal(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    """Bit for bit, all keys."""
    for part in ("model", "optimizer"):
        assert set(actual[part]) == set(expected[part])
        for name, value in expected[part].items():
            assert actual[part][name].dtype == value.dtype, name
            assert torch.equal(actual[part][name], value), name
