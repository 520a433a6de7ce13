"""Streamed optimizer state under the strategy and, by its callback, under others."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_longmoe import LongMoEStrategy, OffloadStreamAdamW, OptimizerOffload
from lightning_longmoe.callbacks import OptimizerOffloadCallback
from lightning_longmoe.config import ParallelConfig
from tests.pool import run_on_ranks
from tests.test_resume import _assert_bit_equal, run
from tests.tiny import TinyLM, assert_same_training, fit, gathered, make_batches, train_alone

STREAMED = {"optimizer_state": {"bucket_numel": 100}}


class Fused(TinyLM):
    """Torch's fused AdamW, which wants the parameters of each mesh in a group of their own."""

    def configure_optimizers(self) -> Any:
        meshes: dict[Any, list[Tensor]] = {}
        for parameter in self.parameters():
            meshes.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
        groups = [{"params": params, "weight_decay": 0.2 / (1 + i)} for i, params in enumerate(meshes.values())]
        return torch.optim.AdamW(groups, lr=self.lr, fused=True)


def _train(streamed: bool, parallel: dict[str, Any], precision: str, double: bool, clip: Any) -> dict[str, Any]:
    pl.seed_everything(11, verbose=False)
    module = Fused(lr=0.01)
    module = module.double() if double else module
    strategy = LongMoEStrategy(
        parallel=ParallelConfig(**parallel), optimizer_state=OptimizerOffload(bucket_numel=100) if streamed else None
    )
    trainer = _trainer(strategy, precision=precision, accumulate_grad_batches=2, max_epochs=2, **clip)
    trainer.fit(module, DataLoader(make_batches(4, 6), batch_size=None))
    (optimizer,) = trainer.optimizers
    assert isinstance(optimizer, OffloadStreamAdamW) == streamed
    assert strategy.takeover.decisions["optimizer_state"] == ("OffloadStreamAdamW" if streamed else "plain")
    state = {
        f"{n}.{k}": v for n, p in module.named_parameters() for k, v in optimizer.state[p].items() if k != "master"
    }
    return {
        "losses": module.losses,
        "weights": gathered(dict(module.named_parameters())),
        "state": gathered(state),
        "norm": strategy.last_grad_norm,
    }


def _trainer(strategy: Any, **settings: Any) -> pl.Trainer:
    names = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary", "use_distributed_sampler")
    quiet = {**dict.fromkeys(names, False), "num_sanity_val_steps": 0, "max_epochs": 1}
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    return pl.Trainer(accelerator="cpu", devices=ranks, strategy=strategy, **{**quiet, **settings})


