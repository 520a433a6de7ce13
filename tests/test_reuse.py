"""A sharded module in another run: parts that are new, and strategies that want whole parameters."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Timer
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from lightning_longmoe import LongMoEStrategy
from lightning_longmoe.reuse import owners
from tests.pool import RemoteError, run_on_ranks
from tests.test_buffers import _trainer
from tests.tiny import TinyLM, make_batches


def test_a_new_part_is_not_taken_for_the_one_whose_place_in_memory_it_has() -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    known = owners(module)
    kept = []
    place = id(module[0])
    module[0] = nn.Identity()
    for _ in range(1000):  # memory that was freed is given again
        kept.append(nn.Linear(2, 2))
        if id(kept[-1]) == place:
            break
    else:
        pytest.skip("no new module got the place of the old one")
    assert kept[-1] not in known


class ShardsItself(pl.LightningModule):
    """``configure_model`` with ``fully_shard``, which returns where it has been, or does not."""

    def __init__(self, guarded: bool) -> None:
        super().__init__()
        self.guarded = guarded
        self.net: Any = None

    def configure_model(self) -> None:
        if self.guarded and self.net is not None:
            return
        self.net = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 3))
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).pow(2).mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.net(batch).pow(2).mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.3)


def _fit_then_validate(guarded: bool) -> tuple[float, float]:
    pl.seed_everything(0, verbose=False)
    loader = DataLoader([torch.randn(4, 6) for _ in range(6)], batch_size=None)  # type: ignore[arg-type]
    trainer, module = _trainer(LongMoEStrategy()), ShardsItself(guarded)
    trainer.fit(module, loader, loader)
    before = float(trainer.callback_metrics["val_loss"])
    trainer.validate(module, loader, verbose=False)
    return before, float(trainer.callback_metrics["val_loss"])


def test_a_configure_model_that_shards_anew_does_not_score_an_untrained_model() -> None:
    for before, after in run_on_ranks(2, _fit_then_validate, True):
        assert after == pytest.approx(before, rel=1e-6)
    with pytest.raises(RemoteError, match=r"\['net.0', 'net.2'\] came into the module after it was sharded"):
        run_on_ranks(2, _fit_then_validate, False)


class WithCallback(TinyLM):
    def configure_callbacks(self) -> list[pl.Callback]:
        return [Timer()]


def _then_ddp(task: str) -> None:
    module, loader = TinyLM(), DataLoader(make_batches(2, 2), batch_size=None)  # type: ignore[arg-type]
    _trainer(LongMoEStrategy()).fit(module, loader)
    getattr(_trainer("ddp"), task)(module, loader)


@pytest.mark.parametrize("task", ["fit", "validate"])
def test_ddp_after_our_run_is_told_why_it_cannot(task: str) -> None:
    with pytest.raises(RemoteError, match="sharded by LongMoEStrategy and cannot run under DDPStrategy") as caught:
        run_on_ranks(2, _then_ddp, task)
    assert set(caught.value.failures) == {0, 1}


def _callbacks_of_a_second_run() -> list[str]:
    module, loader = WithCallback(), DataLoader(make_batches(2, 2), batch_size=None)  # type: ignore[arg-type]
    trainer = _trainer(LongMoEStrategy())
    trainer.fit(module, loader)
    again = _trainer(LongMoEStrategy())
    again.validate(module, loader, verbose=False)
    return [type(callback).__name__ for callback in again.callbacks]


def test_a_modules_own_callbacks_still_come_in_a_second_run() -> None:
    names = run_on_ranks(1, _callbacks_of_a_second_run)[0]
    assert "Timer" in names
