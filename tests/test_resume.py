"""Checkpoints through a Trainer: an interrupted run goes on as if it had never stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_longmoe import LongMoEStrategy
from lightning_longmoe.config import ParallelConfig, SaveConfig
from tests.pool import RemoteError, run_on_ranks
from tests.tiny import SEQUENCE, VOCAB, TinyLM, gathered

SAMPLES = 40


class Numbered(Dataset):
    """Sample i is the same everywhere; reading it draws a random number, as an augmentation would."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.randint(0, VOCAB, (SEQUENCE,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids, "index": torch.tensor(index), "drawn": torch.rand(())}


class Dropped(TinyLM):
    """With dropout, a schedule, and a record of the samples and draws it saw."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"optimizer": "adamw", "lr": 0.01, **settings})
        self.drop = nn.Dropout(0.2)
        self.seen: list[list[int]] = []
        self.drawn: list[float] = []

    def hidden(self, input_ids: Tensor) -> Tensor:
        return self.drop(super().hidden(input_ids))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.seen.append(sorted(batch["index"].tolist()))
        self.drawn += batch["drawn"].tolist()
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=30)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def run(
    folder: str,
    parallel: dict[str, Any] | None = None,
    saving: dict[str, Any] | None = None,
    checkpoint: str | None = None,
    model: dict[str, Any] | None = None,
    settings: dict[str, Any] | None = None,
    callback: dict[str, Any] | None = None,
    per_rank: int = 2,
    kind: type[TinyLM] = Dropped,
    strategy: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """One fit of 8 steps (fewer with ``max_steps``) that saves after every third."""
    import torch.distributed as dist

    pl.seed_everything(7, verbose=False)
    module = kind(**(model or {}))
    keep = ModelCheckpoint(folder, filename="{step}", save_top_k=-1, every_n_train_steps=3, **(callback or {}))
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=LongMoEStrategy(
            parallel=ParallelConfig(**(parallel or {})), saving=SaveConfig(**(saving or {})), **(strategy or {})
        ),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        callbacks=[keep],
        **{"max_steps": 8, "max_epochs": -1, **(settings or {})},
    )
    trainer.fit(module, DataLoader(Numbered(), batch_size=per_rank, shuffle=True), ckpt_path=checkpoint)
    optimizer = trainer.optimizers[0]
    moments = {
        f"{name}.{key}": value
        for name, parameter in module.named_parameters()
        for key, value in optimizer.state[parameter].items()
    }
    return {
        "losses": module.losses,
        "seen": getattr(module, "seen", []),
        "drawn": getattr(module, "drawn", []),
        "weights": gathered(dict(module.named_parameters())),
        "moments": gathered(moments),
        "lr": optimizer.param_groups[0]["lr"],
        "betas": tuple(optimizer.param_groups[0].get("betas", ())),
        "step": trainer.global_step,
    }


def _assert_bit_equal(resumed: dict[str, Any], straight: dict[str, Any]) -> None:
    count = len(resumed["losses"])
    assert count
    assert resumed["losses"] == straight["losses"][-count:]
    assert resumed["seen"] == straight["seen"][-count:]
    assert resumed["drawn"] == straight["drawn"][-len(resumed["drawn"]) :]
    assert (resumed["lr"], resumed["betas"], resumed["step"]) == (straight["lr"], straight["betas"], straight["step"])
    for part in ("weights", "moments"):
        assert resumed[part].keys() == straight[part].keys()
        for name, value in straight[part].items():
            assert torch.equal(resumed[part][name], value), name


@pytest.mark.parametrize("sharded", [True, False], ids=["folder", "file"])
@pytest.mark.parametrize("world", [1, 2])
def test_resume_in_the_middle_of_an_epoch_is_bit_equal(tmp_path: Path, world: int, sharded: bool) -> None:
    saving = {"sharded": sharded}
    parallel = {"expert_parallel_size": world}
    straight = run_on_ranks(world, run, str(tmp_path / "a"), parallel, saving)
    checkpoint = tmp_path / "a" / "step=3.ckpt"
    assert checkpoint.is_dir() == sharded
    resumed = run_on_ranks(world, run, str(tmp_path / "b"), parallel, saving, str(checkpoint))
    for after, whole in zip(resumed, straight, strict=True):
        assert len(after["losses"]) == 5
        _assert_bit_equal(after, whole)


def test_resume_inside_an_accumulation_window_and_in_a_second_epoch_is_bit_equal(tmp_path: Path) -> None:
    settings = {"accumulate_grad_batches": 2, "max_steps": 8}  # 10 batches an epoch: step 6 is in the second one
    straight = run_on_ranks(2, run, str(tmp_path / "a"), settings=settings)
    checkpoint = str(tmp_path / "a" / "step=6.ckpt")
    resumed = run_on_ranks(2, run, str(tmp_path / "b"), checkpoint=checkpoint, settings=settings)
    for after, whole in zip(resumed, straight, strict=True):
        assert len(after["losses"]) == 4
        _assert_bit_equal(after, whole)


class Plain(TinyLM):
    """Without dropout, so that runs on other world sizes can be compared."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"optimizer": "adamw", "lr": 0.01, **settings})


