"""`OffloadStreamAdamW` is torch's fused AdamW over float32 masters, to the bit, in every order of its copies."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from lightning_longmoe import OffloadStreamAdamW
from lightning_longmoe.optimizer import ReferenceAdamW
from lightning_longmoe.runtime.fake_streams import FakeStreams
from lightning_longmoe.runtime.streams import Lane
from tests.optimizer.cases import assert_same_bits, groups, parameters, set_gradients

MIXED = [torch.float32, torch.bfloat16, torch.bfloat16, torch.float32, torch.bfloat16, torch.float16, torch.float64]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64, "mixed": MIXED}


def _streams(name: str) -> FakeStreams | None:
    return None if name == "in place" else FakeStreams(int(name))


@pytest.mark.parametrize("bucket_numel", [1, 50, 1000, 10**8])
@pytest.mark.parametrize("order", ["in place", "0", "1", "2"])
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_twenty_steps_equal_fused_adamw_over_masters_to_the_bit(dtype: str, order: str, bucket_numel: int) -> None:
    streams = _streams(order)
    ours, theirs = parameters(DTYPES[dtype]), parameters(DTYPES[dtype])
    slots = 1 + int(dtype == "mixed")
    optimizer = OffloadStreamAdamW(groups(ours), bucket_numel=bucket_numel, slots=slots, streams=streams)
    reference = ReferenceAdamW(groups(theirs))
    for step in range(20):
        for params in (ours, theirs):
            set_gradients(params, step)
        for groups_of in (optimizer.param_groups, reference.optimizer.param_groups):  # a schedule
            groups_of[0]["lr"] = 0.05 / (1 + step)
            groups_of[2]["lr"].mul_(0.9)
            groups_of[1]["betas"] = (0.8, 0.95 - 0.01 * step)
        optimizer.step()
        reference.step()
        if step % 7 == 6:
            assert_same_bits(optimizer, ours, reference)
    assert_same_bits(optimizer, ours, reference)
    assert streams is None or streams.faults == []


@pytest.mark.parametrize("order", ["in place", "3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_clipping_is_folded_into_the_update(dtype: str, order: str) -> None:
    ours, theirs = parameters(DTYPES[dtype]), parameters(DTYPES[dtype])
    optimizer = OffloadStreamAdamW(groups(ours), bucket_numel=50, streams=_streams(order))
    reference = ReferenceAdamW(groups(theirs))
    for step in range(5):
        for params in (ours, theirs):
            set_gradients(params, step)
        norm = torch.linalg.vector_norm(torch.stack([p.grad.float().norm() for p in ours if p.grad is not None]))
        optimizer.prefetch()
        optimizer.scale_gradients(torch.clamp(0.5 / (norm + 1e-6), max=1.0))
        optimizer.step()
        reference.step(max_norm=0.5)
    assert_same_bits(optimizer, ours, reference)


def test_a_limit_clips_by_value_and_holds_for_one_step_only() -> None:
    ours, theirs = parameters(torch.bfloat16), parameters(torch.bfloat16)
    optimizer, reference = OffloadStreamAdamW(groups(ours)), ReferenceAdamW(groups(theirs))
    for step in range(4):
        for params in (ours, theirs):
            set_gradients(params, step)
        if step % 2:
            optimizer.scale_gradients(limit=0.25)
            for parameter in theirs:
                if parameter.grad is not None:
                    parameter.grad.clamp_(-0.25, 0.25)
        optimizer.step()
        reference.step()
    assert_same_bits(optimizer, ours, reference)
    optimizer.scale_gradients(limit=0.25)
    optimizer.zero_grad()
    for params in (ours, theirs):
        set_gradients(params, 9)
    optimizer.step()
    reference.step()
    assert_same_bits(optimizer, ours, reference)


@pytest.mark.parametrize("waiting_event", [("in", "out"), ("out", "compute"), ("compute", "in"), ("compute", "out")])
def test_without_one_of_the_waits_most_schedules_are_wrong(waiting_event: tuple[Lane, Lane]) -> None:
    wrong = 0
    for seed in range(30):
        ours, theirs = parameters(), parameters()
        streams = FakeStreams(seed, forget=lambda lane, of: (lane, of) == waiting_event)
        optimizer = OffloadStreamAdamW(groups(ours), bucket_numel=64, streams=streams)
        reference = ReferenceAdamW(groups(theirs))
        for step in range(3):
            for params in (ours, theirs):
                set_gradients(params, step)
            optimizer.step()
            reference.step()
        try:
            assert_same_bits(optimizer, ours, reference)
            wrong += bool(streams.faults)
        except AssertionError:
            wrong += 1
    assert wrong >= 20


@pytest.mark.parametrize(("dtype", "per_element"), [(torch.float32, 8), (torch.bfloat16, 12)])
def test_the_device_holds_slots_times_a_bucket_of_state(dtype: torch.dtype, per_element: int) -> None:
    params = [torch.zeros(n, dtype=dtype, requires_grad=True) for n in (5000, 320, 4096, 77)]
    optimizer = OffloadStreamAdamW(params, bucket_numel=1024, slots=2, streams=FakeStreams(0))
    set_gradients(params, 1, missing=False)
    optimizer.step()
    assert optimizer.staging_bytes == 2 * 1024 * per_element
    assert optimizer.host_bytes == sum(-(-n // 16) * 16 for n in (5000, 320, 4096, 77)) * per_element


def test_an_idle_parameter_stays_where_it_is_as_with_torch() -> None:
    params = [torch.ones(20, requires_grad=True) for _ in range(2)]
    optimizer = OffloadStreamAdamW(params, lr=0.1)
    params[0].grad = torch.ones(20)
    optimizer.step()
    params[0].grad, params[1].grad = None, torch.ones(20)
    before = params[0].clone()
    optimizer.step()
    assert torch.equal(params[0], before)
    assert [float(optimizer.state[p]["step"]) for p in params] == [1.0, 1.0]


def test_frozen_parameters_have_no_state_until_they_are_trained() -> None:
    ours, theirs = parameters(), parameters()
    for params in (ours, theirs):
        params[1].requires_grad_(False)
    optimizer, reference = OffloadStreamAdamW(ours), ReferenceAdamW(theirs)
    assert ours[1] not in dict.keys(optimizer.state)
    held = optimizer.host_bytes
    for params in (ours, theirs):
        params[1].requires_grad_()
    for step in range(3):
        for params in (ours, theirs):
            set_gradients(params, step, missing=False)
        optimizer.step()
        reference.step()
    assert_same_bits(optimizer, ours, reference)
    assert optimizer.host_bytes > held


def test_a_group_may_be_added_later() -> None:
    ours, theirs = parameters(), parameters()
    optimizer, reference = OffloadStreamAdamW(ours[:4]), ReferenceAdamW(theirs[:4])
    for step in range(6):
        if step == 3:
            optimizer.add_param_group({"params": ours[4:], "lr": 0.3})
            reference.optimizer.add_param_group({"params": theirs[4:], "lr": 0.3})
            reference.pairs += [(p, p) for p in theirs[4:]]
        for params in (ours, theirs):
            set_gradients(params, step)
        optimizer.step()
        reference.step()
    assert_same_bits(optimizer, ours, reference)


def test_maximize_goes_uphill_as_with_torch() -> None:
    ours, theirs = parameters(), parameters()
    optimizer, reference = OffloadStreamAdamW(ours, maximize=True), ReferenceAdamW(theirs, maximize=True)
    for step in range(3):
        for params in (ours, theirs):
            set_gradients(params, step)
        optimizer.step()
        reference.step()
    assert_same_bits(optimizer, ours, reference)


def test_a_closure_is_called_with_gradients_enabled_and_its_value_returned() -> None:
    weight = torch.ones(3, requires_grad=True)
    optimizer = OffloadStreamAdamW([weight], lr=0.1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (weight**2).sum()
        loss.backward()
        return loss

    assert float(optimizer.step(closure)) == 3.0
    assert bool((weight < 1).all())


def test_masters_follow_weights_that_someone_changed() -> None:
    weight = torch.ones(40, dtype=torch.bfloat16, requires_grad=True)
    optimizer = OffloadStreamAdamW([weight], lr=1e-4, weight_decay=0.0)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert float(optimizer.state[weight]["master"][0]) == pytest.approx(1 - 1e-4)  # bfloat16 has no such number
    with torch.no_grad():
        weight.fill_(3.0)
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    assert float(optimizer.state[weight]["master"][0]) == pytest.approx(3.0, abs=1e-3)


@pytest.mark.parametrize("strides", [(1, 6), (8, 1)])
def test_parameters_of_any_dense_layout_are_updated(strides: tuple[int, int]) -> None:
    made = [torch.randn(48, generator=torch.Generator().manual_seed(0)).as_strided((6, 6), strides) for _ in range(2)]
    if strides == (8, 1):
        with pytest.raises(ValueError, match="has gaps in memory"):
            optimizer = OffloadStreamAdamW([made[0].requires_grad_()])
            made[0].grad = torch.ones(6, 6)
            optimizer.step()
        return
    ours, theirs = (tensor.requires_grad_() for tensor in made)
    optimizer, reference = OffloadStreamAdamW([ours], bucket_numel=16), ReferenceAdamW([theirs])
    for _ in range(2):
        ours.grad = torch.arange(36.0).view(6, 6)
        theirs.grad = torch.arange(36.0).view(6, 6)
        optimizer.step()
        reference.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    assert optimizer.state[ours]["exp_avg"].stride() == ours.stride()


def test_bfloat16_moments_halve_their_memory_and_keep_the_mean() -> None:
    weight = torch.zeros(20_000, requires_grad=True)
    optimizer = OffloadStreamAdamW([weight], lr=0.0, betas=(0.5, 0.5), weight_decay=0.0, moments="bf16")
    exact = OffloadStreamAdamW([torch.zeros(20_000, requires_grad=True)])
    assert 2 * optimizer.host_bytes == exact.host_bytes
    weight.grad = torch.full((20_000,), 2.0 * (1 + 1 / 512))  # half of it lies between two bfloat16 numbers
    optimizer.step()
    moment = optimizer.state[weight]["exp_avg"]
    assert moment.dtype == torch.bfloat16
    assert len(moment.unique()) == 2
    assert float(moment.double().mean()) == pytest.approx(1 + 1 / 512, abs=1e-4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"amsgrad": True}, "does not do amsgrad=True"),
        ({"bucket_numel": 0}, "bucket_numel=0"),
        ({"slots": 0}, "slots=0"),
        ({"moments": "fp8"}, "moments='fp8'"),
        ({"lr": -1.0}, "Invalid learning rate"),
    ],
)
def test_settings_that_are_not_supported_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OffloadStreamAdamW(parameters(), **settings)


def test_parameters_that_cannot_be_trained_are_refused() -> None:
    with pytest.raises(ValueError, match="not torch.complex64"):
        OffloadStreamAdamW([torch.zeros(3, dtype=torch.complex64, requires_grad=True)])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "mixed"])
def test_saved_state_goes_on_to_the_bit_also_from_and_to_torchs_adamw(dtype: str) -> None:
    """Where there are masters torch's has none, so only ours goes on from ours."""
    ours, theirs = parameters(DTYPES[dtype]), parameters(DTYPES[dtype])
    optimizer, reference = OffloadStreamAdamW(groups(ours)), ReferenceAdamW(groups(theirs))
    for step in range(8):
        if step == 3:
            saved = copy.deepcopy(optimizer.state_dict())
            optimizer = OffloadStreamAdamW(groups(ours), bucket_numel=33, streams=FakeStreams(1))
            optimizer.load_state_dict(saved)
        if step == 5 and dtype == "float32":
            saved = copy.deepcopy(optimizer.state_dict())
            for state in saved["state"].values():
                state["exp_avg"] = state["exp_avg"].double()  # no saved dtype changes ours
            optimizer = OffloadStreamAdamW(groups(ours))
            optimizer.load_state_dict(saved)
            reference.optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            theirs_state = reference.optimizer.state_dict()
            optimizer.load_state_dict(theirs_state)
            for group in reference.optimizer.param_groups:
                group["fused"] = True
        for params in (ours, theirs):
            set_gradients(params, step)
        optimizer.step()
        reference.step()
    assert_same_bits(optimizer, ours, reference)
    assert all(t.device.type == "cpu" for values in optimizer.state.values() for t in values.values())