BY_VALUE = {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"}


@pytest.mark.parametrize("clip", [{"gradient_clip_val": 0.05}, BY_VALUE], ids=["norm", "value"])
@pytest.mark.parametrize(
    ("ranks", "parallel", "precision", "double"),
    [
        (1, {}, "32-true", False),
        (2, {}, "32-true", True),
        (2, {"expert_parallel_size": 1}, "bf16-mixed", False),
        (4, {"expert_parallel_size": 2, "replicate_size": 2}, "32-true", False),
        (4, {"vocabulary_parallel_size": 2}, "32-true", False),
    ],
)
def test_training_is_bitwise_that_of_torchs_fused_adamw(
    ranks: int, parallel: dict[str, Any], precision: str, double: bool, clip: dict[str, Any]
) -> None:
    expected = run_on_ranks(ranks, _train, False, parallel, precision, double, clip)[0]
    actual = run_on_ranks(ranks, _train, True, parallel, precision, double, clip)[0]
    assert actual["losses"] == expected["losses"]
    for part in ("weights", "state"):
        assert actual[part].keys() == expected[part].keys()
        for name, value in expected[part].items():
            assert torch.equal(actual[part][name], value), name
    if expected["norm"] is not None:
        assert float(actual["norm"]) == float(expected["norm"])


def test_one_step_is_that_of_one_process_on_the_joined_batch() -> None:
    batches = make_batches(4, 2)
    model = {"optimizer": "adamw", "lr": 0.01}
    trainer = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
    expected = train_alone(batches, model, accumulate=2, clip=0.1)
    for ranks in (1, 2, 4):
        actual = run_on_ranks(ranks, fit, batches, STREAMED, model, trainer)[0]
        assert_same_training({**actual, "weights": {}}, {**expected, "weights": {}})
        for name, value in expected["weights"].items():  # the first AdamW step is about lr·sign(gradient)
            torch.testing.assert_close(actual["weights"][name], value, rtol=1e-6, atol=1e-7)


def _bfloat16_masters() -> tuple[bool, list[float], set[torch.dtype]]:
    module = TinyLM(optimizer="adamw", lr=1e-3)
    trainer = _trainer(LongMoEStrategy(**STREAMED), precision="bf16-true", max_epochs=6)
    trainer.fit(module, DataLoader(make_batches(2, 5), batch_size=None))
    (optimizer,) = trainer.optimizers
    states = [(p, optimizer.state[p]) for p in module.parameters()]
    rounded = all(torch.equal(s["master"].to_local().bfloat16(), p.to_local()) for p, s in states)
    return rounded, module.losses, {s["master"].dtype for _, s in states}


def test_bfloat16_weights_are_their_float32_masters_rounded() -> None:
    rounded, losses, dtypes = run_on_ranks(2, _bfloat16_masters)[0]
    assert rounded
    assert dtypes == {torch.float32}
    assert losses[-1] < losses[0]


class Scheduled(TinyLM):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[float, float]] = []

    def configure_optimizers(self) -> Any:
        self.kept = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.OneCycleLR(self.kept, 0.05, total_steps=20)
        return {"optimizer": self.kept, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_train_batch_end(self, *args: Any) -> None:
        group = self.trainer.optimizers[0].param_groups[0]
        self.seen.append((group["lr"], group["betas"][0]))


def _scheduled(streamed: bool, folder: str) -> tuple[list[tuple[float, float]], list[float], bool, list[str]]:
    pl.seed_everything(1, verbose=False)
    module = Scheduled()
    logger = pl.loggers.CSVLogger(folder)
    strategy = LongMoEStrategy(optimizer_state=OptimizerOffload() if streamed else None)
    callbacks = [pl.callbacks.LearningRateMonitor(logging_interval="step")]
    trainer = _trainer(strategy, logger=logger, callbacks=callbacks, log_every_n_steps=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, DataLoader(make_batches(2, 8), batch_size=None))
    complaints = [str(w.message) for w in caught if "lr_scheduler.step" in str(w.message)]
    same = module.kept is trainer.optimizers[0] and trainer.lr_scheduler_configs[0].scheduler.optimizer is module.kept
    return module.seen, module.losses, same, complaints


def test_schedulers_monitors_and_the_users_own_reference_act_on_the_streamed_optimizer(tmp_path: Path) -> None:
    plain = run_on_ranks(2, _scheduled, False, str(tmp_path / "plain"))[0]
    seen, losses, same, complaints = run_on_ranks(2, _scheduled, True, str(tmp_path / "streamed"))[0]
    assert seen == plain[0]
    assert len(set(seen)) == 8
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(plain[1]), rtol=1e-5, atol=0)
    assert same
    assert complaints == []
    text = next((tmp_path / "streamed").rglob("metrics.csv")).read_text()
    assert "lr-AdamW" in text or "lr-OffloadStreamAdamW" in text


@pytest.mark.parametrize("sharded", [True, False], ids=["folder", "file"])
def test_resume_in_the_middle_of_an_epoch_is_bit_equal(tmp_path: Path, sharded: bool) -> None:
    saving = {"sharded": sharded}
    straight = run_on_ranks(2, run, str(tmp_path), saving=saving, strategy=STREAMED)[0]
    resumed = run_on_ranks(
        2, run, str(tmp_path / "more"), saving=saving, strategy=STREAMED, checkpoint=str(tmp_path / "step=3.ckpt")
    )[0]
    _assert_bit_equal(resumed, straight)


