"""A save that cannot succeed fails on every rank, soon, with the ranks and the reason, and harms nothing."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_longmoe import saving
from lightning_longmoe.saving import CheckpointError, newest_complete
from tests.pool import RemoteError, run_on_ranks
from tests.saving import sharded
from tests.saving.sharded import Layout, assert_equal, load, reference

LAYOUT = Layout(expert_size=2)


def _outcome(function: Callable[[], Any]) -> tuple[str, float]:
    """The text of a `CheckpointError`, or "done", and the seconds it took."""
    start = time.monotonic()
    try:
        function()
    except CheckpointError as error:
        return str(error), time.monotonic() - start
    return "done", time.monotonic() - start


def _ready() -> tuple[nn.Module, dict[str, Any], dist.ProcessGroup]:
    module, optimizer = sharded.build(LAYOUT)
    sharded.train(module, optimizer)
    return module, sharded.checkpoint_of(module, optimizer), sharded.control()


def _save_then_fail(
    path: Path, rank: int, failure: Callable[[int], None], write: Callable[..., None], note: Path
) -> list[tuple[str, float]]:
    """Save, save again with ``os.fsync`` failing on one rank, and save once more."""
    module, checkpoint, group = _ready()
    write(path, checkpoint, module, control_group=group)
    with torch.no_grad():
        module.embedding.weight.zero_()
    fsync = os.fsync
    if dist.get_rank() == rank:
        os.fsync = failure  # type: ignore[assignment]
    failed = _outcome(lambda: write(path, checkpoint, module, control_group=group))
    os.fsync = fsync  # type: ignore[assignment]
    (note / str(dist.get_rank())).write_text(failed[0])
    if dist.get_rank() == 0:  # it cleans up while the others go on
        assert newest_complete(path.parent) == path
        assert os.listdir(path.parent) == [path.name]
    return [failed, _outcome(lambda: write(path.parent / "next.ckpt", checkpoint, module, control_group=group))]


def _disk_full(handle: int) -> None:
    raise OSError(28, "No space left on device")


def _die(handle: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("write", "rank"), [(saving.save_sharded, 0), (saving.save_sharded, 1), (saving.save_single_file, 0)]
)
def test_an_os_error_on_one_rank_is_an_ordinary_exception_on_all(
    tmp_path: Path, write: Callable[..., None], rank: int
) -> None:
    path = tmp_path / "saves" / "a.ckpt"
    for (text, seconds), after in run_on_ranks(2, _save_then_fail, path, rank, _disk_full, write, tmp_path):
        assert f"rank {rank}: OSError: [Errno 28] No space left on device" in text
        assert seconds < 10
        assert after[0] == "done"
    assert_equal(run_on_ranks(2, load, path, LAYOUT)[0], reference())


def test_a_rank_killed_while_writing_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    path = tmp_path / "saves" / "a.ckpt"
    with pytest.raises(RemoteError, match="exit code -9"):
        run_on_ranks(2, _save_then_fail, path, 1, _die, saving.save_sharded, tmp_path)
    assert "ost contact with a rank" in (tmp_path / "0").read_text()
    assert newest_complete(path.parent) == path
    assert_equal(run_on_ranks(2, load, path, LAYOUT)[0], reference())
    run_on_ranks(2, sharded.save, path.parent / "b.ckpt", LAYOUT)
    assert sorted(os.listdir(path.parent)) == ["a.ckpt", "b.ckpt"]


def _save_without(path: Path, absent: int) -> list[tuple[str, float]]:
    module, checkpoint, group = _ready()

    def save() -> None:
        saving.save_sharded(path, checkpoint, module, control_group=group, timeout_s=1.5)

    first = ("absent", 0.0) if dist.get_rank() == absent else _outcome(save)
    dist.barrier()
    return [first, _outcome(save)]


@pytest.mark.parametrize("absent", [0, 2])
def test_a_save_that_a_rank_never_calls_names_it_and_the_next_one_works(tmp_path: Path, absent: int) -> None:
    outcomes = run_on_ranks(3, _save_without, tmp_path / "a.ckpt", absent)
    for rank, (first, second) in enumerate(outcomes):
        if rank != absent:
            assert f"save_checkpoint: ranks [{absent}] did not call it within 1.5 s" in first[0]
            assert "is_global_zero" in first[0]
            assert first[1] < 3
        assert second[0] == "done"
    assert_equal(run_on_ranks(1, load, tmp_path / "a.ckpt", Layout())[0], reference())


def _save_different(path: Path, what: str) -> list[tuple[str, float]]:
    """Tensors that are split over ranks, or missing on one, without being DTensors."""
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    group = sharded.control()
    rank = dist.get_rank()
    optimizer = torch.optim.SGD(module.parameters(), momentum=0.9)
    with torch.no_grad():
        if what == "parameter":
            module[0].weight.fill_(rank)
        elif what == "buffer":
            module[1].running_mean.fill_(rank)
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    if what == "state":
        module[0].bias.grad = None if rank == 1 else module[0].bias.grad
    with torch.random.fork_rng():
        if what == "state":
            optimizer.param_groups[0]["lr"] = 0.0
        optimizer.step()
    checkpoint = sharded.checkpoint_of(module, optimizer)
    if what == "callback":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        mesh = init_device_mesh("cpu", (2,))
        checkpoint["callbacks"]["EMA"] = {"weights": [distribute_tensor(torch.ones(4), mesh, [Shard(0)])]}
    result = [_outcome(lambda: saving.save_sharded(path, checkpoint, module, control_group=group))]
    if what == "buffer":
        module[1].running_mean.fill_(-1)
        saving.load(path, module, [optimizer], control_group=group)
        result.append((str(module[1].running_mean.tolist()), 0))
    return result


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("parameter", "'state_dict.0.weight'"),
        ("state", "'optimizer_0.state.0.bias.momentum_buffer'"),
        ("callback", "checkpoint['callbacks']['EMA']['weights'][0] is a sharded tensor"),
    ],
)
def test_what_one_file_cannot_hold_is_refused(tmp_path: Path, what: str, message: str) -> None:
    for outcome in run_on_ranks(2, _save_different, tmp_path / "a.ckpt", what):
        assert message in outcome[0][0]
    assert os.listdir(tmp_path) == []


def test_buffers_that_differ_are_those_of_rank_zero(tmp_path: Path) -> None:
    for outcome in run_on_ranks(2, _save_different, tmp_path / "a.ckpt", "buffer"):
        assert [text for text, _ in outcome] == ["done", "[0.0, 0.0]"]


def _save_alone_by_mistake(path: Path) -> str:
    module, checkpoint, _ = _ready()
    with pytest.raises(ValueError, match="control_group=None"):
        saving.save_sharded(path, checkpoint, module, control_group=None)
    url, group = "s3://bucket/a.ckpt", dist.group.WORLD
    return _outcome(lambda: saving.save_sharded(url, checkpoint, module, control_group=group))[0]


def test_a_missing_group_and_a_url_are_refused(tmp_path: Path) -> None:
    for text in run_on_ranks(2, _save_alone_by_mistake, tmp_path / "a.ckpt"):
        assert "s3://bucket/a.ckpt is not a path" in text


def _load_damaged(path: Path) -> list[str]:
    module, optimizer = sharded.build(LAYOUT)
    group = sharded.control()
    return [
        _outcome(lambda: saving.load(path.parent / name, module, [optimizer], control_group=group))[0]
        for name in ("no index.ckpt", "nothing.ckpt", "cut.ckpt", "short.ckpt")
    ]


def test_what_is_incomplete_is_refused_with_the_newest_complete_one(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    for name in ("a.ckpt", "no index.ckpt", "short.ckpt"):
        run_on_ranks(2, sharded.save, tmp_path / name, LAYOUT)
    os.utime(path / ".metadata")
    run_on_ranks(2, sharded.save, tmp_path / "cut.ckpt", LAYOUT, False)
    (tmp_path / "no index.ckpt" / ".metadata").unlink()
    (tmp_path / "short.ckpt" / "__1_0.distcp").unlink()
    os.utime(tmp_path / "short.ckpt" / ".metadata", (1, 1))
    (tmp_path / "cut.ckpt").write_bytes((tmp_path / "cut.ckpt").read_bytes()[:-100])
    for no_index, nothing, cut, short in run_on_ranks(2, _load_damaged, path):
        assert "incomplete: no .metadata" in no_index
        assert f"The newest complete checkpoint beside it is {path}" in no_index
        assert "there is nothing" in nothing
        assert str(path) in nothing
        assert "damaged" in cut
        assert "short.ckpt" in short
        assert "__1_0.distcp" in short
