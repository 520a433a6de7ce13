"""The start-up table of rank 0: groups and who is in them, what was taken over, what stayed plain and why."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from lightning_longmoe import _compat

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightning_longmoe.layout import Layout
    from lightning_longmoe.parallelize import Takeover


LOG_WIDTH = 120


def memory_rows(module: nn.Module) -> list[tuple[str, str, str]]:
    """Parameters, and the bytes that follow from them on this rank; what is not there yet is called predicted."""
    parameters = list(module.parameters())
    local = [_compat.local_tensor(p) for p in parameters]
    held = sum(_bytes(t) for t in local)
    trained = sum(_bytes(t) for t, p in zip(local, parameters, strict=True) if p.requires_grad)
    units = {name: _gathered_bytes(unit) for name, unit in module.named_modules() if _compat.is_fsdp_module(unit)}
    largest = max(units, key=lambda name: units[name], default="")
    rows = [
        ("parameters", f"{sum(p.numel() for p in parameters):,}", f"{sum(t.numel() for t in local):,} on rank 0"),
        ("memory", "rank 0", f"parameters {_mib(held)}; gradients {_mib(trained)} (predicted)"),
    ]
    if units:
        rows.append(("memory", largest or "root", f"largest gathered unit: {_mib(units[largest])} (predicted)"))
    return rows


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _gathered_bytes(unit: nn.Module) -> int:
    """Bytes of a unit's own parameters when FSDP2 has gathered them, in the dtype of the computation."""
    total = 0
    for parameter, compute in _compat.unit_parameters(unit):
        numel = parameter.numel()
        for axis, placement in enumerate(parameter.placements):
            if parameter.device_mesh.mesh_dim_names[axis] in ("expert", "vocabulary") and placement.is_shard():
                numel //= parameter.device_mesh.size(axis)  # gathered over the rest of the ranks only
        total += numel * (compute or parameter.dtype).itemsize
    return total


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:,.1f} MiB"


def start_up_table(layout: Layout, takeover: Takeover, module: nn.Module) -> Table:
    """The table, as a rich renderable."""
    table = Table(title="LongMoEStrategy", title_justify="left", show_lines=False)
    for heading in ("what", "where", "how"):
        table.add_column(heading, overflow="fold")
    for name, size, who in layout.table():
        if size == "1" or (name.endswith("_shard") and layout.size(name.removesuffix("_shard")) == 1):
            continue
        table.add_row(f"group {name}", size, who)
    table.add_section()
    for row in [*takeover.rows, *memory_rows(module)]:
        table.add_row(*row)
    return table


def print_start_up_table(layout: Layout, takeover: Takeover, module: nn.Module) -> None:
    """Print it; the caller is rank 0."""
    console = Console()
    if not console.is_terminal:  # a log file has no width of its own
        console = Console(width=LOG_WIDTH)
    console.print(start_up_table(layout, takeover, module))


def log_config(trainer: pl.Trainer, config: dict[str, Any]) -> None:
    """Add the strategy's settings to every logger's hyper-parameters."""
    for logger in trainer.loggers:
        logger.log_hyperparams({"longmoe": config})


def plain_setting(setting: Any) -> Any:
    """A setting as plain values: "auto", None, or the fields of its config."""
    return setting if setting is None or isinstance(setting, str) else dataclasses.asdict(setting)
