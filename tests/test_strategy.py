"""The strategy through a Trainer: settings that cannot work raise, loops compose, every launcher trains."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.data import DataLoader

from lightning_longmoe import CausalLMHead, LongMoEStrategy
from lightning_longmoe.config import BatchConfig, FSDPConfig, ParallelConfig
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


def _loader(rows: int = 4, steps: int = 2, seed: int = 0) -> DataLoader:
    return DataLoader(make_batches(rows, steps, seed), batch_size=None)  # type: ignore[arg-type]


def _trainer(world: int, strategy: dict[str, Any] | None = None, **settings: Any) -> pl.Trainer:
    return pl.Trainer(strategy=LongMoEStrategy(**(strategy or {})), devices=world, **{**QUIET, **settings})


# ---------------------------------------------------------------------------------------------------------------------
# Settings
# ---------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("precision", ["16-true", "64-true"])
@pytest.mark.parametrize("by_name", [True, False], ids=["by_name", "by_object"])
def test_unsupported_precision_is_refused(precision: str, by_name: bool) -> None:
    with pytest.raises(ValueError, match="32-true"):
        pl.Trainer(strategy="longmoe" if by_name else LongMoEStrategy(), precision=precision, **{**QUIET, "devices": 1})


def test_a_trainer_of_the_other_package_is_told_which_one_to_use() -> None:
    other = pytest.importorskip("pytorch_lightning")
    with pytest.raises(ValueError, match=r"from lightning\.pytorch import Trainer`, not pytorch_lightning"):
        other.Trainer(strategy=LongMoEStrategy(), accelerator="cpu", devices=1)


def test_a_mapping_is_taken_for_a_config_and_an_unknown_field_is_named() -> None:
    assert LongMoEStrategy(parallel={"replicate_size": 2}).parallel == ParallelConfig(replicate_size=2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="replicate_sise.*replicate_size"):
        LongMoEStrategy(parallel={"replicate_sise": 2})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"timeout_s": 0}, "above 0"),
        ({"launcher": "slurm"}, "'script', 'fork' or 'spawn'"),
        ({"dispatch": "fast"}, "'auto', None or a PipelinedLLEP"),
        ({"dispatch": {"depth": 3}}, "depth=3"),
    ],
)
def test_settings_that_no_world_allows_are_refused_at_construction(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LongMoEStrategy(**settings)


def test_meshes_before_a_run_say_when_they_exist() -> None:
    with pytest.raises(RuntimeError, match="configure_model"):
        _ = LongMoEStrategy().meshes


def _fit_with(strategy: dict[str, Any]) -> None:
    fit(make_batches(4, 1), strategy)


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        ({"expert_parallel_size": 3}, r"expert_parallel_size=3"),
        ({"replicate_size": 3}, r"replicate_size=3"),
        ({"context_parallel_size": 2}, r"context_parallel_size=2"),
        ({"vocabulary_parallel_size": 3}, r"vocabulary_parallel_size=3"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_sizes_that_do_not_fit_raise_before_training(parallel: dict[str, Any], message: str) -> None:
    with pytest.raises(RemoteError, match=message):
        run_on_ranks(2, _fit_with, {"parallel": ParallelConfig(**parallel)})


class Dense(pl.LightningModule):
    """An ordinary module without experts, head or configure_model."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 3))
        self.scale = nn.Parameter(torch.ones(2))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.net(x) * self.scale[0], y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _dense_data() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(4, 6, generator=generator), torch.randn(4, 3, generator=generator)) for _ in range(3)]


def _fit_dense(settings: dict[str, Any] | None = None, parallel: dict[str, Any] | None = None) -> dict[str, Tensor]:
    import torch.distributed as dist

    pl.seed_everything(5, verbose=False)
    module = Dense()
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = [tuple(t.chunk(world)[rank] for t in batch) for batch in _dense_data()]
    trainer = _trainer(world, {"parallel": ParallelConfig(**(parallel or {}))}, **(settings or {}))
    trainer.fit(module, DataLoader(mine, batch_size=None))  # type: ignore[arg-type]
    return gathered(dict(module.named_parameters()))


def test_a_module_without_experts_or_configure_model_trains_like_one_process() -> None:
    pl.seed_everything(5, verbose=False)
    module = Dense()
    optimizer = module.configure_optimizers()
    for batch in _dense_data():
        optimizer.zero_grad()
        module.training_step(batch, 0).backward()
        optimizer.step()
    for weights in run_on_ranks(2, _fit_dense):
        for name, expected in module.named_parameters():
            torch.testing.assert_close(weights[name], expected.detach(), rtol=1e-5, atol=1e-6)


def test_experts_that_are_asked_for_and_not_there_are_an_error() -> None:
    with pytest.raises(RemoteError, match="no MoELayer or Experts module was found"):
        run_on_ranks(2, _fit_dense, None, {"expert_parallel_size": 2})


