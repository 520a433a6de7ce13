"""The examples run as they are written, cut short."""

from __future__ import annotations

import csv
import os
import re
import socket
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_longmoe.cli import main
from tests.pool import run_on_ranks

EXAMPLES = Path(__file__).parent.parent / "examples"
CUT_SHORT = ["--trainer.limit_train_batches=2", "--trainer.limit_val_batches=1", "--data.batch_size=1"]

SRUN = """#!/bin/bash
# What Slurm's own srun does on one node: one process for each task, each with its rank.
for rank in $(seq 0 $((SLURM_NTASKS - 1))); do
    SLURM_PROCID=$rank SLURM_LOCALID=$rank SLURM_NODEID=0 "$@" &
    processes+=($!)
done
for process in "${processes[@]}"; do wait "$process" || exit 1; done
"""


def run(command: list[Any], folder: Path, **environment: str) -> str:
    """Output of a command that must end well, run in ``folder`` outside the test's own process group."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "MASTER_"))}
    path = os.pathsep.join([str(EXAMPLES.parent), inherited.get("PYTHONPATH", "")])
    ended = subprocess.run(
        [str(word) for word in command],
        cwd=folder,
        env={**inherited, "PYTHONPATH": path, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        timeout=240,
    )
    assert ended.returncode == 0, ended.stdout[-6000:]
    return ended.stdout


def rows_of(folder: Path) -> list[dict[str, str]]:
    """What the CSV logger of quickstart.yaml wrote."""
    (metrics,) = folder.glob("lightning_logs/quickstart/version_*/metrics.csv")
    return list(csv.DictReader(metrics.read_text().splitlines()))


def fit_quickstart(folder: str) -> None:
    os.chdir(folder)
    main(["fit", f"--config={EXAMPLES / 'quickstart.yaml'}", *CUT_SHORT, "--trainer.log_every_n_steps=1"])


def test_quickstart_logs_loss_throughput_and_entropy_and_writes_a_checkpoint(tmp_path: Path) -> None:
    run_on_ranks(2, fit_quickstart, str(tmp_path), timeout_s=120)
    rows = rows_of(tmp_path)
    last = {key: value for row in rows for key, value in row.items() if value}
    assert float(last["longmoe/tokens"]) == 2 * 2 * 256
    assert 2 < float(last["longmoe/unigram_entropy"]) < 4
    assert 2 < float(last["val_loss"]) < 8
    assert len(list(tmp_path.glob("lightning_logs/quickstart/version_*/checkpoints/*.ckpt"))) == 1


def test_quickstart_shows_loss_and_throughput_in_a_progress_bar() -> None:
    trainer = yaml.safe_load((EXAMPLES / "quickstart.yaml").read_text())["trainer"]
    names = [callback["class_path"].rsplit(".", 1)[-1] for callback in trainer["callbacks"]]
    assert {"ThroughputMonitor", "UnigramBaseline", "ModelCheckpoint", "TQDMProgressBar"} <= set(names)
    assert (trainer["accelerator"], trainer["devices"]) == ("cpu", 2)


def test_existing_project_starts_its_own_second_process_and_learns(tmp_path: Path) -> None:
    output = run([sys.executable, EXAMPLES / "existing_project.py", "--max_steps=6"], tmp_path)
    (loss,) = re.findall(r"last loss ([\d.]+) nats per byte", output)
    assert 1 < float(loss) < 5.6  # ln 256 = 5.55 is what it starts from
    assert re.search(r"group expert\W+2\W+0-1", output)


def test_the_documented_difference_of_existing_project_is_that_of_its_code() -> None:
    introduction, code = (EXAMPLES / "existing_project.py").read_text().split('"""', 2)[1:]
    before = [line.split("#")[0].strip(" -") for line in introduction.splitlines() if line.startswith("    -")]
    after = [line.split("#")[0].strip(" +") for line in introduction.splitlines() if line.startswith("    +")]
    changed = [line.strip() for line in code.splitlines() if "# was: " in line]
    assert len(before) == len(after) == len(changed) == 3
    for line, old, new in zip(changed, before, after, strict=True):
        assert line.startswith(new)
        assert line.split("# was: ")[1] in old


def test_existing_project_also_runs_on_one_device_without_the_strategy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import lightning as L
    from torch.utils.data import DataLoader

    monkeypatch.syspath_prepend(str(EXAMPLES))
    import existing_project

    trainer = L.Trainer(
        accelerator="cpu", devices=1, max_steps=2, logger=False, enable_checkpointing=False, default_root_dir=tmp_path
    )
    trainer.fit(existing_project.LanguageModel(), DataLoader(existing_project.PythonSource(), batch_size=2))
    assert 4 < float(trainer.callback_metrics["loss"]) < 8


def test_slurm_script_trains_with_the_ranks_that_slurm_gives(tmp_path: Path) -> None:
    """Slurm itself is played by an `srun` that starts two tasks on this machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    tools = tmp_path / "bin"
    tools.mkdir()
    longmoe = f'#!/bin/bash\nexec {sys.executable} -m lightning_longmoe.cli "$@"\n'
    for name, text in (("srun", SRUN), ("longmoe", longmoe)):
        (tools / name).write_text(text)
        (tools / name).chmod((tools / name).stat().st_mode | stat.S_IEXEC)
    slurm = {
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NAME": "longmoe",
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_NNODES": "1",
        "SLURM_NODELIST": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    overrides = ["--trainer.accelerator=cpu", "--trainer.precision=32-true", "--trainer.log_every_n_steps=1"]
    script = ["bash", EXAMPLES / "slurm.sbatch", EXAMPLES / "quickstart.yaml", *CUT_SHORT, *overrides]
    output = run(script, tmp_path, **slurm, PATH=f"{tools}{os.pathsep}{os.environ['PATH']}")
    assert output.count("GLOBAL_RANK: 1, MEMBER: 2/2") == 1  # started by srun, not once more by a launcher
    tokens = [float(row["longmoe/tokens"]) for row in rows_of(tmp_path) if row.get("longmoe/tokens")]
    assert tokens[-1] == 2 * 2 * 256


def test_slurm_script_asks_for_one_task_for_each_gpu_and_for_a_configuration() -> None:
    text = (EXAMPLES / "slurm.sbatch").read_text()
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=(.*)$", text, re.MULTILINE))
    assert asked["ntasks-per-node"] == asked["gpus-per-node"]
    subprocess.run(["bash", "-n", EXAMPLES / "slurm.sbatch"], check=True)
    ended = subprocess.run(["bash", EXAMPLES / "slurm.sbatch"], capture_output=True, text=True)
    assert ended.returncode != 0
    assert "usage: sbatch slurm.sbatch CONFIG" in ended.stderr


def test_the_readme_of_the_examples_names_every_example() -> None:
    text = (EXAMPLES / "README.md").read_text()
    for path in EXAMPLES.iterdir():
        assert path.name in ("README.md", "__pycache__") or f"`{path.name}`" in text
