"""``longmoe bench vocabulary``: Ring-DTP against the plain projection, token chunks and torch's own fused loss.

Three parts. *Booked peaks*: ledgers of dry runs at the paper's shapes, forward and backward, with nothing allocated.
*One process*: times and peaks of every implementation on one device, in rounds. *Ranks*: with ``--ranks``, that many
gloo processes on this machine, the ring beside a head that is gathered, chunked and reduced as FSDP2 does it.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from lightning_longmoe.bench.rounds import add_times, compare, machine, run_on_gloo_ranks, run_rounds, show, table
from lightning_longmoe.callbacks.tracked_bytes import TrackedBytes
from lightning_longmoe.config import RingDTP
from lightning_longmoe.kernels.cross_entropy import chunked_cross_entropy
from lightning_longmoe.vocabulary.dry import PAPER_SHAPES, ProjectionShape, dry_ring, dry_standard
from lightning_longmoe.vocabulary.gather import gather_rows
from lightning_longmoe.vocabulary.operator import ring_cross_entropy
from lightning_longmoe.vocabulary.spans import VocabularySplit

GIB = 2**30
SHAPES = {
    "scaled": ProjectionShape(tokens=1024, hidden=256, vocab_size=16_384),
    "paper": ProjectionShape(tokens=16_384, hidden=7168, vocab_size=200_000),
}
"""What is timed: "scaled" takes a small machine half a second; "paper" needs a device of 60 GiB."""
PLAIN, CHUNKED, TORCH = "plain", "token-chunked", "F.linear_cross_entropy"
RING = {"ring, activations": RingDTP(mode="activations"), "ring, weights": RingDTP(mode="weights")}
GATHERED = "gathered, token-chunked"

Call = Callable[[], Tensor]


def main(argv: list[str] | None = None) -> None:
    """Run it and print tables, or with ``--json`` one JSON object."""
    options = _parser().parse_args(argv)
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    shape = SHAPES[options.shape]
    report = {
        "machine": machine(device),
        "booked": {name: booked_peaks(paper) for name, paper in PAPER_SHAPES.items()},
        "one_process": {
            "shape": f"N {shape.tokens}, H {shape.hidden}, V {shape.vocab_size}, {options.dtype}",
            **one_process(shape, dtype, device, options.rounds),
        },
        "ranks": {ranks: over_ranks(shape, dtype, ranks, options.rounds) for ranks in options.ranks},
    }
    show(report, options.json, _print)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="longmoe bench vocabulary", description=__doc__.split("\n\n")[0])
    parser.add_argument("--device", default="cpu", help="cpu or cuda; where one process is timed")
    parser.add_argument("--shape", default="scaled", choices=list(SHAPES), help="what is timed")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="of what is timed")
    parser.add_argument("--ranks", type=int, nargs="*", default=[], help="also time gloo processes, such as 2 4")
    add_times(parser)
    return parser


# ---------------------------------------------------------------------------------------------------------------------
# Booked peaks
# ---------------------------------------------------------------------------------------------------------------------
def booked_peaks(shape: ProjectionShape) -> dict[str, Any]:
    """GiB of a rank, inputs and gradients counted in, for the standard projection and the ring, and bytes sent."""
    standard, ring = dry_standard(shape), dry_ring(shape)
    return {
        "saved": 1 - ring.ledger.peak_bytes / standard.peak_bytes,
        "mode": ring.mode,
        "standard_gib": standard.peak_bytes / GIB,
        "ring_gib": ring.ledger.peak_bytes / GIB,
        "largest_buffer_gib": max(ring.ledger.largest_buffer.values()) / GIB,
        "sent_forward_gib": ring.forward_bytes / GIB,
        "sent_backward_gib": ring.backward_bytes / GIB,
    }


# ---------------------------------------------------------------------------------------------------------------------
# One process
# ---------------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, eq=False)
class _Tensors:
    """Leaves of one rank, and its targets."""

    x: Tensor
    weight: Tensor
    targets: Tensor

    def backward(self, loss: Tensor) -> None:
        loss.backward()
        self.x.grad = self.weight.grad = None


def _random(shape: ProjectionShape, dtype: torch.dtype, device: torch.device, rows: int) -> _Tensors:
    generator = torch.Generator(device).manual_seed(0)

    def normal(*size: int, std: float) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device).normal_(std=std, generator=generator).requires_grad_()

    targets = torch.randint(0, shape.vocab_size, (shape.tokens,), generator=generator, device=device)
    return _Tensors(normal(shape.tokens, shape.hidden, std=1.0), normal(rows, shape.hidden, std=0.02), targets)


def implementations(shape: ProjectionShape, tensors: _Tensors) -> dict[str, Call]:
    """The mean loss by every implementation that this torch has."""
    x, weight, targets = tensors.x, tensors.weight, tensors.targets
    calls: dict[str, Call] = {
        PLAIN: lambda: F.cross_entropy(F.linear(x, weight).float(), targets),
        CHUNKED: lambda: chunked_cross_entropy(x, weight, targets) / shape.tokens,
    }
    if hasattr(F, "linear_cross_entropy"):
        calls[TORCH] = lambda: F.linear_cross_entropy(x, weight, targets)
    for name, config in RING.items():
        calls[name] = functools.partial(
            ring_cross_entropy, x, weight, targets, group=None, vocab_size=shape.vocab_size, config=config
        )
    return calls


def one_process(shape: ProjectionShape, dtype: torch.dtype, device: torch.device, rounds: int) -> dict[str, Any]:
    """Ratios to the plain projection in time and peak; times of the forward, and of forward and backward."""
    tensors = _random(shape, dtype, device, shape.vocab_size)
    forward = implementations(shape, tensors)
    both = {name: functools.partial(_both, tensors, call) for name, call in forward.items()}
    figures = {
        "forward": compare(run_rounds(forward, rounds, device), PLAIN),
        "forward and backward": compare(run_rounds(both, rounds, device), PLAIN),
    }
    peaks = {name: _peak_bytes(call, tensors, device) for name, call in both.items()}
    for name, row in figures["forward and backward"].items():
        row["peak_ratio"], row["peak_mib"] = peaks[name] / peaks[PLAIN], peaks[name] / 2**20
    return figures


def _both(tensors: _Tensors, call: Call) -> None:
    tensors.backward(call())


def _peak_bytes(call: Callable[[], None], tensors: _Tensors, device: torch.device) -> int:
    """The largest sum of live tensors, leaves counted in."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        call()
        return torch.cuda.max_memory_allocated(device)
    with TrackedBytes() as tracked:
        tracked.add([tensors.x, tensors.weight, tensors.targets])
        call()
    return tracked.peak


