"""What the benchmarks share: timing in rounds, the ratios that follow, ranks on one machine, and tables."""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table


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


def table(title: str, *columns: str) -> Table:
    """A table whose first column names the rows; the others are numbers."""
    made = Table(title=title, title_justify="left")
    made.add_column("")
    for column in columns:
        made.add_column(column, justify="right")
    return made


def add_times(parser: argparse.ArgumentParser) -> None:
    """The options that every benchmark has."""
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def show(report: dict[str, Any], as_json: bool, print_tables: Callable[[Console, dict[str, Any]], None]) -> None:
    """Print a report: as one JSON object, or the machine and tables."""
    if as_json:
        print(json.dumps(report, indent=1))
        return
    console = wide_console()
    console.print(" - ".join(f"{key} {value}" for key, value in report["machine"].items()))
    print_tables(console, report)


def run_on_gloo_ranks(main: Callable[..., Any], ranks: int, *arguments: Any) -> Any:
    """What rank 0 of ``ranks`` gloo processes on this machine returns.

    Args:
        main: a function of a module's top level; called with ``arguments`` on every rank, with a process group; what it
            returns must be JSON.
    """
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank_main, (main, ranks, torch.get_num_threads(), folder, arguments), nprocs=ranks)
        return json.loads((Path(folder) / "figures.json").read_text())


def _rank_main(
    rank: int, main: Callable[..., Any], ranks: int, threads: int, folder: str, arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(max(1, threads // ranks))
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    figures = main(*arguments)
    if rank == 0:
        (Path(folder) / "figures.json").write_text(json.dumps(figures))
    dist.barrier()
    dist.destroy_process_group()
