"""The benchmarks of boundaries, optimizer and attention print what they measured, beside their baselines."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lightning_longmoe import cli
from lightning_longmoe.bench import boundaries, optimizer
from tests.pool import run_on_ranks


def _report(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    cli.main(["bench", *arguments, "--json"])
    return json.loads(capsys.readouterr().out)


def test_boundaries_show_the_papers_table_flat_device_bytes_and_a_lower_peak(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(boundaries.SHAPES, "scaled", (12, 1024, 16))
    report = _report(capsys, "boundaries", "--rounds", "1")
    assert [row["offloaded"] for row in report["planned"].values()] == [21, 42, 47]
    assert {row["offloaded"] for row in report["depth"].values()} == {4}
    assert report["host"]["held_over_payload"] <= 1.03 < report["host"]["rounded_over_payload"]
    assert report["steps"]["budget: full"]["peak_ratio"] < report["steps"]["budget: half"]["peak_ratio"] < 1


def _optimizer() -> str:
    import contextlib
    import io

    optimizer.SHAPES["few large"] = [(64, 64)] * 2
    optimizer.SHAPES["many small"] = [(8, 8)] * 50
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        cli.main(["bench", "optimizer", "--rounds", "1", "--json"])
    return out.getvalue()


def test_optimizers_are_timed_beside_torchs_over_the_same_shards() -> None:
    report = json.loads(run_on_ranks(1, _optimizer)[0])
    assert report["bytes"]["host_bytes_per_element"] == 8
    for figures in report["steps"].values():
        assert figures["AdamW"]["speedup"] == 1.0
        assert {"AdamW, foreach", "AdamW, fused", "AdamW, CPUOffloadPolicy", "OffloadStreamAdamW"} < set(figures)


def test_attention_shows_bytes_and_times_beside_gathered_keys(capsys: pytest.CaptureFixture[str]) -> None:
    report = _report(capsys, "attention", "--rounds", "1", "--length", "128", "--ranks", "2")
    assert report["one_process"]["F.scaled_dot_product_attention"]["ratio"] == 1.0
    ranks = report["ranks"]["2"]
    assert ranks["keys gathered"]["ratio"] == 1.0
    assert ranks["ulysses"]["sent_mib_of_all_ranks"] > 0
    assert len(report["window"]) == 3
