"""Faults that users of similar systems met, as tests of their kind."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Dataset

from lightning_longmoe import LongMoEStrategy
from lightning_longmoe.config import FSDPConfig, ParallelConfig
from lightning_longmoe.environment import refuse_unusable_environment
from lightning_longmoe.runtime.meshes import group_timeouts
from tests.pool import RemoteError, run_on_ranks
from tests.tiny import TinyLM, assert_same_training, fit, gathered, make_batches, train_alone

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "max_epochs": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "use_distributed_sampler": False,
    "num_sanity_val_steps": 0,
}


def _trainer(strategy: dict[str, Any] | None = None, **settings: Any) -> pl.Trainer:
    running = LongMoEStrategy(**(strategy or {}))
    return pl.Trainer(strategy=running, devices=int(os.environ["WORLD_SIZE"]), **{**QUIET, **settings})


def _mine(batches: list[dict[str, Tensor]]) -> DataLoader:
    world, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    return DataLoader([{k: v.chunk(world)[rank] for k, v in b.items()} for b in batches], batch_size=None)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------- precision, scale
class LateExpert(TinyLM):
    """The last expert gets its first tokens in the last micro-batch of a window."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        for block in self.blocks:
            router = block.moe.router
            if batch_idx % 2 == 0:
                router.expert_bias.copy_(torch.tensor([9.0, 9.0, 0.0, 0.0]))
            else:
                router.expert_bias.copy_(torch.tensor([0.0, 0.0, 9.0, 9.0]))
        return super().training_step(batch, batch_idx)


def _late_expert(sync: bool) -> dict[str, Tensor]:
    pl.seed_everything(1, verbose=False)
    module = LateExpert(router="sigmoid")
    strategy = {"parallel": ParallelConfig(expert_parallel_size=2), "fsdp": FSDPConfig(sync_each_microbatch=sync)}
    _trainer(strategy, precision="bf16-mixed", accumulate_grad_batches=2).fit(module, _mine(make_batches(8, 2)))
    return module.gradients[0]


@pytest.mark.parametrize("world", [2, 4])
def test_an_expert_first_used_in_the_last_micro_batch_reduces_in_one_dtype(world: int) -> None:
    each = run_on_ranks(world, _late_expert, True)[0]
    last = run_on_ranks(world, _late_expert, False)[0]
    for name, value in each.items():
        assert value.dtype == torch.float32
        torch.testing.assert_close(last[name], value, rtol=0.05, atol=float(value.abs().max()) * 0.05)


def _count_reductions(sync: bool) -> int:
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives

    counted = 0
    original = collectives.foreach_reduce

    def counting(*args: Any, **kwargs: Any) -> Any:
        nonlocal counted
        counted += 1
        return original(*args, **kwargs)

    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as group

    group.foreach_reduce = counting
    try:
        strategy = {"fsdp": FSDPConfig(sync_each_microbatch=sync)}
        _trainer(strategy, accumulate_grad_batches=4).fit(TinyLM(), _mine(make_batches(4, 4)))
    finally:
        group.foreach_reduce = original
    return counted


def test_accumulation_reduces_once_a_window_when_asked_to() -> None:
    each, last = run_on_ranks(2, _count_reductions, True)[0], run_on_ranks(2, _count_reductions, False)[0]
    assert each == 4 * last


# ------------------------------------------------------------------------------------------------- second runs
def _train_after_inference_mode(backend: str | None) -> dict[str, Any]:
    pl.seed_everything(11, verbose=False)
    module = TinyLM().double()
    loader = _mine(make_batches(4, 2))
    trainer = _trainer({"process_group_backend": backend}, inference_mode=True)
    trainer.validate(module, loader, verbose=False)
    trainer.test(module, loader, verbose=False)
    trainer.fit(module, loader, loader)
    weights = gathered(dict(module.named_parameters()))
    return {"losses": module.losses, "gradients": module.gradients, "weights": weights, "norm": None}


