"""``longmoe bench optimizer``: the streamed AdamW against torch's over FSDP2 shards, and against the link's floor.

Three parts. *Bytes*: what a rank holds for each element, from a step that was taken. *Steps*: optimizer steps over the
same FSDP2 shards by torch's default AdamW, foreach, fused, and under FSDP2's CPUOffloadPolicy, and by ours, in rounds,
for a few large and for many small parameters. *Floor*, on CUDA: a plain copy of the same bytes from and to page-locked
memory, both ways at once, which no step that keeps its state on the host can beat.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from lightning_longmoe.bench.rounds import add_times, compare, machine, run_rounds, show, table
from lightning_longmoe.optimizer import OffloadStreamAdamW

DEFAULT, OURS = "AdamW", "OffloadStreamAdamW"
OFFLOADED = "AdamW, CPUOffloadPolicy"
SHAPES = {
    "few large": [(4096, 1024)] * 4,
    "many small": [(32, 32)] * 2000,
    "large": [(8192, 8192)] * 8,
}
"""Sizes of the parameters. "large" is for a device: 537 million elements."""
TIMED = {"cpu": ("few large", "many small"), "cuda": ("large", "many small")}


def main(argv: list[str] | None = None) -> None:
    """Run it and print tables, or with ``--json`` one JSON object."""
    options = _parser().parse_args(argv)
    device = torch.device(options.device)
    dtype = getattr(torch, options.dtype)
    with _world(device):
        report = {
            "machine": machine(device),
            "dtype": options.dtype,
            "bytes": bytes_of_a_step(device, dtype),
            "steps": {name: steps(SHAPES[name], device, dtype, options.rounds) for name in TIMED[device.type]},
        }
    show(report, options.json, _print)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="longmoe bench optimizer", description=__doc__.split("\n\n")[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="of the parameters")
    add_times(parser)
    return parser


class _world:
    """A process group of one rank, where there is none."""

    def __init__(self, device: torch.device) -> None:
        self._backend = "cuda:nccl,cpu:gloo" if device.type == "cuda" else "gloo"

    def __enter__(self) -> None:
        self._made = not dist.is_initialized()
        if self._made:
            self._folder = tempfile.TemporaryDirectory()
            store = dist.FileStore(f"{self._folder.name}/store", 1)
            dist.init_process_group(self._backend, store=store, rank=0, world_size=1)

    def __exit__(self, *exception: object) -> None:
        if self._made:
            dist.destroy_process_group()
            self._folder.cleanup()


class _Weights(nn.Module):
    def __init__(self, shapes: list[tuple[int, int]], dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        made = (torch.empty(shape).normal_(generator=generator).to(dtype) for shape in shapes)
        self.weights = nn.ParameterList(nn.Parameter(weight) for weight in made)


def _sharded(
    shapes: list[tuple[int, int]], device: torch.device, dtype: torch.dtype, offload: bool = False
) -> list[nn.Parameter]:
    """Parameters as FSDP2 shards them, with gradients."""
    module = _Weights(shapes, dtype)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    if offload:
        fully_shard(module, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=device.type == "cuda"))
    else:
        fully_shard(module.to(device), mesh=mesh)
    parameters = list(module.parameters())
    for parameter in parameters:
        assert isinstance(parameter, DTensor)
        parameter.grad = torch.ones_like(parameter) * 1e-3
    return parameters


def bytes_of_a_step(device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """Bytes of an element in host memory, and of a bucket's element on the device while it is updated."""
    bucket = 1 << 16
    optimizer = OffloadStreamAdamW(_sharded([(1024, 300)], device, dtype), bucket_numel=bucket)
    optimizer.step()
    return {
        "host_bytes_per_element": optimizer.host_bytes / (1024 * 300),
        "staging_bytes_per_bucket_element": optimizer.staging_bytes / (2 * bucket),
    }


def steps(shapes: list[tuple[int, int]], device: torch.device, dtype: torch.dtype, rounds: int) -> dict[str, Any]:
    """Ratios to torch's default AdamW in time; above 1 in ``speedup`` is faster."""
    makers: dict[str, Callable[[], Any]] = {
        DEFAULT: lambda: torch.optim.AdamW(_sharded(shapes, device, dtype)),
        "AdamW, foreach": lambda: torch.optim.AdamW(_sharded(shapes, device, dtype), foreach=True),
        "AdamW, fused": lambda: torch.optim.AdamW(_sharded(shapes, device, dtype), fused=True),
        OFFLOADED: lambda: torch.optim.AdamW(_sharded(shapes, device, dtype, offload=True)),
        OURS: lambda: OffloadStreamAdamW(_sharded(shapes, device, dtype)),
    }
    optimizers = {name: make() for name, make in makers.items()}
    calls: dict[str, Callable[[], Any]] = {name: optimizer.step for name, optimizer in optimizers.items()}
    if device.type == "cuda":
        calls[OURS] = lambda: (optimizers[OURS].step(), optimizers[OURS].flush())  # until the state is back
        calls["floor: copies both ways"] = _both_ways(optimizers[OURS], device)
    figures: dict[str, Any] = compare(run_rounds(calls, rounds, device), DEFAULT)
    for row in figures.values():
        row["speedup"] = 1.0 / row["ratio"]
    return figures


def _both_ways(optimizer: OffloadStreamAdamW, device: torch.device) -> Callable[[], None]:
    """As many bytes as a step moves, to the device and from it, at once."""
    nbytes = optimizer.host_bytes
    chunk = min(nbytes, 1 << 30)
    up, down = (torch.empty(chunk, dtype=torch.uint8, pin_memory=True) for _ in range(2))
    there, back = (torch.empty(chunk, dtype=torch.uint8, device=device) for _ in range(2))
    streams = [torch.cuda.Stream(device) for _ in range(2)]

    def copy() -> None:
        for _ in range(-(-nbytes // chunk)):
            with torch.cuda.stream(streams[0]):
                there.copy_(up, non_blocking=True)
            with torch.cuda.stream(streams[1]):
                down.copy_(back, non_blocking=True)

    return copy


def _print(console: Console, report: dict[str, Any]) -> None:
    held = report["bytes"]
    console.print(
        f"{report['dtype']} parameters: {held['host_bytes_per_element']:.2f} bytes an element in host memory,"
        f" {held['staging_bytes_per_bucket_element']:.2f} on the device for each of slots x bucket."
    )
    for name, figures in report["steps"].items():
        count, size = len(SHAPES[name]), SHAPES[name][0]
        title = f"One step, {name}: {count} parameters of {size[0]} x {size[1]}"
        made = table(title, "times as fast", "median ms", "range ms")
        for contestant, row in figures.items():
            times = f"{row['min_s'] * 1e3:.1f} - {row['max_s'] * 1e3:.1f}"
            made.add_row(contestant, f"{row['speedup']:.2f}", f"{row['median_s'] * 1e3:.1f}", times)
        console.print(made)
