"""``longmoe bench boundaries``: checkpoint offload against boundaries that stay on the device.

Four parts. *Planned*: the paper's Table 3 from its model's numbers alone. *Device bytes by depth*: what boundaries hold
on the device, counted by the offloader, for deeper and deeper models. *Host bytes*: what is held for the payload, and
what torch's allocator of pinned memory would hold, which rounds each tensor up to a power of two (computed). *Steps*:
time and peak of forward and backward with budgets off, half and full, in rounds.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from lightning_longmoe.bench.rounds import add_times, compare, machine, run_rounds, show, table
from lightning_longmoe.boundaries import BoundaryOffloader, plan_boundaries, reference_checkpoint
from lightning_longmoe.callbacks.tracked_bytes import TrackedBytes
from lightning_longmoe.config import BoundaryOffload

GIB = 2**30
DEPTHS = (4, 16, 64)
OFF = "on the device"
PAPER_BOUNDARIES = 2 * 24 - 1
PAPER_BOUNDARY_BYTES = 557_056 // 8 * 2880 * 2
"""gpt-oss-20b on 8 ranks (arXiv 2609.14306, Table 3): 24 layers of two parts, H 2880, bfloat16."""
SHAPES = {"scaled": (24, 8192, 64), "paper": (47, 69_632, 2880)}
"""What is timed: parts, tokens, H. "paper" needs a device of 40 GiB."""


def main(argv: list[str] | None = None) -> None:
    """Run it and print tables, or with ``--json`` one JSON object."""
    options = _parser().parse_args(argv)
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    depth, tokens, hidden = SHAPES[options.shape]
    report = {
        "machine": machine(device),
        "planned": planned(),
        "depth": {count: by_depth(count, device) for count in DEPTHS},
        "host": host_bytes(device),
        "shape": f"{depth} parts, N {tokens}, H {hidden}, {options.dtype}",
        "steps": steps(depth, tokens, hidden, dtype, device, options.rounds),
    }
    show(report, options.json, _print)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="longmoe bench boundaries", description=__doc__.split("\n\n")[0])
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--shape", default="scaled", choices=list(SHAPES), help="what is timed")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="of what is timed")
    add_times(parser)
    return parser


def planned() -> dict[str, dict[str, float]]:
    """Boundaries offloaded and GiB of one rank, by host budget; ours keeps nothing back here, as the paper does."""
    rows = {}
    for name, budget in (("8GiB", "8GiB"), ("16GiB", "16GiB"), ("full", None)):
        plan = plan_boundaries(
            PAPER_BOUNDARIES, PAPER_BOUNDARY_BYTES, BoundaryOffload(host_budget=budget, keep_last=0)
        )
        rows[name] = {
            "offloaded": plan.offloaded,
            "host_gib": plan.host_bytes / GIB,
            "rounded_gib": plan.offloaded * _power_of_two(plan.boundary_bytes) / GIB,
            "device_gib": plan.device_bytes / GIB,
        }
    return rows


def _power_of_two(nbytes: int) -> int:
    return 1 << (nbytes - 1).bit_length()


# ---------------------------------------------------------------------------------------------------------------------
# Measured
# ---------------------------------------------------------------------------------------------------------------------
class _Part(nn.Module):
    """A residual two-layer perceptron of width 4H: what lives in it for the backward is nine times its input."""

    def __init__(self, hidden: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, 4 * hidden, bias=False, dtype=dtype, device=device)
        self.down = nn.Linear(4 * hidden, hidden, bias=False, dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.silu(self.up(x)))


def _step(parts: nn.ModuleList, x: Tensor, checkpoint: Callable[..., Any]) -> None:
    hidden = x * 1.0
    for part in parts:
        hidden = checkpoint(part, hidden)
    hidden.float().square().mean().backward()
    parts.zero_grad()
    x.grad = None


def _model(depth: int, tokens: int, hidden: int, dtype: torch.dtype, device: torch.device) -> tuple[Any, Tensor]:
    torch.manual_seed(0)
    parts = nn.ModuleList([_Part(hidden, dtype, device) for _ in range(depth)])
    return parts, torch.randn(tokens, hidden, dtype=dtype, device=device, requires_grad=True)


def by_depth(depth: int, device: torch.device) -> dict[str, float]:
    """Bytes of boundaries of one step on the device, as multiples of one boundary, without and with offload."""
    parts, x = _model(depth, 64, 32, torch.float32, device)
    rows = {}
    for name, config in ((OFF, BoundaryOffload(keep_last=depth)), ("offloaded", BoundaryOffload())):
        offloader = BoundaryOffloader(config)
        _step(parts, x, offloader.checkpoint)
        rows[name] = offloader.stats()["peak_device_bytes"] / x.nbytes
    return rows


def host_bytes(device: torch.device) -> dict[str, float]:
    """Host bytes over payload after two steps of an odd size, and those of power-of-two rounding."""
    parts, x = _model(16, 189, 36, torch.float32, device)
    offloader = BoundaryOffloader()
    for _ in range(2):
        _step(parts, x, offloader.checkpoint)
    stats = offloader.stats()
    return {
        "held_over_payload": stats["host_bytes"] / stats["payload_bytes"],
        "rounded_over_payload": _power_of_two(x.nbytes) / x.nbytes,
        "allocations": offloader.host_allocations,
    }


def steps(
    depth: int, tokens: int, hidden: int, dtype: torch.dtype, device: torch.device, rounds: int
) -> dict[str, dict[str, float]]:
    """Ratios to boundaries on the device in time and peak of one forward and backward."""
    parts, x = _model(depth, tokens, hidden, dtype, device)
    half, full = BoundaryOffloader(BoundaryOffload(host_budget=depth // 2 * x.nbytes)), BoundaryOffloader()
    calls = {
        OFF: functools.partial(_step, parts, x, reference_checkpoint),
        "budget: half": functools.partial(_step, parts, x, half.checkpoint),
        "budget: full": functools.partial(_step, parts, x, full.checkpoint),
    }
    figures = compare(run_rounds(calls, rounds, device), OFF)
    slabs = {OFF: 0, "budget: half": half.stats()["host_bytes"], "budget: full": full.stats()["host_bytes"]}
    peaks = {name: _peak_bytes(call, parts, x, device, slabs[name]) for name, call in calls.items()}
    for name, row in figures.items():
        row["peak_ratio"], row["peak_mib"] = peaks[name] / peaks[OFF], peaks[name] / 2**20
    return figures


def _peak_bytes(call: Callable[[], None], parts: nn.Module, x: Tensor, device: torch.device, slab: int) -> int:
    """The most that is alive on the device; the CPU stands for one, so there the host's slab is taken off."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        call()
        return torch.cuda.max_memory_allocated(device)
    with TrackedBytes() as tracked:
        tracked.add([x, *parts.parameters()])
        call()
    return tracked.peak - slab


