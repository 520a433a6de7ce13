"""`UnigramBaseline`."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_longmoe.callbacks import UnigramBaseline
from tests.callbacks.small import Small, SmallData, loader, trainer


def test_loss_and_entropy_are_printed_side_by_side_with_their_perplexities(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fitting = trainer(tmp_path, callbacks=[UnigramBaseline()], num_sanity_val_steps=1)
    fitting.fit(Small(), datamodule=SmallData())
    lines = [line for line in capsys.readouterr().out.splitlines() if "val_loss" in line]
    assert lines == [
        "val_loss 1.500 nats per token (perplexity 4.48); unigram entropy of the text 0.693 (perplexity 2.00)"
    ]
    assert float(fitting.callback_metrics["longmoe/unigram_entropy"]) == pytest.approx(0.6931472)


def test_data_without_an_entropy_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="NoneType has no such method.*leave this callback out"):
        trainer(tmp_path, callbacks=[UnigramBaseline()]).fit(Small(), loader(1))
