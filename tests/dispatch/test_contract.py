"""What holds for any routing: collectives, the size of every buffer, the host's waits. Field cases R3, R4, R6, P1."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_longmoe.config import PipelinedLLEP
from lightning_longmoe.dispatch.exchange import FIRST_BOUND
from lightning_longmoe.dispatch.experts import ProductPaths
from lightning_longmoe.dispatch.pipelined import PipelinedDispatch
from lightning_longmoe.dispatch.unchunked import HOME_ONLY
from tests.dispatch.cases import (
    CASES,
    SMALL,
    Case,
    forward_backward,
    joined,
    largest_error,
    on_virtual_ranks,
    reference,
)
from tests.pool import run_on_ranks

COLLECTIVES = ("AllGather", "AllToAll")


def logged(cases: list[Case], config: PipelinedLLEP) -> list[list[tuple[Any, ...]]]:
    logs = []
    for case in cases:
        dispatch = PipelinedDispatch(dist.group.WORLD, config)
        dispatch.log = []
        forward_backward(dispatch, case.slice_for(dist.get_rank()), case.layout)
        logs.append(dispatch.log)
    return logs


def collectives(log: list[tuple[Any, ...]]) -> list[str]:
    return [entry[0] for entry in log if entry[0] in COLLECTIVES]


@pytest.mark.parametrize("depth", [1, 2])
def test_number_and_order_of_collectives_do_not_depend_on_rank_or_routing(depth: int) -> None:
    routings = ("uniform", "one", "idle", "hot 0.8 2", "rotating")
    cases = [Case((10, 7, 10, 3), routing) for routing in routings] + [Case((0, 10, 0, 1), "one")]
    by_rank = run_on_ranks(4, logged, cases, replace(SMALL, depth=depth))
    sequences = {tuple(collectives(log)) for logs in by_rank for log in logs}
    (sequence,) = sequences
    chunks = 3  # ceil(10 / 4)
    # counts: token counts and row counts; forward: out and back; backward: x, gradients, weights, and two back
    assert sequence.count("AllGather") == 2
    assert sequence.count("AllToAll") == chunks * (2 + 5)
    assert sequence[:2] == ("AllGather", "AllGather")


def test_the_host_waits_once_a_forward_and_never_in_a_backward() -> None:
    for logs in run_on_ranks(2, logged, [Case((9, 4), "hot 0.8 2")], SMALL):
        names = [entry[0] for entry in logs[0]]
        assert names.count("ToHost") == 1
        assert names.index("ToHost") == 2


@pytest.mark.parametrize(
    "case", [Case((13, 0)), Case((1, 400), "hot 0.9 1"), Case((9, 9), "idle"), Case((12, 30), "one")]
)
def test_ranks_agree_on_the_size_of_every_message(case: Case) -> None:
    """R4."""
    first, second = (logs[0] for logs in run_on_ranks(2, logged, [case], replace(SMALL, tokens_per_chunk=4)))
    assert len(first) == len(second)
    for mine, theirs in zip(first, second, strict=True):
        assert mine[0] == theirs[0]
        if mine[0] == "AllToAll":
            assert mine[1][1] == theirs[2][0]
            assert mine[2][1] == theirs[1][0]
        if mine[0] == "PointToPoint":
            assert len(mine[1]) == len(theirs[2])
            assert len(mine[2]) == len(theirs[1])


@pytest.mark.parametrize("threshold", [1.0, HOME_ONLY])
@pytest.mark.parametrize("depth", [1, 2])
def test_no_buffer_exceeds_the_cap_when_every_token_goes_to_one_expert(depth: int, threshold: float) -> None:
    """R3: 64 tokens to expert 0, 8 a chunk, with a plan that balances and with one that does not."""
    case = Case((64, 64), "hot 1.0 1", top_k=2)
    config = PipelinedLLEP(tokens_per_chunk=8, min_tokens_per_gemm=1, imbalance_threshold=threshold, depth=depth)
    ranks, ours = on_virtual_ranks(case, config)
    _, uncapped = on_virtual_ranks(case, replace(config, tokens_per_chunk=1000))
    bound = 2 * 8 * 2 * case.hidden * 8
    for ledger in ranks.ledgers:
        rows = [n for name, n in ledger.largest_buffer.items() if "rows" in name or name == "row gradient"]
        assert max(rows) <= bound
        if threshold == 1.0:
            assert max(rows) == bound // 2  # the even share
    assert ranks.plans[0].bound_rows * case.hidden * 8 == bound
    assert ranks.plans[0].plan.imbalance_before == 2.0
    assert largest_error(ours, uncapped) <= 1e-12


def test_the_peak_grows_neither_with_the_tokens_nor_with_the_skew() -> None:
    config = PipelinedLLEP(tokens_per_chunk=32, max_chunks=None, min_tokens_per_gemm=1)
    shape = {"hidden": 64, "ffn": 32, "top_k": 2}
    with_the_tokens = ("x", "x gradient", "y gradient", "routes")
    peaks = {}
    for routing in ("uniform", "hot 0.95 1"):
        for tokens in (96, 384):
            ranks, _ = on_virtual_ranks(Case((tokens,) * 4, routing, **shape), config)  # type: ignore[arg-type]
            at_peak = [ledger.at_peak.items() for ledger in ranks.ledgers]
            peaks[routing, tokens] = max(sum(n for k, n in items if k not in with_the_tokens) for items in at_peak)
    assert peaks["uniform", 384] <= 1.15 * peaks["uniform", 96]
    guest = 3 * 64 * 32 * 8 * 2  # weights, and the sum of their gradients
    assert peaks["hot 0.95 1", 96] <= 1.15 * (peaks["uniform", 96] + guest)
    assert peaks["hot 0.95 1", 384] <= 1.15 * (peaks["uniform", 384] + guest)


@contextmanager
def counted_reads() -> Iterator[list[str]]:
    """The calls that read a tensor on the host."""
    calls: list[str] = []
    kept = {name: getattr(Tensor, name) for name in ("item", "tolist", "nonzero", "cpu", "__bool__", "__int__")}
    for name, function in kept.items():

        def counted(self: Tensor, *args: Any, _name: str = name, _function: Any = function, **kwargs: Any) -> Any:
            calls.append(_name)
            return _function(self, *args, **kwargs)

        setattr(Tensor, name, counted)
    try:
        yield calls
    finally:
        for name, function in kept.items():
            setattr(Tensor, name, function)


@pytest.mark.parametrize("experts", [8, 64])
def test_four_layers_read_the_device_four_times_whatever_the_number_of_experts(experts: int) -> None:
    """P1. That nothing else does is shown by the dry run: on the meta device every other read would fail."""
    case = Case((40,), "hot 0.8 2", experts=experts)
    tensors = {n: t.requires_grad_(t.is_floating_point()) for n, t in case.make().items() if n != "upstream"}
    layers = [PipelinedDispatch(None, SMALL) for _ in range(4)]
    with counted_reads() as calls:
        x = tensors.pop("x")
        for layer in layers:
            x = layer(x, **tensors)
        forward = list(calls)
        x.sum().backward()
    assert forward == ["cpu"] * 4
    assert calls == forward


def test_more_chunks_than_ever_before_cost_one_more_exchange_once() -> None:
    config = PipelinedLLEP(tokens_per_chunk=1, max_chunks=None, min_tokens_per_gemm=1)
    case = Case((FIRST_BOUND + 7,))
    dispatch = PipelinedDispatch(None, config)
    for exchanges in (2, 1):
        dispatch.log = []
        ours = forward_backward(dispatch, case.make(), case.layout)
        assert [name for name, *_ in dispatch.log].count("ToHost") == exchanges
        assert largest_error(ours, reference(case)) <= 1e-12
    assert dispatch.balance.last is not None
    assert dispatch.balance.last.chunks == FIRST_BOUND + 7


def two_steps_in_dirty_memory(case: Case) -> list[dict[str, Tensor]]:
    dispatch = PipelinedDispatch(dist.group.WORLD, SMALL)
    dispatch.fill = float("nan")
    return [forward_backward(dispatch, case.slice_for(dist.get_rank()), case.layout) for _ in range(2)]


def test_dirty_memory_is_never_read() -> None:
    """R6: unequal groups, empty ones too, and every buffer full of NaN."""
    case = Case((9, 2), "hot 0.9 3", bias=True)
    for parts in zip(*run_on_ranks(2, two_steps_in_dirty_memory, case), strict=True):
        assert largest_error(joined(list(parts)), reference(case)) <= 1e-12


@pytest.mark.parametrize("transposed", [False, True])
def test_the_grouped_product_agrees_with_the_loop(transposed: bool) -> None:
    """R6 where torch's grouped product runs: rows past the last group are never made, idle experts stay zero."""
    layout = replace(CASES["uniform"].layout, transposed=transposed)
    case = Case((40, 9), "hot 0.9 3", hidden=16, ffn=8, dtype=torch.bfloat16, layout=layout)
    loop, grouped = (
        on_virtual_ranks(case, SMALL, fill=float("nan"), paths=ProductPaths(grouped=kind, upcast=True))[1]
        for kind in (False, True)
    )
    assert largest_error(grouped, {n: t.float() for n, t in loop.items()}) <= 2e-2