# ---------------------------------------------------------------------------------------------------------------------
# Optimizers
# ---------------------------------------------------------------------------------------------------------------------
class EarlyOptimizer(TinyLM):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.early = torch.optim.SGD(self.parameters(), lr=self.lr)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.early


def _fit_early() -> dict[str, Any]:
    import tests.tiny as tiny

    original, tiny.TinyLM = tiny.TinyLM, EarlyOptimizer  # type: ignore[misc]
    try:
        return fit(make_batches(4, 2))
    finally:
        tiny.TinyLM = original  # type: ignore[misc]


def test_an_optimizer_built_before_sharding_trains_the_live_parameters() -> None:
    expected = train_alone(make_batches(4, 2))
    for result in run_on_ranks(2, _fit_early):
        assert_same_training(result, expected)


class Forgetful(TinyLM):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for n, p in self.named_parameters() if "experts" not in n], lr=0.1)


class Doubled(TinyLM):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": list(self.parameters())}], lr=0.1)


class Foreach(TinyLM):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), foreach=True)


class Strange(TinyLM):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([*self.parameters(), nn.Parameter(torch.ones(3))], lr=0.1)


def _fit_class(kind: type[TinyLM], **strategy: Any) -> None:
    import torch.distributed as dist

    _trainer(dist.get_world_size(), strategy).fit(kind(), _loader())


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Forgetful, r"in no optimizer.*experts"),
        (Foreach, r"foreach=True.*device meshes"),
        (Strange, r"shape \(3,\)"),
    ],
    ids=["forgotten_experts", "foreach_over_meshes", "foreign_parameter"],
)
def test_optimizers_that_would_not_train_everything_are_refused(kind: type[TinyLM], message: str) -> None:
    with pytest.raises(RemoteError, match=f"(?s){message}"):
        run_on_ranks(2, _fit_class, kind)


# ---------------------------------------------------------------------------------------------------------------------
# A user's own configure_model
# ---------------------------------------------------------------------------------------------------------------------
class ShardsItself(TinyLM):
    def configure_model(self) -> None:
        for block in self.blocks:
            if not isinstance(block, FSDPModule):
                fully_shard(block, mesh=self.device_mesh["data_parallel"])


def _fit_sharded_by_user() -> dict[str, Any]:
    import tests.tiny as tiny

    original, tiny.TinyLM = tiny.TinyLM, ShardsItself  # type: ignore[misc]
    try:
        return fit(make_batches(4, 2))
    finally:
        tiny.TinyLM = original  # type: ignore[misc]


def test_blocks_that_configure_model_sharded_are_respected() -> None:
    expected = train_alone(make_batches(4, 2))
    for result in run_on_ranks(2, _fit_sharded_by_user):
        assert_same_training(result, expected)


class Wrapped(TinyLM):
    def configure_model(self) -> None:
        from torch.nn.parallel import DistributedDataParallel

        self.embedding = DistributedDataParallel(self.embedding)  # type: ignore[assignment]


def test_a_module_wrapped_by_another_system_is_refused_by_name() -> None:
    with pytest.raises(RemoteError, match=r"'embedding' is already wrapped in DistributedDataParallel"):
        run_on_ranks(2, _fit_class, Wrapped)


class Scalar(TinyLM):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.0))


def test_a_scalar_parameter_is_refused_with_its_name() -> None:
    with pytest.raises(RemoteError, match=r"temperature.*\[1\]"):
        run_on_ranks(2, _fit_class, Scalar)


# ---------------------------------------------------------------------------------------------------------------------
# Loops
# ---------------------------------------------------------------------------------------------------------------------
def _validate_then_fit_then_all() -> dict[str, Any]:
    import torch.distributed as dist

    pl.seed_everything(11, verbose=False)
    world, rank = dist.get_world_size(), dist.get_rank()
    batches = [{k: v.chunk(world)[rank] for k, v in b.items()} for b in make_batches(4, 2)]
    loader = DataLoader(batches, batch_size=None)  # type: ignore[arg-type]
    module = TinyLM().double()
    trainer = _trainer(world)
    before = trainer.validate(module, loader, verbose=False)[0]["val_loss"]
    trainer.fit(module, loader, loader)
    fitted = trainer.callback_metrics["val_loss"].item()
    after = trainer.validate(module, loader, verbose=False)[0]["val_loss"]
    tested = trainer.test(module, loader, verbose=False)[0]["test_loss"]
    predicted = trainer.predict(module, loader)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, loader, loader)
    assert predicted is not None
    return {
        "before": before,
        "fitted": fitted,
        "after": after,
        "tested": tested,
        "shape": tuple(predicted[0].shape),
        "losses": module.losses,
        "weights": gathered(dict(module.named_parameters())),
        "gradients": module.gradients,
        "norm": None,
    }


