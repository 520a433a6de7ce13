"""``longmoe bench dispatch``: PipelinedLLEP against unchunked LLEP and plain expert parallelism.

Two parts. *Booked peaks*: the ledgers of dry runs at the paper's shapes, forward and backward, with nothing allocated.
*Measured*: all ranks as virtual ranks on one device, forward and backward: times in rounds, and the most that was alive
beyond the inputs. There are no links between virtual ranks, so a time is arithmetic and memory traffic alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from rich.console import Console

from lightning_longmoe.bench.rounds import add_times, compare, machine, run_rounds, show, table
from lightning_longmoe.callbacks.tracked_bytes import TrackedBytes
from lightning_longmoe.config import PipelinedLLEP
from lightning_longmoe.dispatch.dry import PAPER_SHAPES, DispatchShape, dry_pipelined, dry_unchunked
from lightning_longmoe.dispatch.experts import ExpertStack
from lightning_longmoe.dispatch.plan import plan_dispatch
from lightning_longmoe.dispatch.profiles import PROFILES, Profile
from lightning_longmoe.dispatch.region import RegionInputs
from lightning_longmoe.dispatch.unchunked import HOME_ONLY
from lightning_longmoe.dispatch.virtual import UnchunkedVirtualRanks, VirtualRanks

GIB = 2**30
SCALED = DispatchShape(tokens=2048, top_k=4, hidden=256, ffn=128, experts=32, ranks=4, dtype=torch.float32)
"""A shape that a small machine runs in a second."""
NAMES = ("PipelinedLLEP depth 2", "PipelinedLLEP depth 1", "unchunked LLEP", "plain EP")


def main(argv: list[str] | None = None) -> None:
    """Run it and print tables, or with ``--json`` one JSON object."""
    options = _parser().parse_args(argv)
    device = torch.device(options.device)
    shape = SCALED if options.shape == "scaled" else PAPER_SHAPES[options.shape]
    report = {
        "machine": machine(device),
        "booked": {name: booked_peaks(paper) for name, paper in PAPER_SHAPES.items()},
        "balance": {name: balance(PAPER_SHAPES["65K top-8"], profile) for name, profile in PROFILES.items()},
        "measured": {
            "shape": options.shape,
            "profiles": {
                name: measured(shape, PROFILES[name], device, options.rounds) for name in ("balanced", "80%/16")
            },
        },
    }
    show(report, options.json, _print)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="longmoe bench dispatch", description=__doc__.split("\n\n")[0])
    parser.add_argument("--device", default="cpu", help="cpu or cuda; where times are measured")
    parser.add_argument(
        "--shape", default="scaled", choices=["scaled", *PAPER_SHAPES], help="what is timed (peaks: the paper's shapes)"
    )
    add_times(parser)
    return parser


# ---------------------------------------------------------------------------------------------------------------------
# Booked peaks
# ---------------------------------------------------------------------------------------------------------------------
def contestants(config: PipelinedLLEP = PipelinedLLEP()) -> dict[str, tuple[bool, PipelinedLLEP]]:
    """By name: whether it is chunked, and its config. Plain EP is the unchunked one with every row at home."""
    home = replace(config, imbalance_threshold=HOME_ONLY)
    configs = (replace(config, depth=2), replace(config, depth=1), config, home)
    return {name: (number < 2, chosen) for number, (name, chosen) in enumerate(zip(NAMES, configs, strict=True))}


def booked_peaks(shape: DispatchShape) -> dict[str, dict[str, dict[str, float]]]:
    """GiB of the worst rank by profile and contestant: all counted in, and beyond weights and their gradients."""
    peaks: dict[str, dict[str, dict[str, float]]] = {}
    for profile in ("balanced", "30%/16", "80%/16", "95%/16"):
        peaks[profile] = {}
        for name, (chunked, config) in contestants().items():
            counts = shape.draw(PROFILES[profile], config)
            run: Callable[..., Any] = dry_pipelined if chunked else dry_unchunked
            ledgers = [run(shape, counts, rank, config) for rank in range(shape.ranks)]
            peaks[profile][name] = {
                "all_gib": max(ledger.peak_bytes for ledger in ledgers) / GIB,
                "working_gib": max(ledger.peak_working_bytes for ledger in ledgers) / GIB,
            }
    return peaks


def balance(shape: DispatchShape, profile: Profile) -> dict[str, float]:
    """Worst send ratio of a source, largest receive of a chunk over the even share, and loads before and after."""
    config = PipelinedLLEP()
    plan = plan_dispatch(shape.draw(profile, config), config=config)
    return {
        "send_ratio": max(plan.send_ratio(source) for source in range(shape.ranks)),
        "receive_ratio": plan.receive_ratio(),
        "load_before": plan.imbalance_before,
        "load_after": plan.imbalance_after,
        "guests": float(len(plan.guests)),
    }


# ---------------------------------------------------------------------------------------------------------------------
# Measured
# ---------------------------------------------------------------------------------------------------------------------
def measured(shape: DispatchShape, profile: Profile, device: torch.device, rounds: int) -> dict[str, dict[str, float]]:
    """Seconds of forward and backward on all virtual ranks, the peak beyond the inputs, and ratios to unchunked LLEP.

    Chunks are a tenth of the tokens where the config's own would not cut the shape at all.
    """
    config = PipelinedLLEP(tokens_per_chunk=min(4096, -(-shape.tokens // 10)), min_tokens_per_gemm=64)
    inputs, ids = _random_inputs(shape, profile, device)
    grads = [torch.ones_like(one.x) for one in inputs]

    def both_passes(chunked: bool, chosen: PipelinedLLEP) -> None:
        kind = VirtualRanks if chunked else UnchunkedVirtualRanks
        ranks = kind(inputs, ids, chosen, shape.layout)
        ranks.forward()
        ranks.backward(grads)

    calls = {
        name: lambda chunked=chunked, chosen=chosen: both_passes(chunked, chosen)  # type: ignore[misc]
        for name, (chunked, chosen) in contestants(config).items()
    }
    figures = compare(run_rounds(calls, rounds, device), baseline="unchunked LLEP")
    lasting = [tensor for one in inputs for tensor in (one.x, one.expert_weights, *dict(one.weights.items()).values())]
    peaks = {name: _peak_bytes(call, [*lasting, *ids, *grads], device) for name, call in calls.items()}
    for name, peak in peaks.items():
        figures[name]["peak_mib_of_all_ranks"] = peak / 2**20
        figures[name]["peak_ratio"] = peak / peaks["unchunked LLEP"]
    return figures


def _peak_bytes(call: Callable[[], None], lasting: list[torch.Tensor], device: torch.device) -> int:
    """The most that was alive in a call beyond the tensors that it was given."""
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        call()
        return torch.cuda.max_memory_allocated(device) - before
    with TrackedBytes() as tracked:
        tracked.add(lasting)
        before = tracked.current
        call()
    return tracked.peak - before


def _random_inputs(
    shape: DispatchShape, profile: Profile, device: torch.device
) -> tuple[list[RegionInputs], list[torch.Tensor]]:
    generator = torch.Generator(device).manual_seed(0)
    template, _ = shape.meta_inputs()

    def normal(like: torch.Tensor) -> torch.Tensor:
        return torch.empty(like.shape, dtype=like.dtype, device=device).normal_(std=0.1, generator=generator)

    chances = torch.tensor(profile.probabilities(shape.experts), dtype=torch.float32, device=device)
    inputs, ids = [], []
    for _ in range(shape.ranks):
        weights = ExpertStack(**{name: normal(tensor) for name, tensor in template.weights.items()})  # type: ignore[arg-type]
        inputs.append(RegionInputs(normal(template.x), normal(template.expert_weights), weights))
        routes = torch.multinomial(chances, shape.tokens * shape.top_k, replacement=True, generator=generator)
        ids.append(routes.view(shape.tokens, shape.top_k))
    return inputs, ids


# ---------------------------------------------------------------------------------------------------------------------
# Tables
# ---------------------------------------------------------------------------------------------------------------------
def _print(console: Console, report: dict[str, Any]) -> None:
    for shape, profiles in report["booked"].items():
        title = f"Booked peak of the worst rank, {shape}, GiB: all (beyond weights and gradients)"
        made = table(title, *NAMES, "saved")
        for profile, peaks in profiles.items():
            cells = [f"{peaks[name]['all_gib']:.2f} ({peaks[name]['working_gib']:.2f})" for name in NAMES]
            saved = 1 - peaks[NAMES[0]]["working_gib"] / peaks["unchunked LLEP"]["working_gib"]
            made.add_row(profile, *cells, f"{saved:.1%}")
        console.print(made)
    made = table("Balance at 65K top-8", "worst send ratio", "receive / even share", "load before", "after", "guests")
    for profile, figures in report["balance"].items():
        made.add_row(profile, *(f"{value:.3f}" for value in figures.values()))
    console.print(made)
    for profile, contestants_ in report["measured"]["profiles"].items():
        title = f"Forward and backward on virtual ranks, {report['measured']['shape']} shape, {profile}"
        made = table(title, "time to unchunked", "peak to it", "median s", "range s", "peak MiB of all ranks")
        for name, row in contestants_.items():
            peak = (f"{row['peak_ratio']:.2f}", f"{row['peak_mib_of_all_ranks']:.1f}")
            times = f"{row['min_s']:.3f} - {row['max_s']:.3f}"
            made.add_row(name, f"{row['ratio']:.2f}", peak[0], f"{row['median_s']:.3f}", times, peak[1])
        console.print(made)
