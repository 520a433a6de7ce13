"""One file from a folder, for everybody else; and folders of Lightning's own strategy."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from lightning_longmoe import saving
from lightning_longmoe.saving import CheckpointError, consolidate, consolidate_command
from tests.pool import run_on_ranks
from tests.saving import sharded
from tests.saving.sharded import Layout, assert_equal, load, reference, save


class Small(pl.LightningModule):
    def __init__(self, size: int = 1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Linear(size, size)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Saved by 2 ranks with 2-way experts."""
    run_on_ranks(2, save, tmp_path / "a.ckpt", Layout(expert_size=2))
    return tmp_path / "a.ckpt"


def test_plain_torch_opens_the_file_without_this_package(folder: Path, tmp_path: Path) -> None:
    out = consolidate(folder, tmp_path / "out.ckpt")
    code = (
        "import sys, torch; sys.modules['lightning_longmoe'] = sys.modules['lightning'] = None;"
        f"print(sorted(torch.load({str(out)!r}, weights_only=True)))"
    )
    told = subprocess.run([sys.executable, "-c", code], cwd="/", capture_output=True, text=True, check=True).stdout
    assert "'state_dict'" in told
    assert "'optimizer_states'" in told
    checkpoint = torch.load(out, weights_only=True)
    expected, module = reference(), sharded.Tiny()
    module.load_state_dict(checkpoint["state_dict"])
    for name, value in expected["model"].items():
        assert torch.equal(checkpoint["state_dict"][name], value)
    optimizer = sharded.make_optimizer(module, lr=9.0)
    optimizer.load_state_dict(checkpoint["optimizer_states"][0])
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.05]
    for name, parameter in module.named_parameters():
        for key, value in optimizer.state[parameter].items():
            assert torch.equal(value, expected["optimizer"][f"{name}.{key}"])
    assert checkpoint["global_step"] == 17
    assert checkpoint["longmoe"]["layout"] == {"world": 2}
    assert checkpoint["lr_schedulers"] == [{"last_epoch": 2, "_last_lr": [0.1]}]


def test_training_resumes_from_the_file_on_any_number_of_ranks(folder: Path, tmp_path: Path) -> None:
    out = consolidate(folder, tmp_path / "out.ckpt")
    for world, layout in [(1, Layout()), (4, Layout(expert_size=2))]:
        loaded = run_on_ranks(world, load, out, layout)[0]
        assert_equal(loaded, reference())
        assert torch.equal(torch.cat(loaded["rest"]["longmoe"]["rng"]), torch.arange(2))


def test_load_from_checkpoint_takes_the_file(tmp_path: Path) -> None:
    module = Small(3)
    extra = {"hyper_parameters": dict(module.hparams), "hparams_name": "kwargs"}
    saving.save_sharded(tmp_path / "a.ckpt", sharded.checkpoint_of(module, **extra), module, control_group=None)
    loaded = Small.load_from_checkpoint(consolidate(tmp_path / "a.ckpt", tmp_path / "out.ckpt"))
    assert torch.equal(loaded.layer.weight, module.layer.weight)


def test_the_command_leaves_the_optimizer_out_when_told(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    consolidate_command([str(folder), str(tmp_path / "new" / "weights.ckpt"), "--weights-only"])
    assert f"Wrote {tmp_path / 'new' / 'weights.ckpt'}" in capsys.readouterr().out
    checkpoint = torch.load(tmp_path / "new" / "weights.ckpt", weights_only=True)
    assert {"optimizer_states", "lr_schedulers", "callbacks"}.isdisjoint(checkpoint)
    assert {"state_dict", "epoch", "global_step", "pytorch-lightning_version", "loops"} <= checkpoint.keys()
    consolidate(folder, tmp_path / "all.ckpt")
    assert (tmp_path / "new" / "weights.ckpt").stat().st_size < (tmp_path / "all.ckpt").stat().st_size


def test_the_command_says_what_is_wrong(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "there.ckpt").write_text("mine")
    for arguments, message in [
        ([str(folder), str(tmp_path / "there.ckpt")], "exists already"),
        ([str(tmp_path / "nowhere"), str(tmp_path / "out.ckpt")], f"there is nothing. The newest complete .* {folder}"),
    ]:
        with pytest.raises(SystemExit, match="1"):
            consolidate_command(arguments)
        assert re.search(message, capsys.readouterr().err)
    assert (tmp_path / "there.ckpt").read_text() == "mine"
    out = consolidate(folder, tmp_path / "out.ckpt")
    with pytest.raises(CheckpointError, match="is one file already"):
        consolidate(out, tmp_path / "again.ckpt")


def test_objects_are_taken_along_only_when_trusted(tmp_path: Path) -> None:
    module = Small()
    checkpoint = sharded.checkpoint_of(module, hyper_parameters={"folder": Path("x")})
    saving.save_sharded(tmp_path / "a.ckpt", checkpoint, module, control_group=None)
    with pytest.raises(CheckpointError, match="other than tensors and plain containers"):
        consolidate(tmp_path / "a.ckpt", tmp_path / "out.ckpt")
    consolidate_command([str(tmp_path / "a.ckpt"), str(tmp_path / "out.ckpt"), "--trust-objects"])
    assert torch.load(tmp_path / "out.ckpt", weights_only=False)["hyper_parameters"] == {"folder": Path("x")}


def _save_as_the_stock_strategy(path: Path) -> dict[str, Any]:
    """The calls of `ModelParallelStrategy.save_checkpoint`."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict

    module, optimizer = sharded.build(Layout())
    del module.norm  # a parameter without state makes the stock calls take a step
    optimizer = sharded.make_optimizer(module)
    sharded.train(module, optimizer)
    options = StateDictOptions(cpu_offload=True)
    state = {"state_dict": get_model_state_dict(module, options=options)}
    state["optimizer_0"] = get_optimizer_state_dict(module, optimizer, options=options)
    dcp.save(state, checkpoint_id=path)
    torch.save({"epoch": 1, "global_step": 5, "pytorch-lightning_version": "2.6.6"}, path / "meta.pt")
    return sharded.contents(module, optimizer)


def _load_into_ours(path: Path) -> dict[str, Any]:
    module, _ = sharded.build(Layout())
    del module.norm
    optimizer = sharded.make_optimizer(module, lr=9.0)
    rest = saving.load(path, module, [optimizer], control_group=sharded.control())
    return {**sharded.contents(module, optimizer), "rest": rest}


def test_a_folder_of_lightnings_own_strategy_resumes_here(tmp_path: Path) -> None:
    path = tmp_path / "stock.ckpt"
    expected = run_on_ranks(2, _save_as_the_stock_strategy, path)[0]
    for world in (1, 2):
        loaded = run_on_ranks(world, _load_into_ours, path)[0]
        assert_equal(loaded, expected)
        assert [group["lr"] for group in loaded["groups"]] == [0.1, 0.05]
        assert loaded["rest"]["global_step"] == 5
    checkpoint = torch.load(consolidate(path, tmp_path / "out.ckpt"), weights_only=True)
    assert torch.equal(checkpoint["state_dict"]["embedding.weight"], expected["model"]["embedding.weight"])
    assert len(checkpoint["optimizer_states"][0]["state"]) == 6
