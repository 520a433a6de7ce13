"""Checkpoint offload under the strategy and, by its callback, under others: the same training to the bit."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from lightning_longmoe import BoundaryOffload, CausalLMModule, LongMoEStrategy, PipelinedLLEP, RecomputeConfig
from lightning_longmoe.callbacks import BoundaryOffloadCallback, PeakMemoryMonitor
from lightning_longmoe.config import ParallelConfig
from tests.pool import run_on_ranks
from tests.tiny import VOCAB, TinyLM, assert_same_training, fit, make_batches, train_alone

OFFLOAD = {"keep_last": 0}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"dispatch": None, "vocabulary": None},
    "operators": {"dispatch": {"tokens_per_chunk": 5, "min_tokens_per_gemm": 1, "imbalance_threshold": 1.0}},
    "late reduction": {"fsdp": {"sync_each_microbatch": False}},
}


def _bitwise(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert actual["losses"] == expected["losses"]
    for ours, theirs in zip(actual["gradients"], expected["gradients"], strict=True):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert all(torch.equal(actual["weights"][name], expected["weights"][name]) for name in expected["weights"])


@pytest.mark.parametrize("setting", list(SETTINGS))
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_training_is_bitwise_that_without_offload_and_that_of_one_process(ranks: int, setting: str) -> None:
    batches = make_batches(4, 4)
    arguments = {"strategy": SETTINGS[setting], "trainer": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}}
    offloaded = {**arguments, "strategy": {**SETTINGS[setting], "boundaries": OFFLOAD}}
    actual = run_on_ranks(ranks, fit, batches, **offloaded)[0]
    _bitwise(actual, run_on_ranks(ranks, fit, batches, **arguments)[0])
    if ranks == 1:
        assert_same_training(actual, train_alone(batches, accumulate=2, clip=0.1))


def _small_module(**settings: Any) -> CausalLMModule:
    pl.seed_everything(5, verbose=False)
    model = {"vocab_size": VOCAB, "hidden_size": 16, "num_layers": 3, "num_heads": 2, "ffn_size": 16}
    return CausalLMModule(**model, num_experts=4, top_k=2, **settings)


def _trainer(strategy: Any, **settings: Any) -> pl.Trainer:
    names = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary", "use_distributed_sampler")
    quiet = {**dict.fromkeys(names, False), "num_sanity_val_steps": 0, "max_epochs": 1}
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    return pl.Trainer(accelerator="cpu", devices=ranks, strategy=strategy, **{**quiet, **settings})


def _counts(boundaries_per_layer: int, precision: str) -> dict[str, Any]:
    strategy = LongMoEStrategy(
        boundaries=BoundaryOffload(keep_last=1), recompute=RecomputeConfig(boundaries_per_layer=boundaries_per_layer)
    )
    module = _small_module()
    loader = DataLoader(make_batches(2, 3), batch_size=None)
    trainer = _trainer(strategy, precision=precision)
    trainer.fit(module, loader, loader)
    rows = {row[0]: row[2] for row in strategy.takeover.rows}
    offloader = strategy.takeover.offloader
    assert offloader is not None
    assert offloader.alive == 0
    return {
        **offloader.stats(),
        "decision": strategy.takeover.decisions["boundaries"],
        "row": rows["boundaries"],
        "loss": float(trainer.callback_metrics["train_loss"]),
    }


@pytest.mark.parametrize(("precision", "itemsize"), [("32-true", 4), ("bf16-mixed", 2)])
def test_one_or_two_boundaries_a_layer_are_offloaded_and_nothing_else(precision: str, itemsize: int) -> None:
    boundary = 2 * 12 * 16 * itemsize
    losses = []
    for per_layer in (1, 2):
        for result in run_on_ranks(2, _counts, per_layer, precision):
            assert result["boundaries"] == 3 * per_layer
            assert result["offloaded"] == 3 * per_layer - 1
            assert result["payload_bytes"] == result["host_bytes"] == result["offloaded"] * boundary
            assert result["decision"] == "BoundaryOffload"
            assert result["row"].startswith(f"{3 * per_layer} of tokens x H x bytes each, BoundaryOffload (as conf")
        losses.append(result["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6 if itemsize == 4 else 0.02)


def test_auto_leaves_boundaries_on_the_cpu_and_says_so() -> None:
    strategy = LongMoEStrategy()
    _trainer(strategy).fit(TinyLM(), DataLoader(make_batches(2, 1), batch_size=None))
    assert strategy.takeover.offloader is None
    assert ("boundaries", "blocks.0, blocks.1") in [row[:2] for row in strategy.takeover.rows]
    assert "auto: there is no other memory" in next(r[2] for r in strategy.takeover.rows if r[0] == "boundaries")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"recompute": RecomputeConfig(enabled=False)}, "nothing is recomputed .RecomputeConfig.enabled=False."),
        ({"recompute": RecomputeConfig(boundaries_per_layer=2)}, "cannot apply to TinyBlock"),
        ({"host_memory": "1KB", "boundaries": {"host_budget": "1MB"}}, "host_memory leaves this rank 0.00 GiB"),
    ],
)
def test_settings_that_cannot_apply_are_refused_at_the_start(arguments: dict[str, Any], message: str) -> None:
    strategy = LongMoEStrategy(**{"boundaries": BoundaryOffload(), **arguments})
    with pytest.raises(ValueError, match=message):
        _trainer(strategy).fit(TinyLM(), DataLoader(make_batches(2, 1), batch_size=None))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"boundaries": "on"}, "give 'auto', None or a BoundaryOffload"),
        ({"boundaries": {"keep": 1}}, "boundaries has no field"),
        ({"boundaries": {"host_budget": "plenty"}}, "host_budget='plenty' is not allowed"),
        ({"boundaries": {"keep_last": -1}}, "keep_last=-1"),
        ({"host_memory": "1.5"}, "host_memory='1.5' is not allowed: a fraction"),
        ({"recompute": {"boundaries_per_layer": 3}}, "Choose one of"),
    ],
)
def test_settings_that_are_wrong_by_themselves_are_refused_at_once(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LongMoEStrategy(**arguments)


class _Noisy(TinyLM):
    """Adds noise to what the router sees, in recomputations alone."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        from lightning_longmoe.runtime.replay import replaying

        for block in self.blocks:
            block.moe.router.register_forward_pre_hook(
                lambda _, args: (args[0] + 1e-3 * torch.randn_like(args[0]) * replaying(), *args[1:])
            )


