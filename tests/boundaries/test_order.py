"""Copies that run late, early or out of order: right in every legal order, and wrong as soon as one wait is missing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from lightning_longmoe import BoundaryOffload, BoundaryOffloader
from lightning_longmoe.boundaries import offloader as offloader_module
from lightning_longmoe.boundaries import reference_checkpoint
from lightning_longmoe.runtime.fake_streams import FakeStreams
from lightning_longmoe.runtime.streams import Lane
from tests.boundaries.parts import equal, forward, make_weights, train

SCHEDULES = range(50)


def _two_at_once(checkpoint: Callable[..., object]) -> list[torch.Tensor]:
    """Two forwards alive, a graph run twice, a graph that is dropped."""
    weights = make_weights(6)
    generator = torch.Generator().manual_seed(3)
    gradients: list[torch.Tensor] = []
    for _ in range(3):
        x, y = (torch.randn(4, 8, generator=generator).requires_grad_() for _ in range(2))
        first, second = forward(checkpoint, weights, x), forward(checkpoint, weights, y)
        gradients += torch.autograd.grad(first, [x, *weights], retain_graph=True)
        dropped = forward(checkpoint, weights, x)
        gradients += torch.autograd.grad(second, [y, *weights])
        del dropped
        gradients += torch.autograd.grad(first, [x, *weights])
    return gradients


@pytest.mark.parametrize("keep_last", [0, 1, 2])
@pytest.mark.parametrize("scenario", [train, _two_at_once])
def test_every_legal_order_gives_the_same_bits(scenario: Callable[..., list[torch.Tensor]], keep_last: int) -> None:
    expected = scenario(reference_checkpoint)
    for seed in SCHEDULES:
        streams = FakeStreams(seed)
        offloader = BoundaryOffloader(BoundaryOffload(keep_last=keep_last), streams=streams)
        assert equal(scenario(offloader.checkpoint), expected), f"schedule {seed}"
        streams.synchronize()
        assert streams.faults == []
        assert streams.copied["out"] > 0
        assert streams.copied["in"] > 0


@pytest.mark.parametrize(
    ("waiting", "event"), [("out", "compute"), ("in", "compute"), ("compute", "out"), ("compute", "in")]
)
def test_without_one_of_the_waits_nearly_every_schedule_is_wrong(waiting: Lane, event: Lane) -> None:
    expected = train(reference_checkpoint)
    wrong = 0
    for seed in SCHEDULES:
        streams = FakeStreams(seed, forget=lambda lane, of: (lane, of) == (waiting, event))
        offloader = BoundaryOffloader(BoundaryOffload(keep_last=0), streams=streams)
        wrong += not equal(train(offloader.checkpoint), expected) or bool(streams.faults)
    assert wrong >= 40


def test_a_source_that_is_dropped_before_its_copy_is_done_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    def drop_at_once(self: BoundaryOffloader, boundary: offloader_module._Boundary) -> None:
        boundary.source = None

    monkeypatch.setattr(BoundaryOffloader, "_drop_source", drop_at_once)
    expected = train(reference_checkpoint)
    offloaders = [BoundaryOffloader(BoundaryOffload(keep_last=0), streams=FakeStreams(seed)) for seed in SCHEDULES]
    assert sum(not equal(train(offloader.checkpoint), expected) for offloader in offloaders) >= 25


def test_while_one_part_is_recomputed_the_one_before_is_on_its_way() -> None:
    streams = FakeStreams(0)
    offloader = BoundaryOffloader(BoundaryOffload(keep_last=0), streams=streams)
    asked: list[tuple[int, bool]] = []
    plain = BoundaryOffloader._restore

    def watched(boundary: offloader_module._Boundary) -> torch.Tensor:
        tensor = plain(offloader, boundary)
        before = offloader._alive.get(boundary.number - 1)
        asked.append((boundary.number, before is None or before.source is not None or before.coming is not None))
        return tensor

    offloader._restore = watched  # type: ignore[method-assign]
    train(offloader.checkpoint, steps=1)
    assert [number for number, _ in asked] == list(range(7, -1, -1))
    assert all(ready for _, ready in asked)