SPREAD, WHOLE = {"expert_parallel_size": 2}, {"expert_parallel_size": 1}
LAYOUTS: list[tuple[int, dict[str, Any]]] = [(2, SPREAD), (1, {}), (4, SPREAD), (2, WHOLE)]


@pytest.mark.parametrize("after", [0, 1, 2, 3])
def test_resume_on_another_world_and_expert_size_goes_on_with_the_same_state(tmp_path: Path, after: int) -> None:
    ranks, parallel = LAYOUTS[0]
    settings = {"max_steps": 3}
    before = run_on_ranks(ranks, run, str(tmp_path), parallel, strategy=STREAMED, settings=settings, kind=TinyAdam)[0]
    ranks, parallel = LAYOUTS[after]
    restored = run_on_ranks(
        ranks, run, str(tmp_path / "b"), parallel, strategy=STREAMED, settings=settings, kind=TinyAdam,
        checkpoint=str(tmp_path / "step=3.ckpt"),
    )[0]  # fmt: skip
    for part in ("weights", "moments"):
        for name, value in before[part].items():
            assert torch.equal(restored[part][name], value), name


class TinyAdam(TinyLM):
    def __init__(self, **settings: Any) -> None:
        super().__init__(optimizer="adamw", lr=0.01, **settings)


@pytest.mark.parametrize("sharded", [True, False], ids=["folder", "file"])
@pytest.mark.parametrize("first", ["torch", "ours"])
def test_checkpoints_go_from_torchs_adamw_to_ours_and_back(tmp_path: Path, first: str, sharded: bool) -> None:
    strategies = {"torch": {"optimizer_state": None}, "ours": STREAMED}
    second = "ours" if first == "torch" else "torch"
    saving = {"sharded": sharded}
    straight = run_on_ranks(2, run, str(tmp_path), saving=saving, strategy=strategies[first])[0]
    resumed = run_on_ranks(
        2, run, str(tmp_path / "b"), saving=saving, strategy=strategies[second],
        checkpoint=str(tmp_path / "step=3.ckpt"),
    )[0]  # fmt: skip
    count = len(resumed["losses"])
    torch.testing.assert_close(
        torch.tensor(resumed["losses"]), torch.tensor(straight["losses"][-count:]), rtol=1e-5, atol=0
    )
    assert resumed["step"] == straight["step"]
    assert {k: v for k, v in resumed["moments"].items() if k.endswith("step")} == {
        k: v for k, v in straight["moments"].items() if k.endswith("step")
    }


def _bf16(folder: str, streamed: bool, checkpoint: str | None) -> tuple[dict[str, Tensor], set[str], bool]:
    pl.seed_everything(2, verbose=False)
    module = TinyAdam()
    strategy = LongMoEStrategy(optimizer_state=OptimizerOffload() if streamed else None)
    keep = pl.callbacks.ModelCheckpoint(folder, filename="{step}", every_n_train_steps=2, save_top_k=-1)
    steps = {"enable_checkpointing": True, "max_epochs": -1, "max_steps": 2 if checkpoint is None else 4}
    trainer = _trainer(strategy, precision="bf16-true", callbacks=[keep], **steps)
    trainer.fit(module, DataLoader(make_batches(2, 4), batch_size=None), ckpt_path=checkpoint)
    state = trainer.optimizers[0].state
    finite = all(bool(p.to_local().isfinite().all()) for p in module.parameters())
    return gathered(dict(module.named_parameters())), {k for p in state for k in state[p]}, finite


def test_bfloat16_checkpoints_with_and_without_masters_load_into_either_optimizer(tmp_path: Path) -> None:
    for streamed in (True, False):
        folder = str(tmp_path / str(streamed))
        run_on_ranks(2, _bf16, folder, streamed, None)
        _, names, finite = run_on_ranks(2, _bf16, folder + "b", not streamed, f"{folder}/step=2.ckpt")[0]
        assert finite
        assert ("master" in names) == (not streamed)


