"""``longmoe bench attention``: attention over context ranks against one process and against gathered keys.

Two parts. *One process*: causal attention by torch's ``scaled_dot_product_attention`` and by ours, and ours with a
window for longer and longer sequences. *Ranks*, with ``--ranks``: that many gloo processes on this machine, their times
and the bytes that they send, beside gathering all keys and values.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor

from lightning_longmoe.bench.rounds import add_times, compare, machine, run_on_gloo_ranks, run_rounds, show, table
from lightning_longmoe.context import Wire, context_attention, context_order
from lightning_longmoe.context.order import Kind

BATCH, HEADS, KV_HEADS, SIZE = 1, 8, 4, 32
LENGTH, WINDOW = 2048, 128
SDPA, OURS, GATHERED = "F.scaled_dot_product_attention", "context_attention", "keys gathered"
KINDS: tuple[Kind, ...] = ("ring", "ulysses", "hybrid")


def main(argv: list[str] | None = None) -> None:
    """Run it and print tables, or with ``--json`` one JSON object."""
    options = _parser().parse_args(argv)
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    report = {
        "machine": machine(device),
        "shape": f"S {options.length}, {HEADS} query and {KV_HEADS} key/value heads of {SIZE}, {options.dtype}",
        "one_process": one_process(options.length, dtype, device, options.rounds),
        "window": {
            length: windowed(length, dtype, device, options.rounds)
            for length in (options.length, 2 * options.length, 4 * options.length)
        },
        "ranks": {ranks: over_ranks(options.length, dtype, ranks, options.rounds) for ranks in options.ranks},
    }
    show(report, options.json, _print)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="longmoe bench attention", description=__doc__.split("\n\n")[0])
    parser.add_argument("--device", default="cpu", help="cpu or cuda; where one process is timed")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--length", type=int, default=LENGTH, help="tokens of the sequence")
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4], help="gloo processes")
    add_times(parser)
    return parser


def _random(length: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    return [
        torch.empty((BATCH, heads, length, SIZE), dtype=dtype, device=device).normal_(generator=generator)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]


def _both(call: Callable[..., Tensor], tensors: list[Tensor]) -> None:
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    call(*leaves).sum().backward()


def one_process(length: int, dtype: torch.dtype, device: torch.device, rounds: int) -> dict[str, dict[str, float]]:
    """Times of a forward and backward of causal attention, and ratios to torch's."""
    tensors = _random(length, dtype, device)
    calls: dict[str, Callable[..., Tensor]] = {
        SDPA: functools.partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=True),
        OURS: functools.partial(context_attention, group=None, kind="ring"),
    }
    both = {name: functools.partial(_both, call, tensors) for name, call in calls.items()}
    return compare(run_rounds(both, rounds, device), SDPA)


def windowed(length: int, dtype: torch.dtype, device: torch.device, rounds: int) -> float:
    """Median seconds of a forward and backward with a window."""
    call = functools.partial(context_attention, group=None, kind="ring", window=WINDOW)
    seconds = run_rounds({OURS: functools.partial(_both, call, _random(length, dtype, device))}, rounds, device)
    return compare(seconds, OURS)[OURS]["median_s"]


def over_ranks(length: int, dtype: torch.dtype, ranks: int, rounds: int) -> dict[str, Any]:
    """Times of rank 0 among ``ranks`` processes, ratios to gathering all keys, and bytes that all ranks send."""
    return run_on_gloo_ranks(_figures_of_rank, ranks, length, dtype, rounds)


def _figures_of_rank(length: int, dtype: torch.dtype, rounds: int) -> dict[str, Any]:
    ranks = dist.get_world_size()
    group, device = dist.group.WORLD, torch.device("cpu")
    whole = _random(length, dtype, device)
    wires: dict[str, Wire] = {kind: Wire(group) for kind in KINDS}
    calls: dict[str, Callable[[], None]] = {GATHERED: functools.partial(_both, _gathered, _part(whole, "ulysses"))}
    for kind in KINDS:
        call = functools.partial(context_attention, group=group, kind=kind, wire=wires[kind])
        calls[kind] = functools.partial(_both, call, _part(whole, kind))
    figures: dict[str, Any] = compare(run_rounds(calls, rounds, device), GATHERED)
    for name, wire in wires.items():
        sent = torch.tensor(wire.sent_bytes // (rounds + 1))
        dist.all_reduce(sent)
        figures[name]["sent_mib_of_all_ranks"] = int(sent) / 2**20
    keys = 2 * BATCH * KV_HEADS * length * SIZE * dtype.itemsize
    figures[GATHERED]["sent_mib_of_all_ranks"] = 2 * keys * (ranks - 1) / 2**20  # forward, and gradients back
    return figures


def _part(whole: list[Tensor], kind: Kind) -> list[Tensor]:
    order = context_order(whole[0].size(2), dist.get_world_size(), kind).view(dist.get_world_size(), -1)
    return [tensor[:, :, order[dist.get_rank()]] for tensor in whole]


class _Gather(torch.autograd.Function):
    """All ranks' parts along the tokens; the backward sums the gradients of this rank's."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:  # type: ignore[override]
        parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, tensor.contiguous())
        return torch.cat(parts, dim=2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad.chunk(dist.get_world_size(), dim=2)[dist.get_rank()]


def _gathered(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """What FSDP alone would leave: each rank's queries against all keys."""
    start = query.size(2) * dist.get_rank()
    key, value = _Gather.apply(key), _Gather.apply(value)
    positions = torch.arange(key.size(2))
    mask = positions.unsqueeze(0) <= positions[start : start + query.size(2)].unsqueeze(1)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)


def _print(console: Console, report: dict[str, Any]) -> None:
    made = table(f"One process, forward and backward; {report['shape']}", f"time to {SDPA}", "median s", "range s")
    for name, row in report["one_process"].items():
        made.add_row(name, f"{row['ratio']:.2f}", *_times(row))
    console.print(made)
    made = table(f"One process, window of {WINDOW}", "median s", "us a token")
    for length, seconds in report["window"].items():
        made.add_row(f"S {length}", f"{seconds:.3f}", f"{seconds / length * 1e6:.1f}")
    console.print(made)
    for ranks, figures in report["ranks"].items():
        title = f"{ranks} gloo ranks, forward and backward; {report['shape']}"
        made = table(title, f"time to {GATHERED}", "median s", "range s", "MiB sent by all ranks")
        for name, row in figures.items():
            made.add_row(name, f"{row['ratio']:.2f}", *_times(row), f"{row['sent_mib_of_all_ranks']:.2f}")
        console.print(made)


def _times(row: dict[str, float]) -> tuple[str, str]:
    return f"{row['median_s']:.3f}", f"{row['min_s']:.3f} - {row['max_s']:.3f}"
