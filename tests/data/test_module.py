"""`LongTextDataModule` gives the same samples in the same order under every strategy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.cli import LightningCLI
from torch import Tensor, nn

from lightning_longmoe import LongTextDataModule
from tests.pool import run_on_ranks


@pytest.fixture
def text(tmp_path: Path) -> str:
    for index in range(12):
        (tmp_path / f"{index:02}.txt").write_bytes(bytes([65 + index]) * 50)
    return str(tmp_path)


def test_batches_are_equal_int64_inputs_and_labels(text: str) -> None:
    data = LongTextDataModule(text, sequence_length=16, batch_size=3, val_fraction=0.1)
    batch = next(iter(data.train_dataloader()))
    assert batch["input_ids"].shape == (3, 16)
    assert batch["input_ids"].dtype == batch["labels"].dtype == torch.int64
    assert torch.equal(batch["input_ids"], batch["labels"])
    assert batch["input_ids"].data_ptr() != batch["labels"].data_ptr()


def test_training_and_validation_text_do_not_overlap(text: str) -> None:
    data = LongTextDataModule(text, sequence_length=10, batch_size=1, val_fraction=0.2)
    training = {int(t) for batch in data.train_dataloader() for t in batch["input_ids"].flatten()}
    validation = {int(t) for batch in data.val_dataloader() for t in batch["input_ids"].flatten()}
    assert len(validation) == 2
    assert len(training) == 10
    assert not training & validation


def test_the_standard_library_is_the_default_and_described() -> None:
    data = LongTextDataModule()
    assert 2.5 < data.unigram_entropy() < 4.0
    line = data.describe()
    assert "M byte tokens" in line
    assert f"unigram entropy {data.unigram_entropy():.3f} nats" in line
    assert data.vocab_size == 256


def test_a_limit_uses_the_beginning_of_the_text(text: str) -> None:
    data = LongTextDataModule(text, sequence_length=10, batch_size=1, val_fraction=0, limit_tokens=70)
    seen = torch.cat([batch["input_ids"] for batch in data.train_dataloader()])
    assert sorted(seen.flatten().tolist()) == [65] * 50 + [66] * 20


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sequence_length": 0}, "sequence_length=0"),
        ({"batch_size": -1}, "batch_size=-1"),
        ({"val_fraction": 1.0}, "val_fraction=1.0"),
        ({"limit_tokens": 0}, "limit_tokens=0"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LongTextDataModule(**settings)


def test_text_shorter_than_a_sequence_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="The training text has 600 tokens, less than one sequence of 1000"):
        LongTextDataModule(text, sequence_length=1000, val_fraction=0).setup()
    with pytest.raises(ValueError, match="The validation text has 50 tokens, less than one sequence of 60"):
        LongTextDataModule(text, sequence_length=60, val_fraction=0.1).setup()
    with pytest.raises(ValueError, match="makes 12 sequences of 50 tokens, less than one batch of 13 on each of 1"):
        LongTextDataModule(text, sequence_length=50, batch_size=13, val_fraction=0).train_dataloader()


class Reader(pl.LightningModule):
    """Records the first token of each sequence that it trains on and validates."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.trained: list[list[int]] = []
        self.validated: list[int] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.trained.append(batch["input_ids"][:, 0].tolist())
        return self.layer(torch.ones(1)).sum()

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.validated += batch["input_ids"][:, 0].tolist()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def read(strategy: str, devices: int, text: str, batch_size: int) -> Any:
    module = Reader()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        max_epochs=2,
        num_sanity_val_steps=0,
        enable_model_summary=False,
        **quiet,
    )
    trainer.fit(module, LongTextDataModule(text, sequence_length=10, batch_size=batch_size, val_fraction=0.2, seed=3))
    return module.trained, module.validated


@pytest.mark.parametrize("strategy", ["ddp", "longmoe"])
def test_two_ranks_train_the_samples_of_one_process_in_its_order(text: str, strategy: str) -> None:
    alone, validated = read("auto", 1, text, 4)
    first, second = run_on_ranks(2, read, strategy, 2, text, 2, timeout_s=30)
    assert len(first[0]) == len(alone)
    for step, batch in enumerate(alone):
        assert [n for pair in zip(first[0][step], second[0][step], strict=True) for n in pair] == batch
    if strategy == "longmoe":  # DDP repeats samples to even out the ranks
        assert sorted(first[1] + second[1]) == sorted(validated)


def test_no_validation_text_trains_without_validation(text: str) -> None:
    class Plain(Reader):
        pass

    module = Plain()
    trainer = pl.Trainer(max_steps=1, logger=False, enable_checkpointing=False, enable_progress_bar=False)
    trainer.fit(module, LongTextDataModule(text, sequence_length=10, val_fraction=0))
    assert len(module.trained) == 1
    assert module.validated == []


def test_workers_give_the_same_batches(text: str) -> None:
    batches = [
        [batch["input_ids"].tolist() for batch in LongTextDataModule(text, 10, 4, num_workers=n).train_dataloader()]
        for n in (0, 2)
    ]
    assert batches[0] == batches[1]


@pytest.mark.parametrize("paths", ["--data.paths={0}", "--data.paths=['{0}']"])
def test_command_line_and_yaml_express_every_argument(text: str, paths: str) -> None:
    settings = {"sequence_length": 10, "limit_tokens": 200, "val_fraction": 0.2, "num_workers": 0}
    arguments = [f"--data.{name}={value}" for name, value in settings.items()]
    cli = LightningCLI(
        Reader, LongTextDataModule, args=[paths.format(text), *arguments], run=False, save_config_callback=None
    )
    assert cli.datamodule.paths in (text, [text])
    assert (cli.datamodule.limit_tokens, cli.datamodule.val_fraction) == (200, 0.2)
