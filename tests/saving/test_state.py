"""Names, optimizer state and settings: what is saved of them and how it comes back. One process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from lightning_longmoe import saving
from lightning_longmoe.saving import CheckpointError, model_state, optimizer_state, reading
from tests.saving.sharded import checkpoint_of


class Net(nn.Module):
    def __init__(self, size: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(2, size)
        self.second = nn.Linear(size, 2)


class WithExtra(nn.Module):
    """A module with extra state, a tensor or an object, and a buffer."""

    def __init__(self, extra: Any) -> None:
        super().__init__()
        self.extra = extra
        self.inner = nn.Linear(1, 1)
        self.register_buffer("count", torch.tensor(3))

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


@pytest.fixture(params=["folder", "file"])
def write(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """Save to a path of its own and return it."""

    def run(module: nn.Module, *optimizers: torch.optim.Optimizer, without: Any = (), **rest: Any) -> Path:
        path = tmp_path / "a.ckpt"
        function = saving.save_sharded if request.param == "folder" else saving.save_single_file
        checkpoint = {k: v for k, v in checkpoint_of(module, *optimizers, **rest).items() if k not in without}
        function(path, checkpoint, module, control_group=None)
        assert path.is_dir() == (request.param == "folder")
        return path

    return run


@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What loading tells the user."""
    told: list[str] = []
    monkeypatch.setattr(reading, "rank_zero_info", told.append)
    monkeypatch.setattr(reading, "rank_zero_warn", told.append)
    return told


def _step(module: nn.Module, optimizer: torch.optim.Optimizer, skip: str = "-") -> None:
    for name, parameter in module.named_parameters():
        parameter.grad = None if name.startswith(skip) else torch.full_like(parameter, 0.5)
    optimizer.step()


