"""A checkpoint holds every value once, whatever layout wrote it, and every layout reads it back bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.pool import run_on_ranks
from tests.saving.sharded import Layout, assert_equal, load, reference, save

SAVED_AT = [
    pytest.param(2, Layout(expert_size=2), 4, id="2 ranks, experts over both"),
    pytest.param(4, Layout(expert_size=2), 4, id="4 ranks, experts sharded over the rest"),
    pytest.param(4, Layout(expert_size=2, experts_inside=False), 4, id="4 ranks, experts outside of FSDP2"),
    pytest.param(4, Layout(expert_size=2), 6, id="4 ranks, 6 experts that do not divide"),
    pytest.param(4, Layout(replicas=2), 4, id="4 ranks, 2 replicas"),
    pytest.param(1, Layout(), 4, id="1 rank"),
]
LOADED_AT = [(1, Layout()), (2, Layout()), (4, Layout(expert_size=2)), (4, Layout(expert_size=4))]


@pytest.mark.parametrize("sharded", [True, False], ids=["folder", "file"])
@pytest.mark.parametrize(("world", "layout", "experts"), SAVED_AT)
def test_what_any_layout_saves_every_layout_loads_bit_for_bit(
    tmp_path: Path, world: int, layout: Layout, experts: int, sharded: bool
) -> None:
    path = tmp_path / "a.ckpt"
    expected = reference(experts)
    assert_equal(run_on_ranks(world, save, path, layout, sharded, experts)[0], expected)
    for other_world, other in LOADED_AT if sharded else LOADED_AT[::2]:
        if experts % other.expert_size:
            continue
        for loaded in run_on_ranks(other_world, load, path, other, experts):
            assert_equal(loaded, expected)
            assert [group["lr"] for group in loaded["groups"]] == [0.1, 0.05]
            assert [group["betas"] for group in loaded["groups"]] == [(0.8, 0.9), (0.9, 0.999)]
            assert loaded["groups"][1]["weight_decay"] == 0.5
            assert "state_dict" not in loaded["rest"]
            assert "optimizer_states" not in loaded["rest"]
            assert loaded["rest"]["global_step"] == 17
            assert loaded["rest"]["longmoe"]["layout"] == {"world": world}
            assert torch.equal(torch.cat(loaded["rest"]["longmoe"]["rng"]), torch.arange(world))


def test_expert_i_holds_value_i_and_so_do_its_moments(tmp_path: Path) -> None:
    run_on_ranks(2, save, tmp_path / "a.ckpt", Layout(expert_size=2))
    index = dcp.FileSystemReader(tmp_path / "a.ckpt").read_metadata().state_dict_metadata
    for key in ("state_dict.experts.weight", "optimizer_0.state.experts.weight.exp_avg"):
        chunks = index[key].chunks
        assert index[key].size == (4, 2, 3)
        assert sorted(chunk.offsets[0] for chunk in chunks) == [0, 2]
    loaded = run_on_ranks(1, load, tmp_path / "a.ckpt", Layout())[0]
    weights, moments = loaded["model"]["experts.weight"], loaded["optimizer"]["experts.weight.exp_avg"]
    alone = reference()
    for expert in range(4):
        assert torch.equal(weights[expert], alone["model"]["experts.weight"][expert])
        assert torch.equal(moments[expert], alone["optimizer"]["experts.weight.exp_avg"][expert])
    assert torch.all(weights[1:] > weights[:-1])
    assert torch.all(moments[1:] > moments[:-1])


def test_training_goes_on_as_if_it_had_never_stopped(tmp_path: Path) -> None:
    run_on_ranks(2, save, tmp_path / "a.ckpt", Layout(expert_size=2))
    expected = reference(steps=4)
    assert float(expected["optimizer"]["embedding.weight.step"]) == 4
    for world, layout in [(2, Layout(expert_size=2)), (4, Layout(expert_size=2))]:
        assert_equal(run_on_ranks(world, load, tmp_path / "a.ckpt", layout, more_steps=2)[0], expected)


def test_there_and_back_again(tmp_path: Path) -> None:
    """Saved on 2 ranks, loaded on 4 and saved, loaded on 1."""
    run_on_ranks(2, save, tmp_path / "a.ckpt", Layout(expert_size=2))
    run_on_ranks(4, _pass_on, tmp_path / "a.ckpt", tmp_path / "b.ckpt", Layout(expert_size=2))
    run_on_ranks(1, _pass_on, tmp_path / "b.ckpt", tmp_path / "c.ckpt", Layout())
    assert_equal(run_on_ranks(2, load, tmp_path / "c.ckpt", Layout(expert_size=2))[1], reference())


def _pass_on(source: Path, target: Path, layout: Layout) -> None:
    from lightning_longmoe import saving
    from tests.saving import sharded

    module, optimizer = sharded.build(layout)
    group = sharded.control()
    saving.load(source, module, [optimizer], control_group=group)
    saving.save_sharded(target, sharded.checkpoint_of(module, optimizer), module, control_group=group)


def test_a_folder_is_not_larger_for_being_written_by_more_ranks(tmp_path: Path) -> None:
    sizes = []
    for world in (1, 2, 4):
        path = tmp_path / f"{world}.ckpt"
        run_on_ranks(world, _save_large, path)
        sizes.append(sum(file.stat().st_size for file in path.iterdir()))
    payload = 4 * 256 * 256 * 3
    assert payload < min(sizes)
    assert max(sizes) < 1.05 * min(sizes)


def _save_large(path: Path) -> None:
    from torch import nn

    from lightning_longmoe import saving
    from tests.saving import sharded

    module = nn.Sequential(nn.Linear(256, 256, bias=False))
    module.register_buffer("whole_everywhere", torch.ones(256, 256))
    group = sharded.control()
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    fully_shard(module, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
    optimizer = torch.optim.SGD(module.parameters(), momentum=0.9)
    for parameter in module.parameters():
        parameter.grad = parameter.detach()
    optimizer.step()
    saving.save_sharded(path, sharded.checkpoint_of(module, optimizer), module, control_group=group)