def test_balance_figures_come_from_the_plan() -> None:
    case = Case((64, 64), "hot 1.0 1", top_k=2)
    dispatches = [PipelinedDispatch(None, PipelinedLLEP(tokens_per_chunk=8, min_tokens_per_gemm=1))]
    ranks, _ = on_virtual_ranks(case, dispatches[0].config)
    x, weights = ranks.ranks[0].x, ranks.ranks[0].weights
    dispatches[0].balance.add(ranks.plans[0], weights, x)
    (figures,) = dispatches[0].balance.take()
    assert dispatches[0].balance.take() == []
    assert (figures.chunks, figures.imbalance_before, figures.imbalance_after) == (8, 2.0, 1.0)
    assert (figures.guests, figures.guest_rows) == (1, 128)
    assert figures.guest_bytes == 3 * case.hidden * case.ffn * 8
    assert (figures.largest_receive, figures.receive_bound) == (16, 32)
    assert figures.row_bytes == case.hidden * 8


def test_a_ceiling_on_chunks_is_told_once_with_the_bytes() -> None:
    config = PipelinedLLEP(tokens_per_chunk=2, max_chunks=3, min_tokens_per_gemm=77)
    tensors = {n: t for n, t in Case((100,)).make().items() if n != "upstream"}
    with pytest.warns(UserWarning, match=r"chunks of 34 tokens out of 100.*MiB instead of"):
        PipelinedDispatch(None, config)(**tensors)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        PipelinedDispatch(None, config)(**tensors)