def _weights_only(folder: str) -> tuple[bool, bool]:
    module = TinyAdam()
    trainer = _trainer(LongMoEStrategy(**STREAMED), precision="bf16-true", max_epochs=-1, max_steps=3)
    trainer.fit(module, DataLoader(make_batches(2, 3), batch_size=None))
    trainer.save_checkpoint(f"{folder}/w.ckpt", weights_only=True)
    fresh = TinyAdam()
    fresh.lr = 0.0

    class Watch(pl.Callback):
        def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            state = trainer.optimizers[0].state
            self.same = all(torch.equal(state[p]["master"].to_local().bfloat16(), p.to_local()) for p in state)

    watch = Watch()
    second = _trainer(
        LongMoEStrategy(**STREAMED), precision="bf16-true", max_epochs=-1, max_steps=4, callbacks=[watch]
    )
    second.fit(fresh, DataLoader(make_batches(2, 5), batch_size=None), ckpt_path=f"{folder}/w.ckpt")
    a, b = gathered(dict(module.named_parameters())), gathered(dict(fresh.named_parameters()))
    return watch.same, all(torch.equal(a[n], b[n]) for n in a)


def test_loading_weights_alone_refreshes_the_masters(tmp_path: Path) -> None:
    assert run_on_ranks(2, _weights_only, str(tmp_path))[0] == (True, True)


