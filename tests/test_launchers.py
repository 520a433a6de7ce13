"""Every way of starting processes trains the same model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import make_batches, train_alone

ROOT = Path(__file__).parent.parent
SCRIPT = "tests.scripts.train_and_report"


def _environment(**extra: str) -> dict[str, str]:
    kept = {
        k: v for k, v in os.environ.items() if not k.startswith(("RANK", "LOCAL_", "WORLD_", "MASTER_", "TORCHELASTIC"))
    }
    return {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **extra}


def _run(command: list[str], **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command, cwd=ROOT, env=_environment(**environment), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def _wait(processes: list[subprocess.Popen[str]]) -> None:
    for process in processes:
        output, _ = process.communicate(timeout=150)
        assert process.returncode == 0, output[-4000:]


def _assert_reports(folder: Path, world: int) -> None:
    expected = train_alone(make_batches(4, 2))["losses"]
    for rank in range(world):
        report: dict[str, Any] = json.loads((folder / f"rank{rank}.json").read_text())
        assert report["world"] == world
        assert report["losses"] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("launcher", ["script", "fork", "spawn"])
def test_launcher_trains_on_two_ranks(launcher: str, tmp_path: Path) -> None:
    _wait([_run([sys.executable, "-m", SCRIPT, launcher, "2", str(tmp_path)])])
    _assert_reports(tmp_path, 2)
    if launcher != "script":  # the parent gets whole weights back
        expected = {n: float(v.sum()) for n, v in train_alone(make_batches(4, 2))["weights"].items()}
        assert json.loads((tmp_path / "parent.json").read_text()) == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_one_process_needs_no_launcher(tmp_path: Path) -> None:
    _wait([_run([sys.executable, "-m", SCRIPT, "script", "1", str(tmp_path)])])
    _assert_reports(tmp_path, 1)


def test_torchrun_trains_on_two_ranks(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--master_port=29655"]
    _wait([_run([*torchrun, "-m", SCRIPT, "script", "2", str(tmp_path)])])
    _assert_reports(tmp_path, 2)


def test_slurm_trains_on_the_tasks_that_it_started(tmp_path: Path) -> None:
    def task(rank: int) -> subprocess.Popen[str]:
        return _run(
            [sys.executable, "-m", SCRIPT, "script", "2", str(tmp_path)],
            SLURM_NTASKS="2",
            SLURM_NTASKS_PER_NODE="2",
            SLURM_JOB_ID="4242",
            SLURM_JOB_NAME="longmoe",
            SLURM_PROCID=str(rank),
            SLURM_LOCALID=str(rank),
            SLURM_NODEID="0",
            SLURM_JOB_NODELIST="localhost",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT="29656",
        )

    _wait([task(0), task(1)])
    _assert_reports(tmp_path, 2)