@pytest.mark.parametrize(
    ("before", "after"),
    [((2, 2), (4, 2)), ((4, 4), (2, 1)), ((2, 2), (1, 1)), ((1, 1), (2, 2))],
    ids=["2ep2_to_4ep2", "4ep4_to_2", "2ep2_to_1", "1_to_2ep2"],
)
def test_resume_on_another_world_and_expert_size_goes_on(
    tmp_path: Path, before: tuple[int, int], after: tuple[int, int]
) -> None:
    def start(at: tuple[int, int], folder: str, checkpoint: str | None) -> dict[str, Any]:
        parallel = {"expert_parallel_size": at[1]}
        return run_on_ranks(
            at[0], run, str(tmp_path / folder), parallel, None, checkpoint, None, None, None, 8 // at[0], Plain
        )[0]

    settings_free = start(before, "a", None)
    resumed = start(after, "b", str(tmp_path / "a" / "step=3.ckpt"))
    assert resumed["step"] == settings_free["step"]
    rest = settings_free["losses"][-len(resumed["losses"]) :]
    assert resumed["losses"] == pytest.approx(rest, rel=2e-5)


def test_a_weights_only_checkpoint_starts_the_optimizer_afresh(tmp_path: Path) -> None:
    run_on_ranks(2, run, str(tmp_path / "a"), callback={"save_weights_only": True}, settings={"max_steps": 3})
    results = run_on_ranks(
        2, _weights_after_load, str(tmp_path / "a" / "step=3.ckpt"), {"expert_parallel_size": 2}
    )
    for start, moments in results:
        assert moments == 0
        assert torch.isfinite(start["head.weight"]).all()


def _weights_after_load(checkpoint: str, parallel: dict[str, Any]) -> tuple[dict[str, Tensor], int]:
    import torch.distributed as dist

    class Stop(Callback):
        def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            self.weights = gathered(dict(pl_module.named_parameters()))
            self.moments = len(trainer.optimizers[0].state)
            trainer.should_stop = True

    stop = Stop()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=LongMoEStrategy(parallel=ParallelConfig(**parallel)),
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        max_epochs=1,
        limit_train_batches=1,
        callbacks=[stop],
    )
    trainer.fit(Dropped(), DataLoader(Numbered(), batch_size=2), ckpt_path=checkpoint)
    return stop.weights, stop.moments


def test_a_checkpoint_of_another_module_names_the_keys(tmp_path: Path) -> None:
    run_on_ranks(1, run, str(tmp_path / "a"), settings={"max_steps": 3})
    with pytest.raises(RemoteError, match=r"(?s)checkpoint lacks.*blocks\.2\."):
        run_on_ranks(1, run, str(tmp_path / "b"), None, None, str(tmp_path / "a" / "step=3.ckpt"), {"layers": 3})


def _save_on_rank_0_only(folder: str) -> None:
    import torch.distributed as dist

    class Lone(Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            if trainer.is_global_zero:
                trainer.save_checkpoint(str(Path(folder) / "lone.ckpt"))

    trainer = pl.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=LongMoEStrategy(saving=SaveConfig(all_ranks_timeout_s=3)),
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        max_steps=2,
        callbacks=[Lone()],
    )
    trainer.fit(Plain(), DataLoader(Numbered(), batch_size=2))


def test_a_save_on_one_rank_fails_and_names_save_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(RemoteError, match="save_checkpoint"):
        run_on_ranks(2, _save_on_rank_0_only, str(tmp_path), timeout_s=30)


def _consolidated(folder: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    from lightning_longmoe.saving import consolidate

    consolidate(Path(folder) / "step=3.ckpt", Path(folder) / "whole.ckpt")
    state = torch.load(Path(folder) / "whole.ckpt", weights_only=True)
    module = Dropped()
    module.load_state_dict(state["state_dict"])
    loaded = Dropped.load_from_checkpoint(Path(folder) / "whole.ckpt", map_location="cpu")
    return dict(module.state_dict()), dict(loaded.state_dict())


def test_a_consolidated_file_loads_in_plain_torch_and_in_lightning(tmp_path: Path) -> None:
    weights = run_on_ranks(4, run, str(tmp_path), {"expert_parallel_size": 2}, settings={"max_steps": 3})[0]["weights"]
    for state in run_on_ranks(1, _consolidated, str(tmp_path))[0]:
        for name, value in weights.items():
            assert torch.equal(state[name], value), name


def test_last_that_was_never_finished_does_not_start_anew_beside_a_complete_checkpoint(tmp_path: Path) -> None:
    run_on_ranks(1, run, str(tmp_path), settings={"max_steps": 3})
    with pytest.raises(RemoteError, match=r"ckpt_path='last' found no last checkpoint, and .*step=3.ckpt' is complete"):
        run_on_ranks(1, run, str(tmp_path), checkpoint="last", settings={"max_steps": 3})
    run_on_ranks(1, run, str(tmp_path / "empty"), checkpoint="last", settings={"max_steps": 3})