@pytest.mark.parametrize("backend", [None, "cpu:gloo"])
def test_training_after_validate_is_not_poisoned_by_inference_mode(backend: str | None) -> None:
    expected = train_alone(make_batches(4, 2))
    for result in run_on_ranks(2, _train_after_inference_mode, backend, init_group=False):
        assert_same_training(result, expected)


def _same_module_other_sizes() -> None:
    module = TinyLM()
    loader = _mine(make_batches(4, 1))
    _trainer({"parallel": ParallelConfig(expert_parallel_size=2)}).fit(module, loader)
    _trainer({"parallel": ParallelConfig(expert_parallel_size=2)}).fit(module, loader)
    _trainer({"parallel": ParallelConfig(expert_parallel_size=1)}).fit(module, loader)


def test_the_same_module_in_a_new_trainer_keeps_its_sizes_or_says_so() -> None:
    with pytest.raises(RemoteError, match="already sharded.*expert_size=2.*cannot be sharded again.*expert_size=1"):
        run_on_ranks(2, _same_module_other_sizes)


# ------------------------------------------------------------------------------------------------- groups
def _timeouts() -> list[float]:
    module = TinyLM()
    trainer = _trainer({"timeout_s": 7, "parallel": ParallelConfig(expert_parallel_size=2, replicate_size=2)})
    trainer.fit(module, _mine(make_batches(4, 1)))
    return [timeout.total_seconds() for timeout in group_timeouts(trainer.strategy.meshes)]  # type: ignore[union-attr]


def test_every_group_has_the_timeout_that_was_asked_for() -> None:
    for timeouts in run_on_ranks(4, _timeouts):
        assert len(timeouts) >= 5
        assert set(timeouts) == {7.0}


@pytest.mark.parametrize("device", ["mps", "xla"])
def test_accelerators_that_cannot_work_are_refused(device: str) -> None:
    with pytest.raises(ValueError, match=f"{device}.*accelerator='cpu'"):
        refuse_unusable_environment(torch.device(device), 1)



# ------------------------------------------------------------------------------------------------- data
class Counted(Dataset):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.full((12,), index)
        return {"input_ids": ids, "labels": ids, "index": torch.tensor(index)}


class Watching(TinyLM):
    def __init__(self) -> None:
        super().__init__()
        self.indices: list[int] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.indices += batch["index"].tolist()
        return super().training_step(batch, batch_idx)


def _indices(parallel: dict[str, Any]) -> list[int]:
    module = Watching()
    trainer = _trainer({"parallel": ParallelConfig(**parallel)}, use_distributed_sampler=True)
    trainer.fit(module, DataLoader(Counted(), batch_size=2))
    return module.indices


@pytest.mark.parametrize("parallel", [{}, {"expert_parallel_size": 2}, {"replicate_size": 2}], ids=str)
def test_ranks_read_disjoint_samples_that_cover_the_data(parallel: dict[str, Any]) -> None:
    first, second = run_on_ranks(2, _indices, parallel)
    assert sorted(first + second) == list(range(8))