def _fit_noisy() -> list[float]:
    module = _Noisy()
    plan = PipelinedLLEP(min_tokens_per_gemm=1, imbalance_threshold=1.0)
    strategy = LongMoEStrategy(parallel=ParallelConfig(expert_parallel_size=2), dispatch=plan, boundaries=OFFLOAD)
    _trainer(strategy).fit(module, DataLoader(make_batches(2, 5), batch_size=None))
    return module.losses


def test_a_recomputation_that_would_route_otherwise_uses_the_first_choice() -> None:
    assert all(len(losses) == 5 for losses in run_on_ranks(2, _fit_noisy))


def _fit_with_callback(kind: str, offload: bool) -> tuple[list[float], list[torch.Tensor], dict[str, int]]:
    from lightning.pytorch.strategies import ModelParallelStrategy

    class Sharded(TinyLM):
        def configure_model(self) -> None:
            from torch.distributed.fsdp import FSDPModule, fully_shard

            if kind == "model parallel" and not isinstance(self.blocks[0], FSDPModule):
                for part in (self.embedding, *self.blocks, self.head):
                    fully_shard(part, mesh=self.device_mesh["data_parallel"])

    pl.seed_everything(3, verbose=False)
    module = Sharded()
    before = {name: block.forward.__func__ for name, block in module.blocks.named_children()}
    callback = BoundaryOffloadCallback(BoundaryOffload(keep_last=0))
    strategy = {
        "single": "auto",
        "ddp": pl.strategies.DDPStrategy(process_group_backend="gloo"),
        "model parallel": ModelParallelStrategy(),
    }[kind]
    trainer = _trainer(strategy, callbacks=[callback] if offload else [])
    loader = DataLoader(make_batches(2, 4), batch_size=None)
    trainer.fit(module, loader, loader)
    stats = {} if callback.offloader is None else callback.offloader.stats()
    assert {name: block.forward.__func__ for name, block in module.blocks.named_children()} == before
    return module.losses, [g for gradients in module.gradients for g in gradients.values()], stats


@pytest.mark.parametrize("kind", ["single", "ddp", "model parallel"])
def test_the_callback_is_one_line_under_other_strategies(kind: str) -> None:
    ranks = 1 if kind == "single" else 2
    plain = run_on_ranks(ranks, _fit_with_callback, kind, False, init_group=kind != "single")[0]
    losses, gradients, stats = run_on_ranks(ranks, _fit_with_callback, kind, True, init_group=kind != "single")[0]
    assert losses == plain[0]
    assert all(torch.equal(a, b) for a, b in zip(gradients, plain[1], strict=True))
    assert (stats["boundaries"], stats["offloaded"]) == (2, 2)


def test_the_callback_refuses_what_it_is_not_for() -> None:
    loader = DataLoader(make_batches(2, 1), batch_size=None)
    with pytest.raises(ValueError, match=r"pass LongMoEStrategy\(boundaries="):
        _trainer(LongMoEStrategy(), callbacks=[BoundaryOffloadCallback()]).fit(TinyLM(), loader)
    with pytest.raises(ValueError, match="No module of class"):
        _trainer("auto", callbacks=[BoundaryOffloadCallback(blocks=["Nobody"])]).fit(TinyLM(), loader)
    module = TinyLM()
    module.blocks[1].gradient_checkpointing = True
    with pytest.raises(ValueError, match="'blocks.1' checkpoints its activations already"):
        _trainer("auto", callbacks=[BoundaryOffloadCallback()]).fit(module, loader)


def _monitored() -> dict[str, float]:
    seen: dict[str, float] = {}

    class Watch(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
            seen.update({k: float(v) for k, v in trainer.callback_metrics.items() if "boundaries" in k})

    callbacks = [PeakMemoryMonitor(), Watch()]
    trainer = _trainer(LongMoEStrategy(boundaries=OFFLOAD), callbacks=callbacks, log_every_n_steps=1)
    trainer.fit(TinyLM(), DataLoader(make_batches(2, 3), batch_size=None))
    return seen


def test_the_memory_monitor_shows_what_boundaries_hold() -> None:
    boundary = 2 * 12 * 16 * 4 / 2**30
    seen = _monitored()
    assert seen["longmoe/peak_boundaries_gib"] == pytest.approx(2 * boundary)
    assert seen["longmoe/host_boundaries_gib"] == pytest.approx(2 * boundary)
