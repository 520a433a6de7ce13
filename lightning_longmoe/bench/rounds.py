"""Timing in rounds, and the ratios that follow."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from rich.console import Console


def run_rounds(
    contestants: Mapping[str, Callable[[], Any]], rounds: int, device: torch.device
) -> dict[str, list[float]]:
    """Seconds of each contestant in each round, after one round that is not counted.

    Args:
        contestants: by name; each is called once a round.
        rounds: counted rounds, at least 1.
        device: that the calls keep busy; on CUDA the clock stops when it is idle.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(rounds + 1):
        for name, call in contestants.items():
            _wait(device)
            start = time.perf_counter()
            call()
            _wait(device)
            if number:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def compare(seconds: Mapping[str, list[float]], baseline: str) -> dict[str, dict[str, float]]:
    """By name: the ratio to the baseline (median over the rounds), and median, least and most seconds."""
    return {
        name: {
            "ratio": statistics.median(a / b for a, b in zip(values, seconds[baseline], strict=True)),
            "median_s": statistics.median(values),
            "min_s": min(values),
            "max_s": max(values),
        }
        for name, values in seconds.items()
    }


def machine(device: torch.device) -> dict[str, str | int]:
    """What the figures were measured on."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "device": f"{device.type}: {name}",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }


def wide_console() -> Console:
    """For tables with names in full, also where the output is no terminal that tells its width."""
    console = Console()
    return console if console.is_terminal else Console(width=160)
