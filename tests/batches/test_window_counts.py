"""What a window was counted to hold is what the heads get, or no rank updates its weights."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_longmoe import CausalLMHead, LongMoEStrategy
from lightning_longmoe.config import BatchConfig, FSDPConfig
from lightning_longmoe.runtime.reduction import TokenReduction, WindowScale
from tests.pool import run_on_ranks
from tests.tiny import VOCAB, TinyLM, assert_same_training, make_batches, train_alone

PROMPT = 5


def masked(targets: Tensor) -> Tensor:
    """Without the targets of the prompt."""
    targets = targets.clone()
    targets[:, : PROMPT - 1] = -100
    return targets


class MasksPrompts(TinyLM):
    """Masks prompt tokens in the step, after the strategy counted the batch's labels."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.head(self.hidden(batch["input_ids"]), masked(batch["labels"]))
        self.losses.append(loss.item())
        return loss


class CountsWhatItMasks(MasksPrompts):
    def count_valid_targets(self, batch: dict[str, Tensor]) -> int:
        return int((batch["labels"][:, PROMPT:] != -100).sum())


class SecondHead(TinyLM):
    """A second head that predicts the token after the next, of which every sequence has one fewer."""

    def __init__(self) -> None:
        super().__init__()
        self.second = CausalLMHead(16, VOCAB)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        hidden, targets = self.hidden(batch["input_ids"]), batch["labels"]
        after = nn.functional.pad(targets[:, 1:], (0, 1), value=-100)
        return self.head(hidden, targets) + self.second(hidden, after)


class OneHeadTwice(TinyLM):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        hidden, targets = self.hidden(batch["input_ids"]), batch["labels"]
        return self.head(hidden, targets) + self.head(2 * hidden, targets)


class SkipsBatches(TinyLM):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor | None:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx == 1 else loss


class Validates(TinyLM):
    """Validates in the middle of a window, with losses that are not the window's."""


def train(
    kind: type[TinyLM], batch: dict[str, Any] | None = None, fsdp: FSDPConfig = FSDPConfig(), **settings: Any
) -> dict[str, Any]:
    import torch.distributed as dist

    pl.seed_everything(11, verbose=False)
    world, rank = dist.get_world_size(), dist.get_rank()
    module = kind().double()
    mine = [{k: v[rank * 4 // world : (rank + 1) * 4 // world] for k, v in b.items()} for b in make_batches(4, 4)]
    trainer = pl.Trainer(
        strategy=LongMoEStrategy(batch=BatchConfig(**(batch or {})), fsdp=fsdp),
        accelerator="cpu",
        devices=world,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        **{"accumulate_grad_batches": 2, **settings},
    )
    loader = DataLoader(mine, batch_size=None)  # type: ignore[arg-type]
    try:
        trainer.fit(module, loader, loader if kind is Validates else None)
    except ValueError as error:
        return {"error": str(error), "steps": trainer.global_step}
    return {"losses": module.losses, "gradients": module.gradients, "weights": {}, "norm": None, "error": None}


def test_targets_that_the_module_masks_are_refused_before_any_update_on_all_ranks() -> None:
    batches = make_batches(4, 2)
    counted = sum(int((b["labels"][:, 1:] != -100).sum()) for b in batches)
    got = sum(int((b["labels"][:, PROMPT:] != -100).sum()) for b in batches)
    for result in run_on_ranks(2, train, MasksPrompts):
        assert result["steps"] == 0
        for part in (f"{counted} valid labels", f"got {got} valid", "count_valid_targets", "normalize='microbatch'"):
            assert part in result["error"]


def test_a_module_that_counts_what_it_masks_trains_as_one_process() -> None:
    batches = [{**b, "labels": b["labels"].clone()} for b in make_batches(4, 4)]
    for batch in batches:
        batch["labels"][:, :PROMPT] = -100
    expected = {**train_alone(batches, accumulate=2), "weights": {}}
    for result in run_on_ranks(2, train, CountsWhatItMasks):
        assert_same_training(result, expected)


@pytest.mark.parametrize("settings", [{"accumulate_grad_batches": 1}, {"batch": {"normalize": "microbatch"}}])
def test_without_a_window_the_module_may_mask(settings: dict[str, Any]) -> None:
    assert run_on_ranks(1, train, MasksPrompts, **settings)[0]["error"] is None


def test_a_second_head_with_fewer_targets_is_named_and_refused() -> None:
    for result in run_on_ranks(2, train, SecondHead):
        assert "in loss 2 of the 2" in result["error"]


@pytest.mark.parametrize("kind", [OneHeadTwice, TinyLM, Validates])
def test_losses_of_all_counted_targets_pass(kind: type[TinyLM]) -> None:
    for sync in (True, False):
        fsdp = FSDPConfig(sync_each_microbatch=sync)
        result = run_on_ranks(2, train, kind, None, fsdp=fsdp, val_check_interval=1)[0]
        assert result["error"] is None


def test_a_micro_batch_that_the_step_skips_is_refused() -> None:
    batches = make_batches(4, 2)
    kept = int((batches[0]["labels"][:, 1:] != -100).sum())
    assert f"got {kept} valid" in run_on_ranks(1, train, SkipsBatches)[0]["error"]


def reduction_in(window: WindowScale) -> TokenReduction:
    reduction = TokenReduction()
    reduction.begin_microbatch(window)
    return reduction


def test_a_recomputed_loss_counts_once() -> None:
    head = CausalLMHead(4, 7)
    head.reduction = reduction_in(WindowScale(accumulate=2, valid_tokens=6))
    hidden, targets = torch.randn(2, 3, 4, requires_grad=True), torch.ones(2, 3, dtype=torch.int64)
    checkpoint(head, hidden, targets, use_reentrant=False).backward()
    head.reduction.end_microbatch()
    head.reduction.check_window()


def test_a_loss_without_gradient_does_not_count() -> None:
    head = CausalLMHead(4, 7)
    head.reduction = reduction_in(WindowScale(accumulate=2, valid_tokens=1))
    with torch.no_grad():
        head(torch.randn(2, 3, 4), torch.ones(2, 3, dtype=torch.int64))
    head.reduction.end_microbatch()
    head.reduction.check_window()


def test_a_loss_that_had_no_backward_does_not_count() -> None:
    window = WindowScale(accumulate=2, valid_tokens=3)
    reduction = reduction_in(window)
    reduction.note_loss("head", torch.tensor(7.0))
    reduction.begin_microbatch(window)
    reduction.note_loss("head", torch.tensor(3.0))
    reduction.end_microbatch()
    reduction.check_window()
