"""Ranks that call the dispatch differently, or of which one refuses: all raise, none hangs, nothing is computed."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_longmoe import ExpertLayout, PipelinedLLEP, pipelined_llep
from lightning_longmoe.dispatch.pipelined import PipelinedDispatch
from lightning_longmoe.dispatch.plain import PlainDispatch
from tests.pool import RemoteError, run_on_ranks

H, F, E = 6, 4, 4


def _arguments(
    hidden: int = H, ffn: int = F, experts: int = E, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(dist.get_rank() if dist.is_initialized() else 0)
    share = experts // 2
    return {
        "x": torch.randn(5, hidden, generator=generator, dtype=dtype),
        "expert_ids": torch.randint(0, experts, (5, 2), generator=generator),
        "expert_weights": torch.rand(5, 2, generator=generator),
        "gate_up_proj": torch.randn(share, 2 * ffn, hidden, generator=generator, dtype=dtype),
        "down_proj": torch.randn(share, hidden, ffn, generator=generator, dtype=dtype),
    }


DIFFERENT: dict[str, dict[str, Any]] = {
    "layout": {"layout": ExpertLayout(activation="gelu")},
    "one bias": {"down_bias": torch.zeros(E // 2, H)},
    "depth": {"config": PipelinedLLEP(depth=1)},
    "threshold": {"config": PipelinedLLEP(imbalance_threshold=1.0)},
    "tokens of a chunk": {"config": PipelinedLLEP(tokens_per_chunk=2)},
    "most chunks": {"config": PipelinedLLEP(max_chunks=1)},
    "dtype": _arguments(dtype=torch.float64),
    "hidden size": _arguments(hidden=8),
    "ffn size": _arguments(ffn=6),
}


def _call(change: dict[str, Any]) -> Tensor:
    group = dist.group.WORLD
    return pipelined_llep(**{**_arguments(), "group": group, **(change if dist.get_rank() == 1 else {})})


@pytest.mark.parametrize("name", list(DIFFERENT))
def test_settings_that_differ_are_refused_by_both_ranks(name: str) -> None:
    with pytest.raises(RemoteError, match=r"same settings; ranks \[0\] and \[1\] differ. This rank: ") as caught:
        run_on_ranks(2, _call, DIFFERENT[name], timeout_s=30)
    assert set(caught.value.failures) == {0, 1}


def test_another_number_of_experts_is_refused_by_both_ranks() -> None:
    with pytest.raises(RemoteError, match=r"must agree on experts of the group; they have \[4, 8\]") as caught:
        run_on_ranks(2, _call, _arguments(experts=8), timeout_s=30)
    assert set(caught.value.failures) == {0, 1}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "int32 ids": ({"expert_ids": torch.zeros(5, 2, dtype=torch.int32)}, "must be int64"),
    "shape of the weights": ({"expert_weights": torch.rand(5, 3)}, "must have the shape of expert_ids"),
    "three dimensions": ({"x": torch.zeros(1, 5, H)}, r"give x \[N, H\]"),
    "dtype of x alone": ({"x": torch.zeros(5, H, dtype=torch.float64)}, "must have the dtype of x"),
    "no expert": ({"expert_ids": torch.zeros(5, 0, dtype=torch.int64), "expert_weights": torch.zeros(5, 0)}, "K must"),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_one_rank_refuses_the_other_does_not_wait_for(name: str) -> None:
    change, message = REFUSED[name]
    with pytest.raises(RemoteError) as caught:
        run_on_ranks(2, _call, change, timeout_s=30)
    failures = caught.value.failures
    assert "Ranks [1] of an expert group refused their arguments" in failures[0]
    assert re.search(message, failures[1])


def test_after_a_refusal_the_next_call_is_right() -> None:
    assert run_on_ranks(2, _recover) == [True, True]


def _recover() -> bool:
    dispatch = PipelinedDispatch(dist.group.WORLD)
    good = _arguments()
    bad = {**good, "expert_ids": good["expert_ids"].int()} if dist.get_rank() == 1 else good
    before = dispatch(**good)
    with pytest.raises(ValueError, match="refused|int64"):
        dispatch(**bad)
    return torch.equal(dispatch(**good), before)


def test_a_second_derivative_is_refused_also_where_a_constant_comes_in() -> None:
    arguments = {name: t.requires_grad_() if t.is_floating_point() else t for name, t in _arguments().items()}
    arguments["gate_up_proj"], arguments["down_proj"] = (
        torch.randn(E, *t.shape[1:], requires_grad=True) for t in (arguments["gate_up_proj"], arguments["down_proj"])
    )
    y = pipelined_llep(**arguments, group=None)
    (slope,) = torch.autograd.grad(y.sum(), arguments["x"], create_graph=True)
    with pytest.raises(RuntimeError, match="pipelined_llep cannot be differentiated again"):
        (y.sum() + slope.square().sum()).backward()


def _stranger() -> list[str]:
    group = dist.new_group([0])
    messages = []
    for kind in (PipelinedDispatch, PlainDispatch):
        try:
            kind(group)
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_a_group_without_this_rank_and_a_config_that_is_none_are_refused() -> None:
    messages = run_on_ranks(2, _stranger)
    assert messages[0] == []
    assert all("made without this rank" in message for message in messages[1])
    assert len(messages[1]) == 2
    with pytest.raises(ValueError, match=r"config=None is not allowed: give a PipelinedLLEP"):
        pipelined_llep(**_arguments(), group=None, config=None)  # type: ignore[arg-type]


def _bound_after_many_chunks() -> tuple[int, int]:
    from lightning_longmoe.dispatch.exchange import ChunkBound

    before = ChunkBound.of(dist.group.WORLD).value
    config = PipelinedLLEP(tokens_per_chunk=1, max_chunks=None)
    arguments = _arguments()
    many = {name: arguments[name].repeat(5, 1) for name in ("x", "expert_ids", "expert_weights")}
    pipelined_llep(**{**arguments, **many}, group=dist.group.WORLD, config=config)
    return before, ChunkBound.of(dist.group.WORLD).value


def test_the_function_remembers_how_many_chunks_its_group_has_needed() -> None:
    assert run_on_ranks(2, _bound_after_many_chunks) == [(16, 25)] * 2
