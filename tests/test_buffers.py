"""Running statistics: what a rank validates with is what is saved, and what the other ranks have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_longmoe import LongMoEStrategy
from lightning_longmoe.buffers import agree_on_buffers
from tests.pool import RemoteError, run_on_ranks
from tests.tiny import TinyLM, make_batches


class Normalised(TinyLM):
    """BatchNorm over positions, and what it has seen in validation."""

    def __init__(self) -> None:
        super().__init__(lr=0.05)
        self.statistics = nn.BatchNorm1d(16)
        self.register_buffer("constant", torch.tensor([0.1, 0.2, 0.3]))
        self.seen: list[Tensor] = []

    def hidden(self, input_ids: Tensor) -> Tensor:
        return self.statistics(super().hidden(input_ids).transpose(1, 2)).transpose(1, 2)

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.seen.append(self.statistics.running_mean.clone())


def _trainer(strategy: Any, **settings: Any) -> pl.Trainer:
    names = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary", "use_distributed_sampler")
    quiet = {**dict.fromkeys(names, False), "num_sanity_val_steps": 0, "max_epochs": 1}
    return pl.Trainer(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy, **{**quiet, **settings})


def _train_and_validate(folder: str) -> tuple[float, float, Tensor, Tensor, int]:
    rank, world = dist.get_rank(), dist.get_world_size()
    batches = [{k: v[rank::world] for k, v in batch.items()} for batch in make_batches(2 * world, 6)]
    loader = DataLoader(batches, batch_size=None)
    trainer, module = _trainer(LongMoEStrategy()), Normalised()
    trainer.fit(module, loader, loader)
    before = float(trainer.callback_metrics["val_loss"])
    trainer.save_checkpoint(f"{folder}/one.ckpt")
    fresh = Normalised()
    again = _trainer(LongMoEStrategy())
    again.validate(fresh, loader, ckpt_path=f"{folder}/one.ckpt", verbose=False)
    tracked = int(module.statistics.num_batches_tracked)
    return before, float(again.callback_metrics["val_loss"]), module.seen[0], module.constant, tracked


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_checkpoint_scores_as_the_run_did_and_all_ranks_have_the_mean(tmp_path: Path, ranks: int) -> None:
    results = run_on_ranks(ranks, _train_and_validate, str(tmp_path))
    for before, after, seen, constant, tracked in results:
        assert after == pytest.approx(before, rel=1e-6)
        assert torch.equal(seen, results[0][2])
        assert torch.equal(constant, torch.tensor([0.1, 0.2, 0.3]))
        assert tracked == 6


def _agree(kind: str) -> tuple[list[str], Tensor, Tensor]:
    module = nn.Module()
    module.register_buffer("mean", torch.zeros(3))
    module.register_buffer("equal", torch.zeros(2))
    rank = dist.get_rank()
    if kind == "shapes":
        module.mean = torch.ones(3 + rank)
    elif kind == "all" or (rank == 1 and kind == "one"):
        module.mean += rank
        module.equal += 0.1
    if kind == "cache":
        module.register_buffer("cache", torch.ones(1 + rank), persistent=False)
    return agree_on_buffers(module, dist.group.WORLD), module.mean, module.equal


def test_what_changed_on_one_rank_alone_is_averaged_with_the_others() -> None:
    assert all(names == [] for names, *_ in run_on_ranks(2, _agree, "cache"))
    for names, mean, _ in run_on_ranks(3, _agree, "one"):
        assert set(names) == {"mean", "equal"}
        torch.testing.assert_close(mean, torch.full((3,), 1 / 3))


def test_buffers_that_are_equal_on_all_ranks_keep_their_bits() -> None:
    for _, mean, equal in run_on_ranks(3, _agree, "all"):
        assert torch.equal(mean, torch.ones(3))
        assert torch.equal(equal, torch.zeros(2) + 0.1)


def test_shapes_that_differ_are_refused_by_name_on_every_rank() -> None:
    with pytest.raises(RemoteError, match="'mean' has different shapes") as caught:
        run_on_ranks(2, _agree, "shapes")
    assert set(caught.value.failures) == {0, 1}