# ---------------------------------------------------------------------------------------------------------------------
# Several ranks on this machine
# ---------------------------------------------------------------------------------------------------------------------
def over_ranks(shape: ProjectionShape, dtype: torch.dtype, ranks: int, rounds: int) -> dict[str, Any]:
    """As `one_process`, of rank 0 among ``ranks`` gloo processes with ``shape.tokens`` tokens each."""
    return run_on_gloo_ranks(_figures_of_rank, ranks, shape, dtype, rounds)


def _figures_of_rank(shape: ProjectionShape, dtype: torch.dtype, rounds: int) -> dict[str, dict[str, float]]:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    group = dist.group.WORLD
    device = torch.device("cpu")
    tensors = _random(shape, dtype, device, VocabularySplit(shape.vocab_size, ranks).rows(rank))

    def gathered() -> Tensor:
        weight = gather_rows(tensors.weight, shape.vocab_size, group)
        return chunked_cross_entropy(tensors.x, weight, tensors.targets) / (shape.tokens * ranks)

    calls: dict[str, Call] = {GATHERED: gathered}
    for name, config in RING.items():
        calls[name] = functools.partial(
            ring_cross_entropy,
            tensors.x,
            tensors.weight,
            tensors.targets,
            group=group,
            vocab_size=shape.vocab_size,
            config=config,
        )
    both = {name: functools.partial(_both, tensors, call) for name, call in calls.items()}
    figures = compare(run_rounds(both, rounds, device), GATHERED)
    peaks = {name: _peak_bytes(call, tensors, device) for name, call in both.items()}
    for name, row in figures.items():
        row["peak_ratio"], row["peak_mib"] = peaks[name] / peaks[GATHERED], peaks[name] / 2**20
    return figures


# ---------------------------------------------------------------------------------------------------------------------
# Tables
# ---------------------------------------------------------------------------------------------------------------------
def _print(console: Console, report: dict[str, Any]) -> None:
    title = "Booked peak of a rank, forward and backward, inputs and gradients counted in"
    made = table(title, "saved", "travels", "standard GiB", "ring GiB", "largest buffer", "sent fwd", "sent bwd")
    for shape, row in report["booked"].items():
        sizes = (f"{row[key]:.3f}" for key in row if key.endswith("_gib"))
        made.add_row(shape, f"{row['saved']:.1%}", row["mode"], *sizes)
    console.print(made)
    one = report["one_process"]
    for part in ("forward", "forward and backward"):
        console.print(_times(f"One process, {part}; {one['shape']}", one[part], PLAIN))
    for ranks, figures in report["ranks"].items():
        console.print(_times(f"{ranks} gloo ranks, forward and backward; {one['shape']} a rank", figures, GATHERED))


def _times(title: str, figures: dict[str, dict[str, float]], baseline: str) -> Table:
    made = table(title, f"time to {baseline}", "peak to it", "median s", "range s", "peak MiB")
    for name, row in figures.items():
        peak = (f"{row['peak_ratio']:.2f}", f"{row['peak_mib']:.1f}") if "peak_ratio" in row else ("-", "-")
        times = f"{row['min_s']:.3f} - {row['max_s']:.3f}"
        made.add_row(name, f"{row['ratio']:.2f}", peak[0], f"{row['median_s']:.3f}", times, peak[1])
    return made
