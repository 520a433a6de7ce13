"""The pool of ranks that all other distributed tests stand on."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest
import torch
import torch.distributed as dist

from tests.pool import RemoteError, run_on_ranks


def _sum_of_ranks(offset: int, scale: int = 1) -> tuple[int, float]:
    total = torch.tensor(float(dist.get_rank() + offset) * scale)
    dist.all_reduce(total)
    return dist.get_rank(), total.item()


def _seen_by_lightning() -> tuple[bool, int, int, int]:
    from lightning.fabric.plugins.environments import TorchElasticEnvironment

    environment = TorchElasticEnvironment()
    return environment.detect(), environment.global_rank(), environment.local_rank(), environment.world_size()


def _join_by_environment() -> tuple[bool, float]:
    before = dist.is_initialized()
    dist.init_process_group("gloo")
    return before, _sum_of_ranks(0)[1]


def _make_a_second_group() -> float:
    dist.destroy_process_group()
    return _join_by_environment()[1]


def _shard_and_add(first: int, second: int) -> torch.Tensor:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.new_group([0])  # shifts the names of the mesh's groups from one task to the next
    if first:
        dist.new_group([0, 1])
    mesh = init_device_mesh("cpu", (2,))
    values = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
    return (values * second).sum().full_tensor()


def _leave_traces() -> None:
    os.environ["LONGMOE_TRACE"] = "1"
    os.chdir("/")
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(7)
    random.seed(7)


def _traces() -> tuple[bool, str, torch.dtype, int, int]:
    return "LONGMOE_TRACE" in os.environ, os.getcwd(), torch.get_default_dtype(), torch.initial_seed(), os.getpid()


def _fail_on_rank_one() -> None:
    if dist.get_rank() == 1:
        print("rank one says this before it fails")
        raise ValueError("the seventh seal")
    dist.barrier()


def _raise_checkpoint_exception() -> None:
    from torch.distributed.checkpoint.api import CheckpointException

    raise CheckpointException("torch derives it from BaseException", {})


def _set_signals_back() -> None:
    """As a Trainer does when it ends."""
    signal.signal(signal.SIGUSR1, signal.getsignal(signal.SIGUSR1) or signal.SIG_DFL)


def _sleep_on_rank_three() -> int:
    if dist.get_rank() == 3:
        time.sleep(600)
    return dist.get_rank()


def _die_on_rank_one() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def _unpicklable() -> object:
    return lambda: None


@pytest.mark.parametrize("world_size", [4, 2, 1])
def test_results_come_back_in_rank_order(world_size: int) -> None:
    expected = 3.0 * sum(rank + 10 for rank in range(world_size))
    assert run_on_ranks(world_size, _sum_of_ranks, 10, scale=3) == [(rank, expected) for rank in range(world_size)]


def test_ranks_look_like_torchrun_to_lightning() -> None:
    assert run_on_ranks(2, _seen_by_lightning) == [(True, 0, 0, 2), (True, 1, 1, 2)]


def test_a_task_may_make_its_own_group() -> None:
    assert run_on_ranks(2, _join_by_environment, init_group=False) == [(False, 1.0), (False, 1.0)]
    assert run_on_ranks(2, _make_a_second_group) == [1.0, 1.0]


def test_meshes_of_one_task_do_not_reach_into_the_next() -> None:
    for task in range(2):
        assert [x.item() for x in run_on_ranks(2, _shard_and_add, task, 2)] == [12.0, 12.0]


def test_a_task_sees_no_traces_of_the_one_before() -> None:
    before = run_on_ranks(2, _traces)
    run_on_ranks(2, _leave_traces)
    assert run_on_ranks(2, _traces) == before
    assert before[0][:4] == (False, os.getcwd(), torch.float32, 0)


def test_an_error_names_rank_type_text_and_output() -> None:
    with pytest.raises(RemoteError, match=r"rank 1: ValueError: the seventh seal") as caught:
        run_on_ranks(2, _fail_on_rank_one)
    assert caught.value.rank == 1
    assert "in _fail_on_rank_one" in str(caught.value)
    assert "rank one says this before it fails" in str(caught.value)


def test_an_error_outside_exception_comes_back_from_every_rank() -> None:
    with pytest.raises(RemoteError, match="CheckpointException") as caught:
        run_on_ranks(2, _raise_checkpoint_exception)
    assert sorted(caught.value.failures) == [0, 1]


def test_a_result_that_cannot_travel_is_an_error() -> None:
    with pytest.raises(RemoteError, match="pickle"):
        run_on_ranks(1, _unpicklable)


def test_a_hang_and_a_killed_process_are_reported_and_replaced() -> None:
    run_on_ranks(4, _set_signals_back)
    with pytest.raises(TimeoutError, match=r"No answer from ranks \[3\] within 8.0 s \(ranks \[0, 1, 2\] ans") as hang:
        run_on_ranks(4, _sleep_on_rank_three, timeout_s=8.0)
    assert "in _sleep_on_rank_three" in str(hang.value)
    with pytest.raises(RemoteError, match="rank 1: the process ended with exit code -9"):
        run_on_ranks(2, _die_on_rank_one)
    assert run_on_ranks(4, _sum_of_ranks, 0) == [(rank, 6.0) for rank in range(4)]


def test_calls_that_cannot_work_are_refused() -> None:
    with pytest.raises(ValueError, match="world_size=5"):
        run_on_ranks(5, _traces)
    with pytest.raises(ValueError, match="top level"):
        run_on_ranks(1, lambda: None)