def test_state_that_does_not_fit_is_refused() -> None:
    optimizer = OffloadStreamAdamW(groups(parameters()))
    saved = optimizer.state_dict()
    other = OffloadStreamAdamW(parameters())
    with pytest.raises(ValueError, match=r"groups of \[3, 2, 2\] parameters, this one of \[7\]"):
        other.load_state_dict(saved)
    changed = copy.deepcopy(saved)
    changed["state"][0]["exp_avg"] = torch.zeros(4)
    with pytest.raises(ValueError, match=r"The saved exp_avg is \(4,\)"):
        optimizer.load_state_dict(changed)
    ams = torch.optim.AdamW(groups(parameters()), amsgrad=True).state_dict()
    with pytest.raises(ValueError, match="amsgrad=True"):
        optimizer.load_state_dict(ams)


def test_the_update_uses_the_ranks_share_of_processors_and_gives_them_back(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_longmoe.optimizer import streamed

    seen: list[int] = []
    plain = streamed.update

    def watched(*args: Any, **kwargs: Any) -> None:
        seen.append(torch.get_num_threads())
        plain(*args, **kwargs)

    monkeypatch.setattr(streamed, "update", watched)
    monkeypatch.setattr(streamed.os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        params = parameters()
        optimizer = OffloadStreamAdamW(params)
        set_gradients(params, 1)
        optimizer.step()
        assert set(seen) == {4}
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
