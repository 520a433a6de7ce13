"""Named ranges appear in profiles of the steps that are profiled, and nowhere else."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from lightning_longmoe import LongMoEStrategy
from lightning_longmoe.runtime.ranges import ranged
from tests.pool import run_on_ranks
from tests.tiny import TinyLM, make_batches

EXPECTED = {
    "longmoe/dispatch/plan": 2 * 2,
    "longmoe/dispatch/forward": 2 * 2,
    "longmoe/dispatch/backward": 2 * 2,
    "longmoe/vocabulary/forward": 2,
    "longmoe/vocabulary/backward": 2,
    "longmoe/clip": 2,
}
"""How often in two steps of two layers."""


def _profiled() -> dict[str, int]:
    seen: dict[str, int] = {}

    def ready(profile: torch.profiler.profile) -> None:
        seen.update({event.key: event.count for event in profile.key_averages() if event.key.startswith("longmoe/")})

    class Steps(pl.Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            profile.step()

    trainer = pl.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=LongMoEStrategy(),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        max_epochs=1,
        gradient_clip_val=1.0,
        callbacks=[Steps()],
    )
    schedule = torch.profiler.schedule(wait=1, warmup=1, active=2, repeat=1)
    with torch.profiler.profile(schedule=schedule, on_trace_ready=ready) as profile:
        trainer.fit(TinyLM(), DataLoader(make_batches(2, 6), batch_size=None))
    return seen


def test_two_active_steps_show_every_operator_as_often_as_it_ran() -> None:
    for seen in run_on_ranks(2, _profiled):
        assert {name: seen.get(name) for name in EXPECTED} == EXPECTED
        assert seen["longmoe/dispatch/chunk"] >= 2 * EXPECTED["longmoe/dispatch/forward"]
        assert seen["longmoe/vocabulary/hop"] >= 2


def test_without_a_profiler_the_function_is_just_called() -> None:
    calls = []
    function = ranged("longmoe/nothing")(lambda value: calls.append(value) or value + 1)
    assert function(1) == 2
    assert calls == [1]
