"""``longmoe bench dispatch`` prints what it measured."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from lightning_longmoe import cli
from lightning_longmoe.bench import dispatch
from lightning_longmoe.dispatch.dry import PAPER_SHAPES


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "SCALED", replace(dispatch.SCALED, tokens=64, hidden=16, ffn=8))
    monkeypatch.setattr(dispatch, "PAPER_SHAPES", {"65K top-8": PAPER_SHAPES["65K top-8"]})


def test_json_holds_peaks_balance_and_times(small: None, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["bench", "dispatch", "--rounds", "1", "--json"])
    report = json.loads(capsys.readouterr().out)
    peaks = report["booked"]["65K top-8"]["80%/16"]
    assert peaks["PipelinedLLEP depth 2"]["all_gib"] <= 21.4
    assert peaks["PipelinedLLEP depth 2"]["working_gib"] <= 0.25 * peaks["unchunked LLEP"]["working_gib"]
    assert report["balance"]["95%/16"]["send_ratio"] <= 1.10
    times = report["measured"]["profiles"]["80%/16"]
    assert times["unchunked LLEP"]["ratio"] == 1.0
    assert all(row["min_s"] <= row["median_s"] <= row["max_s"] for row in times.values())
    assert report["machine"]["device"].startswith("cpu")


def test_an_unknown_benchmark_lists_those_that_exist(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["bench", "everything"])
    assert "dispatch" in capsys.readouterr().err