# ---------------------------------------------------------------------------------------------------------------------
# Tables
# ---------------------------------------------------------------------------------------------------------------------
def _print(console: Console, report: dict[str, Any]) -> None:
    made = table("Planned: gpt-oss-20b, 8 ranks, 557,056 tokens", "offloaded", "host GiB", "rounded up", "device GiB")
    for budget, row in report["planned"].items():
        sizes = (f"{row[key]:.2f}" for key in ("host_gib", "rounded_gib", "device_gib"))
        made.add_row(f"budget {budget}", str(row["offloaded"]), *sizes)
    console.print(made)
    made = table("Boundaries on the device, in tokens x H x bytes", OFF, "offloaded")
    for depth, row in report["depth"].items():
        made.add_row(f"{depth} parts", f"{row[OFF]:.0f}", f"{row['offloaded']:.0f}")
    console.print(made)
    host = report["host"]
    console.print(
        f"Host memory held over payload {host['held_over_payload']:.3f}; rounded up to powers of two it would be"
        f" {host['rounded_over_payload']:.3f}; page-locked {host['allocations']} time(s)."
    )
    columns = (f"time to {OFF}", "peak to it", "median s", "range s", "peak MiB")
    made = table(f"Forward and backward: {report['shape']}", *columns)
    for name, row in report["steps"].items():
        times = f"{row['min_s']:.3f} - {row['max_s']:.3f}"
        peak = (f"{row['peak_ratio']:.2f}", f"{row['peak_mib']:.1f}")
        made.add_row(name, f"{row['ratio']:.2f}", peak[0], f"{row['median_s']:.3f}", times, peak[1])
    console.print(made)
