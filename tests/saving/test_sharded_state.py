"""State of sharded modules in the less common forms: plain local parts, gathered roots, state on another device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from lightning_longmoe import saving
from lightning_longmoe.runtime.pieces import box, piece_of
from tests.pool import run_on_ranks
from tests.saving import sharded
from tests.saving.sharded import Layout, assert_equal, load, reference


class LocalMomentum(torch.optim.Optimizer):
    """Momentum that keeps its state as plain parts of sharded parameters."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                grad = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
                moment = self.state[parameter].setdefault("moment", torch.zeros_like(local, dtype=torch.float64))
                moment.mul_(0.5).add_(grad)
                local.add_(moment.to(local.dtype), alpha=-group["lr"])


def _momentum(layout: Layout) -> tuple[sharded.Tiny, LocalMomentum]:
    module, _ = sharded.build(layout)
    del module.norm
    return module, LocalMomentum(module.parameters())


def _train_with_local_state(layout: Layout, path: Path | None, save_to: Path | None) -> dict[str, Any]:
    module, optimizer = _momentum(layout)
    group = sharded.control()
    if path is not None:
        saving.load(path, module, [optimizer], control_group=group)
        for values in optimizer.state.values():
            assert not isinstance(values["moment"], DTensor)
            assert values["moment"].dtype == torch.float64
    sharded.train(module, optimizer, 1)
    if save_to is not None:
        saving.save_sharded(save_to, sharded.checkpoint_of(module, optimizer), module, control_group=group)
    return sharded.contents(module, optimizer)


def test_plain_parts_of_sharded_state_are_saved_whole_and_come_back_as_parts(tmp_path: Path) -> None:
    first, second, third = tmp_path / "1.ckpt", tmp_path / "2.ckpt", tmp_path / "3.ckpt"
    run_on_ranks(4, _train_with_local_state, Layout(expert_size=2), None, first)
    run_on_ranks(2, _train_with_local_state, Layout(expert_size=2), first, second)
    resumed = run_on_ranks(1, _train_with_local_state, Layout(), second, third)[0]
    run_on_ranks(1, _train_with_local_state, Layout(), None, first)
    run_on_ranks(1, _train_with_local_state, Layout(), first, second)
    alone = run_on_ranks(1, _train_with_local_state, Layout(), second, third)[0]
    assert_equal(resumed, alone)
    assert not torch.equal(alone["model"]["embedding.weight"], sharded.Tiny().state_dict()["embedding.weight"])


def _save_while_gathered(path: Path) -> None:
    module, optimizer = sharded.build(Layout(expert_size=2))
    sharded.train(module, optimizer)
    module.unshard()  # as an evaluation leaves the root
    assert not isinstance(module.embedding.weight, DTensor)
    wrapped = LightningOptimizer(optimizer)
    checkpoint = sharded.checkpoint_of(module, wrapped)  # type: ignore[arg-type]
    saving.save_sharded(path, checkpoint, module, control_group=sharded.control())
    module.unshard()
    with torch.no_grad():
        module.embedding.weight.zero_()
    saving.load(path, module, [wrapped], control_group=sharded.control())
    assert float(module.embedding.weight.full_tensor().abs().sum()) > 0


def test_a_gathered_module_is_saved_and_loaded_as_shards(tmp_path: Path) -> None:
    run_on_ranks(2, _save_while_gathered, tmp_path / "a.ckpt")
    assert_equal(run_on_ranks(2, load, tmp_path / "a.ckpt", Layout(expert_size=2))[0], reference())


def _load_with_state_elsewhere(path: Path) -> set[str]:
    module, _ = sharded.build(Layout(expert_size=2))
    optimizer = sharded.make_optimizer(module)
    optimizer.state_device = torch.device("meta")  # type: ignore[attr-defined]
    taken: dict[str, Any] = {}
    optimizer.load_state_dict = taken.update  # type: ignore[assignment, method-assign]
    with pytest.raises(saving.CheckpointError):  # nothing can be copied to meta; where it would go is what is asked
        saving.load(path, module, [optimizer], control_group=sharded.control())
    from lightning_longmoe.saving import reading, sources

    source = sources.open_source(path, None)
    plan = reading._plan(source, module, [optimizer], True)
    state = plan.optimizers[0].state
    return {str(v.device) for values in state.values() for n, v in values.items() if n != "step"}


def test_an_optimizer_says_on_which_device_its_state_belongs(tmp_path: Path) -> None:
    run_on_ranks(2, sharded.save, tmp_path / "a.ckpt", Layout(expert_size=2))
    assert run_on_ranks(2, _load_with_state_elsewhere, tmp_path / "a.ckpt") == [{"meta"}, {"meta"}]


def _misplaced(sizes: list[int]) -> list[int]:
    """Numbers of rows, sharded over 2 ranks and then by FSDP2 over 2, for which a piece is not where its rows are."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rest", "expert"))
    wrong = []
    for size in sizes:
        module = torch.nn.Module()
        rows = torch.arange(float(size)).view(-1, 1)
        module.weight = torch.nn.Parameter(distribute_tensor(rows, mesh["expert"], [Shard(0)]))
        fully_shard(module, mesh=mesh["rest"])
        piece, local = piece_of(module.weight), module.weight.to_local()
        if not (piece is None if local.numel() == 0 else torch.equal(rows[piece.slices], local)):  # type: ignore[union-attr]
            wrong.append(size)
    return wrong


def test_a_piece_lies_where_its_rows_are_also_when_sizes_do_not_divide() -> None:
    assert run_on_ranks(4, _misplaced, [1, 2, 3, 4, 5, 6, 7, 8, 10]) == [[]] * 4


@pytest.mark.parametrize("rows", range(1, 14))
@pytest.mark.parametrize(("rest", "experts"), [(3, 2), (2, 3), (4, 4)])
def test_strided_shards_cut_what_the_expert_mesh_left(rows: int, rest: int, experts: int) -> None:
    """FSDP2's own order: `torch.chunk` over the expert mesh, then over the rest."""
    placements = (_StridedShard(0, split_factor=experts), Shard(0))
    for expert in range(experts):
        home = dict(enumerate(torch.arange(rows).chunk(experts))).get(expert, torch.arange(0))
        for part in range(rest):
            mine = dict(enumerate(home.chunk(rest))).get(part, torch.arange(0))
            (offset,), (size,) = box((rows,), placements, (rest, experts), (part, expert))
            assert size == len(mine)
            assert not size or torch.equal(torch.arange(offset, offset + size), mine)


def test_partial_sums_have_no_place() -> None:
    with pytest.raises(ValueError, match="only shards and replicas"):
        box((4,), [Partial()], (2,), (0,))
