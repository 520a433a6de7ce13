"""What is alive in a forward and backward of all ranks, measured, at a shape of the paper's proportions."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from lightning_longmoe.bench import dispatch
from lightning_longmoe.callbacks.tracked_bytes import TrackedBytes
from lightning_longmoe.config import PipelinedLLEP
from lightning_longmoe.dispatch.pipelined import PipelinedDispatch
from lightning_longmoe.dispatch.profiles import PROFILES
from tests.pool import run_on_ranks

SHAPE = replace(dispatch.SCALED, tokens=1280, hidden=64, ffn=32, experts=32, ranks=4, top_k=8)


@pytest.mark.parametrize("profile", ["balanced", "80%/16"])
def test_ten_chunks_hold_a_quarter_at_most_of_what_unchunked_dispatch_holds(profile: str) -> None:
    figures = dispatch.measured(SHAPE, PROFILES[profile], torch.device("cpu"), rounds=1)
    assert figures["PipelinedLLEP depth 2"]["peak_ratio"] <= 0.25
    assert figures["PipelinedLLEP depth 1"]["peak_ratio"] <= figures["PipelinedLLEP depth 2"]["peak_ratio"]
    assert figures["unchunked LLEP"]["peak_ratio"] == 1.0


def test_routing_to_few_experts_costs_a_tenth_more_at_most() -> None:
    peaks = [
        dispatch.measured(SHAPE, PROFILES[name], torch.device("cpu"), rounds=1)["PipelinedLLEP depth 2"]
        for name in ("balanced", "80%/16")
    ]
    assert peaks[1]["peak_mib_of_all_ranks"] <= 1.1 * peaks[0]["peak_mib_of_all_ranks"]


def _live_over_a_group(depth: int) -> tuple[int, int]:
    """The most that was alive in a forward and backward, and the ledger's peak; everything counted in."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    dispatch = PipelinedDispatch(dist.group.WORLD, PipelinedLLEP(tokens_per_chunk=103, depth=depth))
    x = torch.randn(1024, 64, generator=generator, requires_grad=True)
    ids = torch.randint(0, 8, (1024, 8), generator=generator)
    weights = torch.rand(1024, 8, generator=generator).requires_grad_()
    stacks = [torch.randn(4, *shape, generator=generator).requires_grad_() for shape in ((64, 64), (64, 32))]
    grad = torch.ones(1024, 64)
    with TrackedBytes() as tracked:
        tracked.add([x, ids, weights, *stacks, grad])
        y = dispatch(x, ids, weights, *stacks)
        y.backward(grad)
    return tracked.peak, dispatch.ledger.peak_bytes


@pytest.mark.parametrize("depth", [1, 2])
def test_over_a_process_group_nothing_much_is_alive_that_is_not_booked(depth: int) -> None:
    """A collective that is done keeps its buffers as long as someone holds its handle."""
    for live, booked in run_on_ranks(2, _live_over_a_group, depth):
        assert live <= 1.1 * booked