# ------------------------------------------------------------------------------------------------- frozen parameters
class Frozen(TinyLM):
    """Embedding and all experts frozen; the experts thaw in the second epoch."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.embedding.requires_grad_(False)
        for block in self.blocks:
            block.moe.experts.requires_grad_(False)


def _frozen() -> dict[str, Any]:
    import tests.tiny as tiny

    original, tiny.TinyLM = tiny.TinyLM, Frozen  # type: ignore[misc]
    try:
        return fit(make_batches(4, 2), {"parallel": ParallelConfig(expert_parallel_size=2)})
    finally:
        tiny.TinyLM = original  # type: ignore[misc]


def freeze(module: TinyLM) -> None:
    module.embedding.requires_grad_(False)
    for block in module.blocks:
        block.moe.experts.requires_grad_(False)


def test_frozen_experts_still_pass_gradients_on_and_stay_as_they_are() -> None:
    expected = train_alone(make_batches(4, 2), prepare=freeze)
    for result in run_on_ranks(2, _frozen):
        assert_same_training(result, expected)


# ------------------------------------------------------------------------------------------------- torch.compile
class Compiled(TinyLM):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for block in self.blocks:
            block.mix = torch.compile(block.mix, backend="eager")


def _compiled(folder: str, kind: type[TinyLM], checkpoint: str | None) -> tuple[list[float], list[str]]:
    pl.seed_everything(11, verbose=False)
    module = kind().double()
    keep = ModelCheckpoint(folder, filename="last")
    trainer = _trainer(callbacks=[keep], enable_checkpointing=True, max_epochs=1 if checkpoint is None else 2)
    trainer.fit(module, _mine(make_batches(4, 2)), ckpt_path=checkpoint)
    return module.losses, sorted(trainer.strategy.lightning_module_state_dict())


def test_checkpoints_of_compiled_and_plain_modules_have_the_same_names(tmp_path: Path) -> None:
    plain, names = run_on_ranks(2, _compiled, str(tmp_path / "plain"), TinyLM, None)[0]
    compiled, compiled_names = run_on_ranks(2, _compiled, str(tmp_path / "compiled"), Compiled, None)[0]
    assert names == compiled_names
    assert compiled == pytest.approx(plain, rel=1e-9)
    saved = {kind: str(tmp_path / kind / "last.ckpt") for kind in ("plain", "compiled")}
    after_plain = run_on_ranks(2, _compiled, str(tmp_path / "a"), Compiled, saved["plain"])[0][0]
    after_compiled = run_on_ranks(2, _compiled, str(tmp_path / "b"), TinyLM, saved["compiled"])[0][0]
    assert after_plain == pytest.approx(after_compiled, rel=1e-9)


# ------------------------------------------------------------------------------------------------- Lightning callbacks
class Scheduled(TinyLM):
    """Logs a validation value that differs between ranks, and a schedule."""

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("rank_value", float(self.trainer.global_rank == self.trainer.current_epoch % 2), sync_dist=False)
        self.log("stuck", 1.0, sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def _with_callbacks(folder: str) -> tuple[int, str, list[float]]:
    monitor = LearningRateMonitor("step")
    keep = ModelCheckpoint(folder, monitor="rank_value", save_top_k=1, mode="max")
    stop = EarlyStopping("stuck", patience=2)
    trainer = _trainer(
        callbacks=[monitor, keep, stop],
        enable_checkpointing=True,
        logger=CSVLogger(folder),
        max_epochs=9,
        log_every_n_steps=1,
    )
    loader = _mine(make_batches(4, 2))
    trainer.fit(Scheduled(), loader, loader)
    rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
    return trainer.current_epoch, str(keep.best_model_path), rates


def test_early_stopping_checkpoints_and_schedules_act_alike_on_all_ranks(tmp_path: Path) -> None:
    first, second = run_on_ranks(2, _with_callbacks, str(tmp_path))
    assert first == second
    assert first[0] == 3  # two epochs without improvement after the first
    assert first[2] == pytest.approx([0.01 * 0.5**6])
    assert Path(first[1]).is_dir()


def test_every_gradient_of_an_unused_expert_is_a_tensor() -> None:
    result = run_on_ranks(2, _gradient_kinds)
    assert all(kind == "DTensor" for kinds in result for kind in kinds)


def _gradient_kinds() -> list[str]:
    class Looking(TinyLM):
        def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
            experts = [p for n, p in self.named_parameters() if "experts" in n]
            self.kinds = ["DTensor" if isinstance(p.grad, DTensor) else str(type(p.grad)) for p in experts]

    module = Looking(experts=8)
    _trainer({"parallel": ParallelConfig(expert_parallel_size=2)}).fit(module, _mine(make_batches(2, 1)))
    return module.kinds
