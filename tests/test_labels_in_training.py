"""No module trains on labels that were shifted twice or not at all: it learns the next token, or it is told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_longmoe import LongMoEStrategy
from lightning_longmoe.config import BatchConfig
from lightning_longmoe.models import mark_shifted, shift_labels
from lightning_longmoe.models.auxiliary import take_aux_loss
from tests.pool import run_on_ranks
from tests.tiny import VOCAB, TinyLM, assert_same_training, make_batches, train_alone


@dataclass
class Data:
    input_ids: Tensor
    labels: Tensor


def plain(batch: dict[str, Tensor]) -> Any:
    return batch


def nested(batch: dict[str, Tensor]) -> Any:
    return {"text": batch, "names": ["a", "b"]}


def in_a_list(batch: dict[str, Tensor]) -> Any:
    return [batch, 1]


def as_object(batch: dict[str, Tensor]) -> Any:
    return Data(**batch)


def under_another_name(batch: dict[str, Tensor]) -> Any:
    return {"tokens": batch["input_ids"], "labels": batch["labels"]}


def shifted_under_another_name(batch: dict[str, Tensor]) -> Any:
    return {"tokens": batch["input_ids"], "labels": F.pad(batch["labels"][:, 1:], (0, 1), value=-100)}


def pair(batch: dict[str, Tensor]) -> Any:
    """(x, y) whose y is x moved by one already, as many datasets give."""
    return batch["input_ids"], F.pad(batch["labels"][:, 1:], (0, 1), value=-100)


def equal_pair(batch: dict[str, Tensor]) -> Any:
    return batch["input_ids"], batch["labels"]


def one_tensor(batch: dict[str, Tensor]) -> Any:
    return batch["input_ids"]


def with_classes(batch: dict[str, Tensor]) -> Any:
    return {"input_ids": batch["input_ids"], "labels": batch["input_ids"][:, 0] % 3}


class Reads(TinyLM):
    """Finds its inputs and labels in any of those batches and gives the labels to the head as they are."""

    def both(self, batch: Any) -> tuple[Tensor, Tensor]:
        if isinstance(batch, Tensor):
            return batch, batch
        if isinstance(batch, dict) and "text" in batch:
            batch = batch["text"]
        if isinstance(batch, (list, tuple)) and isinstance(batch[0], dict):
            batch = batch[0]
        if isinstance(batch, Data):
            return batch.input_ids, batch.labels
        if isinstance(batch, dict):
            return batch.get("input_ids", batch.get("tokens")), batch["labels"]  # type: ignore[return-value]
        return batch[0], batch[1]

    def loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        return self.head(self.hidden(inputs), labels)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(*self.both(batch))
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(*self.both(batch))


class OwnShift(Reads):
    """The textbook loss: its own shift, on the head's logits."""

    def loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.hidden(inputs))[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten()) + take_aux_loss()


class OwnLoss(Reads):
    """A loss of its own, with the one shift of both worlds."""

    def loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.hidden(inputs))
        return F.cross_entropy(logits.flatten(0, 1), shift_labels(labels).flatten()) + take_aux_loss()


class WithoutTheHead(Reads):
    def loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        logits = (self.hidden(inputs) @ self.embedding(torch.arange(VOCAB)).T)[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten()) + take_aux_loss()


class ShiftsForTheHead(Reads):
    def loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        return self.head(self.hidden(inputs), shift_labels(labels))


class OnlyValidatesItself(Reads):
    """Its head's loss in training, and a metric of its own over logits in validation."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        inputs, labels = self.both(batch)
        F.cross_entropy(self.head(self.hidden(inputs))[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class Denoises(Reads):
    """Learns the token at each position itself, on purpose."""

    def loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        return self.head(self.hidden(inputs), mark_shifted(inputs.clone()))


class Classifies(Reads):
    """A language model's loss, and a class for each sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.classifier = nn.Linear(16, 3)

    def loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        hidden = self.hidden(inputs)
        return self.head(hidden, shift_labels(inputs)) + F.cross_entropy(self.classifier(hidden.mean(1)), labels)


class Skips(Reads):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx == 0 else super().training_step(batch, batch_idx)


