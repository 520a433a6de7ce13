"""What is alive in a forward and backward of all ranks, measured, at a shape of the paper's proportions."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lightning_longmoe.bench import dispatch
from lightning_longmoe.dispatch.profiles import PROFILES

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
