"""The table that rank 0 prints at start-up: groups and who is in them, what was taken over, what stayed plain and why."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from torch import nn

from lightning_longmoe import _compat

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightning_longmoe.layout import Layout
    from lightning_longmoe.parallelize import Takeover


def parameter_rows(module: nn.Module) -> list[tuple[str, str, str]]:
    """Parameters in all and the bytes of this rank's parameters, as table rows."""
    total = sum(p.numel() for p in module.parameters())
    local = [_compat.local_tensor(p) for p in module.parameters()]
    here = sum(t.numel() for t in local)
    size = sum(t.numel() * t.element_size() for t in local)
    return [("parameters", f"{total:,}", f"{here:,} on rank 0 ({size / 2**20:,.1f} MiB)")]


def start_up_table(layout: Layout, takeover: Takeover, module: nn.Module) -> Table:
    """The table, as a rich renderable."""
    table = Table(title="LongMoEStrategy", title_justify="left", show_lines=False)
    for heading in ("what", "where", "how"):
        table.add_column(heading, overflow="fold")
    for name, size, who in layout.table():
        if size == "1":
            continue
        table.add_row(f"group {name}", size, who)
    table.add_section()
    for row in [*takeover.rows, *parameter_rows(module)]:
        table.add_row(*row)
    return table


def print_start_up_table(layout: Layout, takeover: Takeover, module: nn.Module) -> None:
    """Print it; the caller is rank 0."""
    Console(soft_wrap=False).print(start_up_table(layout, takeover, module))


def log_config(trainer: pl.Trainer, config: dict[str, Any]) -> None:
    """Add the strategy's settings to every logger's hyper-parameters."""
    for logger in trainer.loggers:
        logger.log_hyperparams({"longmoe": config})