def train(
    kind: type[Reads], make: Any, batch: dict[str, Any] | None = None, validate: bool = False, **settings: Any
) -> dict[str, Any]:
    import torch.distributed as dist

    pl.seed_everything(11, verbose=False)
    world, rank = dist.get_world_size(), dist.get_rank()
    module = kind().double()
    rows = slice(rank * 4 // world, (rank + 1) * 4 // world)
    mine = [make({k: v[rows] for k, v in b.items()}) for b in make_batches(4, 2, ignore=0.0)]
    trainer = pl.Trainer(
        strategy=LongMoEStrategy(batch=BatchConfig(**(batch or {}))),
        accelerator="cpu",
        devices=world,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        **settings,
    )
    loader = DataLoader(mine, batch_size=None)
    try:
        trainer.fit(module, loader, loader if validate else None)
    except ValueError as error:
        return {"error": str(error), "steps": trainer.global_step}
    hooks = module.embedding._forward_pre_hooks.values()
    assert "note_look_up" not in [getattr(hook, "__name__", "") for hook in hooks]
    return {"losses": module.losses, "gradients": module.gradients, "weights": {}, "norm": None, "error": None}


def expected(accumulate: int = 1) -> dict[str, Any]:
    return {**train_alone(make_batches(4, 2, ignore=0.0), accumulate=accumulate), "weights": {}}


LEFT = {"shift_labels": False}
NEXT_TOKENS = [
    (Reads, plain, {}),
    (Reads, nested, {}),
    (Reads, in_a_list, {}),
    (Reads, as_object, {}),
    (Reads, under_another_name, {}),
    (Reads, shifted_under_another_name, {"labels_shifted": True}),
    (Reads, pair, {}),
    (ShiftsForTheHead, nested, LEFT),
    (ShiftsForTheHead, nested, {}),
    (ShiftsForTheHead, equal_pair, {}),
    (ShiftsForTheHead, one_tensor, {}),
    (OwnLoss, nested, {}),
    (OwnLoss, plain, LEFT),
    (OwnShift, plain, LEFT),
    (OwnShift, as_object, LEFT),
    (WithoutTheHead, plain, LEFT),
]


@pytest.mark.parametrize(("kind", "make", "batch"), NEXT_TOKENS)
def test_the_next_token_is_learnt(kind: type[Reads], make: Any, batch: dict[str, Any]) -> None:
    results = run_on_ranks(2, train, kind, make, batch, True)
    assert [result["error"] for result in results] == [None, None]
    if kind in (Reads, ShiftsForTheHead):
        assert_same_training(results[0], expected())
    elif kind is not WithoutTheHead:
        for ours, theirs in zip(results[0]["gradients"], expected()["gradients"], strict=True):
            for name, gradient in theirs.items():
                torch.testing.assert_close(ours[name], gradient, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("make", [nested, as_object])
def test_a_window_counts_labels_wherever_they_are(make: Any) -> None:
    for result in run_on_ranks(2, train, Reads, make, accumulate_grad_batches=2):
        assert_same_training(result, expected(accumulate=2))


TWICE = r"gave no head any targets"
NOT_AT_ALL = r"learn to repeat its input"


@pytest.mark.parametrize(
    ("kind", "make", "batch", "message"),
    [
        (OwnShift, plain, {}, TWICE),
        (OwnShift, nested, {}, TWICE),
        (WithoutTheHead, plain, {}, TWICE),
        (Reads, plain, LEFT, NOT_AT_ALL),
        (Reads, equal_pair, {}, NOT_AT_ALL),
        (Reads, one_tensor, {}, NOT_AT_ALL),
        (Reads, under_another_name, {"labels_shifted": True}, NOT_AT_ALL),
        (Reads, shifted_under_another_name, {}, "Set BatchConfig(labels_shifted=True)"),
        (Reads, with_classes, {}, "no dimension 1"),
    ],
)
def test_what_would_learn_another_token_is_refused_before_any_update(
    kind: type[Reads], make: Any, batch: dict[str, Any], message: str
) -> None:
    for result in run_on_ranks(2, train, kind, make, batch):
        assert message in result["error"]
        assert result["steps"] == 0
        if message in (TWICE, "no dimension 1"):
            assert "BatchConfig(shift_labels=False)" in result["error"]


def test_a_metric_of_labels_that_are_shifted_twice_is_refused() -> None:
    result = run_on_ranks(1, train, OnlyValidatesItself, plain, None, True)[0]
    assert "the validate step gave no head any targets" in result["error"]


def test_targets_that_are_meant_to_be_the_inputs_are_marked() -> None:
    assert run_on_ranks(1, train, Denoises, plain)[0]["error"] is None


def test_a_module_may_classify_sequences_beside_its_head() -> None:
    result = run_on_ranks(2, train, Classifies, with_classes, LEFT)[0]
    assert result["error"] is None
    assert len(result["losses"]) == 2


def test_a_step_that_skips_its_batch_need_not_take_its_labels() -> None:
    result = run_on_ranks(1, train, Skips, plain)[0]
    assert result["error"] is None


