"""The start-up table says what is where."""

from __future__ import annotations

import lightning.pytorch as pl
import torch.distributed as dist
from torch.utils.data import DataLoader

from lightning_longmoe import LongMoEStrategy
from lightning_longmoe.config import ParallelConfig
from lightning_longmoe.report import memory_rows, start_up_table
from tests.pool import run_on_ranks
from tests.tiny import TinyLM, make_batches


def _rows() -> tuple[list[tuple[str, str, str]], list[list[str]]]:
    module = TinyLM()
    strategy = LongMoEStrategy(parallel=ParallelConfig(expert_parallel_size=2))
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=strategy,
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(module, DataLoader(make_batches(2, 1), batch_size=None))  # type: ignore[arg-type]
    table = start_up_table(strategy.layout, strategy.takeover, module)
    return memory_rows(module), [list(column.cells) for column in table.columns]


def test_the_table_names_groups_operators_and_bytes() -> None:
    rows, columns = run_on_ranks(4, _rows)[0]
    total = sum(p.numel() for p in TinyLM().parameters())
    assert rows[0][1] == f"{total:,}"
    # two home experts of [2·32, 16] and [16, 32] in float32
    largest = f"largest gathered unit: {2 * 1536 * 4 / 2**20:,.1f} MiB (predicted)"
    assert rows[-1] == ("memory", "blocks.0.moe.experts", largest)
    cells = dict(zip(columns[0], zip(columns[1], columns[2], strict=True), strict=True))
    assert cells["group expert"] == ("2", "0-1 | 2-3")
    assert cells["dispatch"][0] == "blocks.0.moe.experts, blocks.1.moe.experts"
    assert "group context" not in cells