def _values(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [dict(optimizer.state[p]) for group in optimizer.param_groups for p in group["params"]]


def test_names_do_not_tell_of_compile_and_checkpoint_wrappers() -> None:
    plain = Net()
    wrapped = Net()
    wrapped.first = torch.compile(checkpoint_wrapper(wrapped.first), backend="eager")  # type: ignore[assignment]
    assert set(model_state(wrapped)) == set(model_state(plain))
    optimizer = torch.optim.AdamW(wrapped.parameters())
    _step(wrapped, optimizer)
    assert set(optimizer_state(wrapped, optimizer)["state"]) == {name for name, _ in plain.named_parameters()}


def test_compiled_and_plain_modules_load_each_other(write: Any) -> None:
    compiled, plain = Net(), Net()
    compiled.first = torch.compile(compiled.first, backend="eager")  # type: ignore[assignment]
    saving.load(write(compiled), plain, [])
    assert torch.equal(plain.first.weight, compiled.first.weight)
    torch.nn.init.ones_(plain.first.weight)
    saving.load(write(plain), compiled, [])
    assert torch.all(compiled.first.weight == 1)


def test_a_parameter_that_never_stepped_has_no_state_and_starts_fresh(write: Any) -> None:
    module = Net()
    optimizer = torch.optim.AdamW(module.parameters())
    before = [parameter.clone() for parameter in module.parameters()]
    _step(module, optimizer, skip="first")
    state = optimizer_state(module, optimizer)
    assert set(state["state"]) == {"second.weight", "second.bias"}
    assert torch.equal(module.first.weight, before[0])
    path = write(module, optimizer)
    other = Net()
    resumed = torch.optim.AdamW(other.parameters())
    _step(other, resumed)  # state that must not survive
    saving.load(path, other, [resumed])
    assert [len(values) for values in _values(resumed)] == [0, 0, 3, 3]
    for _ in range(2):
        _step(module, optimizer)
        _step(other, resumed)
    assert all(map(torch.equal, module.parameters(), other.parameters()))


@pytest.mark.parametrize("kind", ["SGD", "SGD without momentum", "Adam amsgrad", "Adagrad", "RMSprop"])
def test_every_kind_of_state_comes_back_exactly(write: Any, kind: str) -> None:
    def make(module: nn.Module) -> torch.optim.Optimizer:
        settings: dict[str, Any] = {"SGD": {"momentum": 0.9}, "Adam amsgrad": {"amsgrad": True}}.get(kind, {})
        return getattr(torch.optim, kind.split()[0])(module.parameters(), lr=0.1, **settings)

    module, other = Net(), Net()
    optimizer, resumed = make(module), make(other)
    for _ in range(3):
        _step(module, optimizer)
    saving.load(write(module, optimizer), other, [resumed])
    for mine, theirs in zip(_values(optimizer), _values(resumed), strict=True):
        assert mine.keys() == theirs.keys()
        for name, value in mine.items():
            assert type(value) is type(theirs[name])
            assert torch.equal(value, theirs[name]) if isinstance(value, Tensor) else value == theirs[name]
    _step(module, optimizer)
    _step(other, resumed)
    assert all(map(torch.equal, module.parameters(), other.parameters()))


def test_state_keeps_the_data_type_it_was_saved_in(write: Any) -> None:
    """fp32 moments of bf16 weights; a step counter that is a Python number."""

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        module = Net().bfloat16()
        return module, torch.optim.AdamW(module.parameters())

    module, optimizer = make()
    for parameter in module.parameters():
        exact = torch.full_like(parameter, 1 / 3, dtype=torch.float32)
        optimizer.state[parameter] = {"step": 7, "exp_avg": exact, "exp_avg_sq": exact.double(), "note": "x"}
    other, resumed = make()
    saving.load(write(module, optimizer), other, [resumed])
    for values in _values(resumed):
        assert values["exp_avg"].dtype == torch.float32
        assert torch.all(values["exp_avg"] == torch.tensor(1 / 3))
        assert values["exp_avg_sq"].dtype == torch.float64
        assert float(values["step"]) == 7
        assert values["note"] == "x"


def test_settings_follow_the_parameters_into_another_order_of_groups(write: Any) -> None:
    def make(module: Net, names: list[list[str]]) -> torch.optim.Optimizer:
        parameters = dict(module.named_parameters())
        return torch.optim.AdamW([{"params": [parameters[name] for name in group]} for group in names], fused=False)

    module, other = Net(), Net()
    optimizer = make(module, [["first.weight", "first.bias"], ["second.weight"], ["second.bias"]])
    for number, group in enumerate(optimizer.param_groups):
        group.update(lr=10.0**-number, betas=(0.1 * number, 0.5), initial_lr=number, fused=True)
    _step(module, make(module, [list(dict(module.named_parameters()))]))
    for number, parameter in enumerate(module.parameters()):
        optimizer.state[parameter] = {"step": torch.tensor(1.0 + number), "exp_avg": torch.full_like(parameter, number)}
    path = write(module, optimizer)
    resumed = make(other, [["second.bias"], ["second.weight"], ["first.bias"], ["first.weight"]])
    saving.load(path, other, [resumed])
    assert [group["lr"] for group in resumed.param_groups] == [0.01, 0.1, 1.0, 1.0]
    assert [group["betas"][0] for group in resumed.param_groups] == [0.2, 0.1, 0.0, 0.0]
    assert [group["initial_lr"] for group in resumed.param_groups] == [2, 1, 0, 0]
    assert [group["fused"] for group in resumed.param_groups] == [False] * 4
    assert [float(values["step"]) for values in _values(resumed)] == [4, 3, 2, 1]
    assert [float(values["exp_avg"].max()) for values in _values(resumed)] == [3, 2, 1, 0]
    with pytest.raises(CheckpointError, match=r"groups \[1, 2\] of the checkpoint, which differ in \['lr', 'betas'"):
        saving.load(path, other, [make(other, [["first.weight", "first.bias"], ["second.weight", "second.bias"]])])


def test_an_optimizer_with_a_format_of_its_own_is_asked_and_answered(write: Any) -> None:
    """It keeps its state in one flat tensor, hands out views, and takes them back; loading fills it in place."""

    class Flat(torch.optim.SGD):
        def __init__(self, module: nn.Module) -> None:
            super().__init__(module.parameters(), lr=0.1)
            self.flat = torch.zeros(sum(p.numel() for p in module.parameters()))
            self.loaded: dict[str, Any] = {}

        def state_dict(self) -> dict[str, Any]:
            parts = torch.split(self.flat, [p.numel() for p in self.param_groups[0]["params"]])
            shaped = [part.view_as(p) for part, p in zip(parts, self.param_groups[0]["params"], strict=True)]
            state = {index: {"moment": value} for index, value in enumerate(shaped)}
            return {"state": state, "param_groups": super().state_dict()["param_groups"]}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.loaded = state_dict

    module, other = Net(), Net()
    optimizer, resumed = Flat(module), Flat(other)
    optimizer.flat.copy_(torch.arange(float(len(optimizer.flat))))
    optimizer.param_groups[0]["lr"] = 0.7
    memory = resumed.flat.data_ptr()
    saving.load(write(module, optimizer), other, [resumed])
    assert torch.equal(resumed.flat, optimizer.flat)
    assert resumed.flat.data_ptr() == memory
    assert resumed.loaded["param_groups"][0]["lr"] == 0.7
    assert resumed.loaded["state"].keys() == {0, 1, 2, 3}


def test_an_optimizer_of_other_parameters_is_refused() -> None:
    with pytest.raises(ValueError, match="holds 4 parameters that are not the module's.*before the module was sharded"):
        optimizer_state(Net(), torch.optim.SGD(Net().parameters()))


def test_missing_and_unexpected_keys_are_named_before_anything_changes(write: Any) -> None:
    module, other = Net(), nn.ModuleDict({"first": nn.Linear(2, 3), "third": nn.Linear(1, 1)})
    path = write(module)
    before = other["first"].weight.clone()
    with pytest.raises(CheckpointError) as error:
        saving.load(path, other, [])
    for part in (
        "the checkpoint lacks third.weight, third.bias",
        "the module has no second.weight, second.bias",
        "strict_loading = False",
    ):
        assert part in str(error.value)
    assert torch.equal(other["first"].weight, before)
    saving.load(path, other, [], strict=False)
    assert torch.equal(other["first"].weight, module.first.weight)


def test_no_more_than_ten_keys_are_named(write: Any) -> None:
    path = write(nn.Sequential(*(nn.Linear(1, 1) for _ in range(8))))
    with pytest.raises(CheckpointError, match=r"4\.bias and 6 more") as error:
        saving.load(path, nn.Module(), [])
    assert "5.weight" not in str(error.value)


def test_another_shape_is_refused_with_both_also_when_not_strict(write: Any) -> None:
    path = write(Net(3))
    with pytest.raises(CheckpointError, match=r"first\.weight: \(3, 2\) in the checkpoint, \(5, 2\) in the module"):
        saving.load(path, Net(5), [], strict=False)


def test_a_weights_only_checkpoint_says_so_and_goes_on(write: Any, messages: list[str]) -> None:
    module, other = Net(), Net()
    path = write(module, without=("optimizer_states", "lr_schedulers"))
    optimizer = torch.optim.AdamW(other.parameters(), lr=0.3)
    rest = saving.load(path, other, [optimizer])
    assert any("weights-only checkpoint: optimizer starts fresh" in message for message in messages)
    assert torch.equal(other.first.weight, module.first.weight)
    assert optimizer.param_groups[0]["lr"] == 0.3
    assert rest["lr_schedulers"] == []
    messages.clear()
    saving.load(path, other, [])
    assert messages == []


def test_state_of_parameters_that_are_no_longer_trained_is_dropped_aloud(write: Any, messages: list[str]) -> None:
    module, other = Net(), Net()
    optimizer = torch.optim.AdamW(module.first.parameters())
    _step(module, optimizer)
    path = write(module, optimizer)
    saving.load(path, other, [torch.optim.AdamW(other.second.parameters())])
    assert "AdamW does not train first.bias, first.weight any more" in messages[0]
    assert "no optimizer state for second.weight, second.bias" in messages[1]


@pytest.mark.parametrize("extra", [torch.tensor([1.0, 2.0]), {"seen": [1, 2]}])
def test_extra_state_and_buffers_come_back(write: Any, extra: Any) -> None:
    other = WithExtra(None if isinstance(extra, dict) else torch.zeros(0))
    other.count.zero_()
    saving.load(write(WithExtra(extra)), other, [])
    assert int(other.count) == 3
    assert torch.equal(other.extra, extra) if isinstance(extra, Tensor) else other.extra == extra


def test_tied_parameters_are_stored_once_and_load_untied(tmp_path: Path) -> None:
    def make(tied: bool) -> nn.ModuleDict:
        module = nn.ModuleDict({"a": nn.Linear(64, 64, bias=False), "b": nn.Linear(64, 64, bias=False)})
        if tied:
            module["b"].weight = module["a"].weight
        return module

    module = make(tied=True)
    for name, function in (("folder", saving.save_sharded), ("file", saving.save_single_file)):
        path = tmp_path / name
        function(path, checkpoint_of(module), module, control_group=None)
        files = path.iterdir() if path.is_dir() else [path]
        assert sum(file.stat().st_size for file in files) < 1.5 * 4 * 64 * 64
        for tied in (True, False):
            other = make(tied)
            saving.load(path, other, [])
            assert torch.equal(other["a"].weight, module["a"].weight)
            assert torch.equal(other["b"].weight, module["a"].weight)


class Opaque:
    """An object that only an unrestricted unpickler makes."""


def test_objects_need_weights_only_false_and_say_so(write: Any) -> None:
    module = Net()
    path = write(module, hyper_parameters={"thing": Opaque()})
    for weights_only in (None, True):
        with pytest.raises(CheckpointError, match="pass weights_only=False to trainer.fit"):
            saving.load(path, module, [], weights_only=weights_only)
    rest = saving.load(path, module, [], weights_only=False)
    assert isinstance(rest["hyper_parameters"]["thing"], Opaque)


def test_an_ordinary_lightning_file_is_read_with_its_numbered_optimizer(tmp_path: Path) -> None:
    module, other = Net(), Net()
    optimizer, resumed = torch.optim.AdamW(module.parameters()), torch.optim.AdamW(other.parameters(), lr=0.9)
    _step(module, optimizer)
    checkpoint = {"state_dict": module.state_dict(), "optimizer_states": [optimizer.state_dict()], "epoch": 1}
    torch.save(checkpoint, tmp_path / "plain.ckpt")
    torch.save(checkpoint, tmp_path / "old.ckpt", _use_new_zipfile_serialization=False)
    for name in ("plain.ckpt", "old.ckpt"):
        assert saving.load(tmp_path / name, other, [resumed]) == {"epoch": 1}
        assert resumed.param_groups[0]["lr"] == 1e-3
        for mine, theirs in zip(_values(optimizer), _values(resumed), strict=True):
            assert all(torch.equal(mine[name], theirs[name]) for name in ("step", "exp_avg", "exp_avg_sq"))
    with pytest.raises(CheckpointError, match="has 4 parameters, without names, and the module's has 2"):
        saving.load(tmp_path / "plain.ckpt", other, [torch.optim.AdamW(other.first.parameters())])
    torch.save({"weights": 1}, tmp_path / "strange.ckpt")
    with pytest.raises(CheckpointError, match="no 'state_dict'"):
        saving.load(tmp_path / "strange.ckpt", other, [])


def test_plain_torch_loads_the_single_file(tmp_path: Path) -> None:
    module, other = Net(), Net()
    optimizer, resumed = torch.optim.AdamW(module.parameters()), torch.optim.AdamW(other.parameters(), lr=0.9)
    _step(module, optimizer)
    saving.save_single_file(tmp_path / "a.ckpt", checkpoint_of(module, optimizer), module, control_group=None)
    checkpoint = torch.load(tmp_path / "a.ckpt", weights_only=True)
    other.load_state_dict(checkpoint["state_dict"])
    resumed.load_state_dict(checkpoint["optimizer_states"][0])
    _step(module, optimizer)
    _step(other, resumed)
    assert all(map(torch.equal, module.parameters(), other.parameters()))
    assert torch.equal(checkpoint["callbacks"]["EarlyStopping"]["best_score"], torch.tensor(0.25))


def test_a_newer_format_is_refused(write: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = Net()
    monkeypatch.setattr("lightning_longmoe.saving.contents.FORMAT_VERSION", 2)
    path = write(module)
    with pytest.raises(CheckpointError, match="format 2.*upgrade"):
        saving.load(path, module, [])
