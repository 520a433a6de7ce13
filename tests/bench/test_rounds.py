"""Rounds and ratios."""

from __future__ import annotations

import torch

from lightning_longmoe.bench.rounds import compare, run_rounds


def test_contestants_take_turns_and_the_first_round_is_not_counted() -> None:
    order: list[str] = []
    calls = {"a": lambda: order.append("a"), "b": lambda: order.append("b")}
    seconds = run_rounds(calls, 2, torch.device("cpu"))
    assert order == ["a", "b"] * 3
    assert {name: len(values) for name, values in seconds.items()} == {"a": 2, "b": 2}


def test_a_ratio_is_the_median_of_the_ratios_of_each_round() -> None:
    figures = compare({"ours": [1.0, 8.0, 3.0], "base": [2.0, 4.0, 3.0]}, "base")
    assert figures["ours"] == {"ratio": 1.0, "median_s": 3.0, "min_s": 1.0, "max_s": 8.0}
    assert figures["base"]["ratio"] == 1.0