def test_validate_fit_test_predict_and_fit_again_agree_with_one_process() -> None:
    expected = train_alone(make_batches(4, 2) * 2)
    for result in run_on_ranks(2, _validate_then_fit_then_all):
        assert_same_training(result, expected)
        assert result["fitted"] == pytest.approx(result["after"], rel=1e-12)
        assert result["after"] == pytest.approx(result["tested"], rel=1e-12)
        assert result["after"] < result["before"]
        assert result["shape"] == (2, 12)


class Manual(TinyLM):
    """Manual optimization that runs the module twice in one step."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.automatic_optimization = False

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        for _ in range(2):
            optimizer.zero_grad()
            loss = self.head(self.hidden(batch["input_ids"]), batch["labels"])
            self.losses.append(loss.item())
            self.manual_backward(loss)
            self.clip_gradients(optimizer, gradient_clip_val=0.05)
            optimizer.step()


def _fit_manual() -> dict[str, Any]:
    import tests.tiny as tiny

    original, tiny.TinyLM = tiny.TinyLM, Manual  # type: ignore[misc]
    try:
        return fit(make_batches(4, 2))
    finally:
        tiny.TinyLM = original  # type: ignore[misc]


def test_manual_optimization_may_run_forward_and_step_twice() -> None:
    batches = [batch for batch in make_batches(4, 2) for _ in range(2)]
    expected = train_alone(batches, clip=0.05)
    for result in run_on_ranks(2, _fit_manual):
        result["gradients"] = expected["gradients"] = []  # recorded after clipping in manual mode
        assert_same_training(result, expected)


class Infinite(TinyLM):
    def on_after_backward(self) -> None:
        if self.trainer.global_step == 0 and self.trainer.global_rank == 1:
            next(iter(self.head.parameters())).grad.to_local().fill_(float("inf"))


def _fit_infinite() -> dict[str, Any]:
    import torch.distributed as dist

    pl.seed_everything(11, verbose=False)
    module = Infinite(optimizer="adamw", lr=0.1)
    start = gathered(dict(module.named_parameters()))
    trainer = _trainer(dist.get_world_size(), gradient_clip_val=1.0, max_steps=1)
    trainer.fit(module, _loader())
    skipped = trainer.strategy.precision_plugin.skipped_steps  # type: ignore[union-attr]
    return {"start": start, "end": gathered(dict(module.named_parameters())), "skipped": skipped}


def test_a_norm_that_is_not_finite_on_one_rank_skips_the_step_on_all() -> None:
    for result in run_on_ranks(2, _fit_infinite):
        assert result["skipped"] == 1
        for name, value in result["start"].items():
            assert torch.equal(result["end"][name], value), name


def _fit_meta(parallel: dict[str, Any]) -> dict[str, Tensor]:
    import torch.distributed as dist

    class Late(TinyLM):
        def __init__(self) -> None:
            pl.LightningModule.__init__(self)
            self.optimizer, self.lr, self.losses, self.gradients = "sgd", 0.0, [], []

        def configure_model(self) -> None:
            if not hasattr(self, "blocks"):
                late = TinyLM()
                self.embedding, self.blocks, self.head = late.embedding, late.blocks, late.head

    pl.seed_everything(3, verbose=False)
    strategy = {"parallel": ParallelConfig(**parallel), "fsdp": FSDPConfig(meta_device=True)}
    module = Late()
    _trainer(dist.get_world_size(), strategy, max_steps=1).fit(module, _loader())
    return gathered(dict(module.named_parameters()))


def test_meta_initialisation_gives_the_same_weights_at_every_layout() -> None:
    reference = run_on_ranks(1, _fit_meta, {})[0]
    assert all(value.std() > 0 for name, value in reference.items() if "norm" not in name and "bias" not in name)
    for world, parallel in [
        (2, {"expert_parallel_size": 2}),
        (4, {"expert_parallel_size": 2}),
        (4, {"replicate_size": 2}),
    ]:
        for weights in run_on_ranks(world, _fit_meta, parallel):
            for name, expected in reference.items():
                assert torch.equal(weights[name], expected), (world, parallel, name)


def _fit_unseeded() -> list[dict[str, Tensor]]:
    import torch.distributed as dist

    torch.manual_seed(100 + dist.get_rank())  # ranks that start from different weights
    module = TinyLM(lr=0.0)
    _trainer(dist.get_world_size(), {"parallel": ParallelConfig(replicate_size=2)}, max_steps=1).fit(module, _loader())
    return [gathered(dict(module.named_parameters()))]


def test_ranks_that_were_not_seeded_alike_start_from_the_weights_of_rank_0() -> None:
    torch.manual_seed(100)
    expected = gathered(dict(TinyLM().named_parameters()))
    for (weights,) in run_on_ranks(2, _fit_unseeded):
        for name, value in expected.items():
            assert torch.equal(weights[name], value), name


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_bfloat16_trains_close_to_float32_with_float32_routing(precision: str) -> None:
    batches = make_batches(4, 3)
    strategy = {"parallel": ParallelConfig(expert_parallel_size=2)}
    result = run_on_ranks(2, fit, batches, strategy, None, {"precision": precision}, None, False)[0]
    exact = train_alone(batches, double=False)
    dtype = torch.float32 if precision == "bf16-mixed" else torch.bfloat16
    assert {value.dtype for value in result["weights"].values()} == {dtype}
    torch.testing.assert_close(torch.tensor(result["losses"]), torch.tensor(exact["losses"]), rtol=0.03, atol=0.03)


def test_settings_reach_the_hyper_parameters_of_a_logger(tmp_path: Any) -> None:
    from lightning.pytorch.loggers import CSVLogger

    logger = CSVLogger(tmp_path)
    results = run_on_ranks(1, _fit_logged, str(tmp_path))
    assert results[0]["longmoe"]["parallel"]["expert_parallel_size"] == "auto"
    assert logger is not None


def _fit_logged(folder: str) -> dict[str, Any]:
    from lightning.pytorch.loggers import CSVLogger

    logger = CSVLogger(folder)
    _trainer(1, logger=logger, max_steps=1).fit(TinyLM(), _loader())
    return dict(logger.experiment.hparams)


# ---------------------------------------------------------------------------------------------------------------------
# Labels and targets
# ---------------------------------------------------------------------------------------------------------------------
class ShiftsItself(TinyLM):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        own = nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)
        return self.head(self.hidden(batch["input_ids"]), own)


def test_labels_that_the_module_shifts_a_second_time_are_refused() -> None:
    with pytest.raises(RemoteError, match="shifts labels that were shifted before"):
        run_on_ranks(1, _fit_class, ShiftsItself)


def test_module_that_owns_no_head_keeps_its_labels() -> None:
    assert BatchConfig().labels_shifted is False
    assert not any(isinstance(m, CausalLMHead) for m in Dense().modules())


# ---------------------------------------------------------------------------------------------------------------------
# What ordinary projects do besides
# ---------------------------------------------------------------------------------------------------------------------
class Sampling(TinyLM):
    """Runs its parts in hooks, outside the four steps."""

    def on_train_epoch_end(self) -> None:
        with torch.no_grad():
            self.sampled = self.head(self.hidden(torch.zeros(1, 12, dtype=torch.long))).double().sum().item()


def _fit_sampling() -> float:
    import torch.distributed as dist

    pl.seed_everything(11, verbose=False)
    module = Sampling(lr=0.0).double()
    _trainer(dist.get_world_size()).fit(module, _loader())
    return module.sampled


def test_parts_of_a_module_run_in_hooks_outside_the_steps() -> None:
    pl.seed_everything(11, verbose=False)
    module = TinyLM().double()
    expected = module.head(module.hidden(torch.zeros(1, 12, dtype=torch.long))).double().sum().item()
    assert run_on_ranks(2, _fit_sampling) == [pytest.approx(expected, rel=1e-9)] * 2


class WithoutOptimizer(TinyLM):
    def configure_optimizers(self) -> None:  # type: ignore[override]
        return None


def test_a_module_without_optimizer_runs_as_under_any_strategy() -> None:
    run_on_ranks(2, _fit_class, WithoutOptimizer)


class Flattening(TinyLM):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(self.parameters())


def _fit_averaging() -> None:
    import torch.distributed as dist
    from lightning.pytorch.callbacks import StochasticWeightAveraging

    _trainer(dist.get_world_size(), callbacks=[StochasticWeightAveraging(0.1)]).fit(TinyLM(), _loader())


def test_what_cannot_work_on_sharded_parameters_is_refused_by_name() -> None:
    with pytest.raises(RemoteError, match="LBFGS cannot update sharded parameters"):
        run_on_ranks(2, _fit_class, Flattening)
    with pytest.raises(RemoteError, match="StochasticWeightAveraging averages whole weights"):
        run_on_ranks(2, _fit_averaging)


def _second_fit_with_a_new_part() -> None:
    import torch.distributed as dist

    module = TinyLM()
    _trainer(dist.get_world_size()).fit(module, _loader())
    module.added = nn.Linear(3, 3)
    _trainer(dist.get_world_size()).fit(module, _loader())


def test_parameters_that_appear_after_sharding_are_refused_by_name() -> None:
    with pytest.raises(RemoteError, match=r"outside every group.*added\.weight"):
        run_on_ranks(2, _second_fit_with_a_new_part)