class Broken(TinyAdam):
    """The third step's gradient is not finite, on one rank alone."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * float("nan") if batch_idx == 2 and self.global_rank == 1 else loss


def _skips() -> tuple[int, float, list[bool]]:
    module = Broken()
    kept: list[dict[str, Tensor]] = []

    class Watch(pl.Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            kept.append(gathered(dict(module.named_parameters())))

    trainer = _trainer(LongMoEStrategy(**STREAMED), gradient_clip_val=1.0, callbacks=[Watch()])
    trainer.fit(module, DataLoader(make_batches(2, 4), batch_size=None))
    optimizer = trainer.optimizers[0]
    moved = [any(not torch.equal(a[n], b[n]) for n in a) for a, b in zip(kept, kept[1:], strict=False)]
    return optimizer.skipped_steps, float(next(iter(optimizer.state.values()))["step"]), moved


def test_a_norm_that_is_not_finite_skips_the_step_on_all_ranks_and_is_counted() -> None:
    for skipped, steps, moved in run_on_ranks(2, _skips):
        assert (skipped, steps) == (1, 3.0)
        assert moved == [True, False, True]


@pytest.mark.parametrize(
    ("arguments", "model", "message"),
    [
        ({"optimizer_state": OptimizerOffload()}, {}, r"cannot apply \(SGD: only torch.optim.AdamW itself is streamed"),
        ({**STREAMED, "host_memory": "1KB"}, {"optimizer": "adamw"}, "leaves it 0.00 GiB"),
    ],
)
def test_an_offload_that_cannot_be_is_refused(arguments: dict[str, Any], model: dict[str, Any], message: str) -> None:
    trainer = _trainer(LongMoEStrategy(**arguments))
    with pytest.raises(ValueError, match=message):
        trainer.fit(TinyLM(**model), DataLoader(make_batches(2, 1), batch_size=None))


def test_auto_leaves_the_state_on_the_cpu_as_it_is() -> None:
    trainer = _trainer(LongMoEStrategy())
    trainer.fit(TinyLM(optimizer="adamw"), DataLoader(make_batches(2, 1), batch_size=None))
    assert type(trainer.optimizers[0]) is torch.optim.AdamW


def test_a_second_fit_keeps_to_its_optimizer() -> None:
    trainer = _trainer(LongMoEStrategy(**STREAMED))
    module, loader = TinyAdam(), DataLoader(make_batches(2, 2), batch_size=None)
    trainer.fit(module, loader)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, loader)
    assert isinstance(trainer.optimizers[0], OffloadStreamAdamW)
    assert len(module.losses) == 4


class FusedAlone(TinyLM):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01, fused=self.device.type == "cpu")


def _with_callback(kind: str, streamed: bool, folder: str) -> tuple[list[float], bool, dict[str, Tensor]]:
    from lightning.pytorch.strategies import ModelParallelStrategy

    class Sharded(FusedAlone):
        def configure_model(self) -> None:
            from torch.distributed.fsdp import FSDPModule, fully_shard

            if kind == "model parallel" and not isinstance(self.blocks[0], FSDPModule):
                for part in (self.embedding, *self.blocks, self.head):
                    fully_shard(part, mesh=self.device_mesh["data_parallel"])

    strategy = {
        "single": "auto",
        "ddp": pl.strategies.DDPStrategy(process_group_backend="gloo"),
        "model parallel": ModelParallelStrategy(),
    }
    losses: list[float] = []
    for checkpoint in (None, f"{folder}/one.ckpt"):
        pl.seed_everything(3, verbose=False)
        module = Sharded()
        callbacks = [OptimizerOffloadCallback({"bucket_numel": 100})] if streamed else []  # type: ignore[arg-type]
        steps = 3 if checkpoint is None else 6
        trainer = _trainer(strategy[kind], callbacks=callbacks, max_epochs=-1, max_steps=steps)
        trainer.fit(module, DataLoader(make_batches(2, 6), batch_size=None), ckpt_path=checkpoint, weights_only=False)
        trainer.save_checkpoint(f"{folder}/one.ckpt")
        losses += module.losses
        strategy[kind] = type(strategy[kind])(process_group_backend="gloo") if kind == "ddp" else strategy[kind]
        strategy["model parallel"] = ModelParallelStrategy()
    ours = isinstance(trainer.optimizers[0], OffloadStreamAdamW)
    return losses, ours, gathered(dict(module.named_parameters()))


@pytest.mark.parametrize("kind", ["single", "ddp", "model parallel"])
def test_the_callback_is_one_line_under_other_strategies_also_after_a_resume(tmp_path: Path, kind: str) -> None:
    ranks = 1 if kind == "single" else 2
    group = kind != "single"
    expected, _, weights = run_on_ranks(ranks, _with_callback, kind, False, str(tmp_path / "a"), init_group=group)[0]
    losses, ours, mine = run_on_ranks(ranks, _with_callback, kind, True, str(tmp_path / "b"), init_group=group)[0]
    assert ours
    assert losses == expected
    assert all(torch.equal(mine[name], weights[name]) for name in weights)


class Early(TinyAdam):
    """Built before sharding, as LightningCLI's ``--optimizer`` does."""

    def __init__(self) -> None:
        super().__init__()
        self.made = OffloadStreamAdamW(self.parameters(), lr=0.01)

    def configure_optimizers(self) -> Any:
        return self.made


def _early() -> list[float]:
    pl.seed_everything(3, verbose=False)
    module = Early()
    _trainer(LongMoEStrategy()).fit(module, DataLoader(make_batches(2, 6), batch_size=None))
    return module.losses


def test_one_that_was_built_before_sharding_trains_the_live_parameters() -> None:
    losses = run_on_ranks(2, _early)[0]
    assert losses[-1] < losses[0]
    pl.seed_everything(3, verbose=False)
    module = TinyAdam()
    _trainer(LongMoEStrategy(**STREAMED)).fit(module, DataLoader(make_batches(2, 6), batch_size=None))
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(module.losses), rtol=1e-5, atol=0)


def test_the_callback_refuses_our_own_strategy() -> None:
    trainer = _trainer(LongMoEStrategy(), callbacks=[OptimizerOffloadCallback()])
    with pytest.raises(ValueError, match=r"pass LongMoEStrategy\(optimizer_state="):
        trainer.fit(TinyAdam(), DataLoader(make_batches(2, 1), batch_size=None))


