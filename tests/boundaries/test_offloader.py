"""`BoundaryOffloader`: same gradients to the bit, one tensor a boundary in host memory, a state that cannot break."""

from __future__ import annotations

import gc
import warnings

import pytest
import torch
from torch import Tensor

from lightning_longmoe import BoundaryOffload, BoundaryOffloader
from lightning_longmoe.boundaries import offloader as offloader_module
from lightning_longmoe.boundaries import reference_checkpoint
from tests.boundaries.parts import equal, forward, make_weights, residual, train

BOUNDARY_BYTES = 4 * 8 * 4


@pytest.fixture(autouse=True)
def _no_garbage_collection() -> object:
    """What is freed must be freed by counts of references: nothing here may wait for the collector."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("keep_last", [0, 1, 2, 9])
def test_gradients_are_those_of_plain_checkpointing_to_the_bit(keep_last: int, dtype: torch.dtype) -> None:
    offloader = BoundaryOffloader(BoundaryOffload(keep_last=keep_last))
    assert equal(train(offloader.checkpoint, dtype=dtype), train(reference_checkpoint, dtype=dtype))
    assert offloader.alive == 0
    assert offloader.stats()["offloaded"] == max(0, 8 - keep_last)


@pytest.mark.parametrize(("fitting", "keep_last"), [(0, 2), (1, 2), (3, 2), (3, 0), (6, 0), (7, 2), (100, 2), (8, 0)])
def test_the_earliest_boundaries_fill_the_budget(fitting: int, keep_last: int) -> None:
    budget = fitting * BOUNDARY_BYTES + BOUNDARY_BYTES // 2
    offloader = BoundaryOffloader(BoundaryOffload(host_budget=budget, keep_last=keep_last))
    assert equal(train(offloader.checkpoint), train(reference_checkpoint))
    stats = offloader.stats()
    assert (stats["boundaries"], stats["offloaded"]) == (8, min(fitting, 8 - keep_last))
    assert stats["payload_bytes"] == stats["host_bytes"] == stats["offloaded"] * BOUNDARY_BYTES


@pytest.mark.parametrize("depth", [4, 16, 64])
def test_the_device_holds_four_boundaries_whatever_the_depth(depth: int) -> None:
    offloader = BoundaryOffloader()
    train(offloader.checkpoint, depth=depth)
    assert offloader.stats()["peak_device_bytes"] == 4 * BOUNDARY_BYTES


def test_only_the_marked_argument_leaves_the_device_as_often_as_it_is_given() -> None:
    def part(hidden: Tensor, mask: Tensor, again: Tensor, weight: Tensor) -> Tensor:
        return hidden * mask + again @ weight

    weight = torch.randn(8, 8, requires_grad=True)
    mask = torch.rand(4, 8)
    x = torch.randn(4, 8, requires_grad=True)
    offloader = BoundaryOffloader(BoundaryOffload(keep_last=0))
    gradients = []
    for checkpoint in (reference_checkpoint, offloader.checkpoint):
        hidden = x * 1.0
        for _ in range(3):
            hidden = checkpoint(part, hidden, mask, hidden, weight)
        gradients.append(torch.autograd.grad(hidden.sum(), [x, weight]))
        del hidden
    assert equal(*map(list, gradients))
    assert offloader.stats()["payload_bytes"] == 3 * x.nbytes


@pytest.mark.parametrize("form", ["transposed", "gaps", "expanded", "empty", "scalar"])
def test_views_come_back_with_their_strides(form: str) -> None:
    base = torch.randn(6, 8, requires_grad=True)
    views = {
        "transposed": lambda: (base * 1.0).T,
        "gaps": lambda: (base * 1.0)[:, 1:7:2],
        "expanded": lambda: (base * 1.0)[:1].expand(6, 8),
        "empty": lambda: (base * 1.0)[:0],
        "scalar": lambda: (base * 1.0).sum(),
    }
    strides: list[tuple[int, ...]] = []

    def part(hidden: Tensor) -> Tensor:
        strides.append(hidden.stride())
        return torch.tanh(hidden) * hidden

    offloader = BoundaryOffloader(BoundaryOffload(keep_last=0))
    results = []
    for checkpoint in (reference_checkpoint, offloader.checkpoint):
        out = checkpoint(part, views[form]())
        results.append(torch.autograd.grad(out.sum(), base))
        del out
    assert equal(list(results[0]), list(results[1]))
    assert len(strides) == 4
    assert len(set(strides)) == 1
    assert offloader.stats()["offloaded"] == (0 if form in ("expanded", "empty") else 1)


def test_host_memory_is_one_slab_of_exact_size_from_the_second_step_on() -> None:
    offloader = BoundaryOffloader()
    for _ in range(4):
        train(offloader.checkpoint, steps=1)
        stats = offloader.stats()
        assert stats["host_bytes"] == stats["payload_bytes"] == 6 * BOUNDARY_BYTES
    assert offloader.host_allocations == 1
    offloader.close()
    train(offloader.checkpoint, steps=2)
    assert offloader.host_allocations == 2


def test_nothing_grows_over_fifty_steps_and_memory_only_with_the_longest() -> None:
    weights = make_weights(6)
    offloader = BoundaryOffloader(BoundaryOffload(keep_last=1))
    held = []
    for step in range(50):
        x = torch.randn(4 + step % 7, 8, requires_grad=True)
        forward(offloader.checkpoint, weights, x).backward()
        held.append(offloader.stats()["host_bytes"])
        assert offloader.alive == 0
    assert offloader.host_allocations <= 7
    assert set(held[14:]) == {5 * 10 * 8 * 4}


def test_without_gradients_the_function_is_just_called() -> None:
    weights = make_weights(4)
    offloader = BoundaryOffloader()
    x = torch.randn(4, 8, requires_grad=True)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert not forward(offloader.checkpoint, weights, x).requires_grad
    assert offloader.stats()["boundaries"] == 0


def test_evaluation_between_forward_and_backward_changes_nothing() -> None:
    weights, x = make_weights(6), torch.randn(4, 8, requires_grad=True)
    expected = torch.autograd.grad(forward(reference_checkpoint, weights, x), [x, *weights])
    offloader = BoundaryOffloader(BoundaryOffload(keep_last=1))
    with torch.no_grad():
        forward(offloader.checkpoint, weights, x)
    loss = forward(offloader.checkpoint, weights, x)
    with torch.no_grad():
        forward(offloader.checkpoint, weights, x)
    assert equal(list(torch.autograd.grad(loss, [x, *weights])), list(expected))
    assert offloader.alive == 0


@pytest.mark.parametrize("first", [0, 1])
def test_two_forwards_may_come_before_their_backwards_in_either_order(first: int) -> None:
    weights = make_weights(6)
    inputs = [torch.randn(4, 8, requires_grad=True) for _ in range(2)]
    expected = [torch.autograd.grad(forward(reference_checkpoint, weights, x), x)[0] for x in inputs]
    offloader = BoundaryOffloader()
    for _ in range(3):
        losses = [forward(offloader.checkpoint, weights, x) for x in inputs]
        actual = {i: torch.autograd.grad(losses[i], inputs[i])[0] for i in (first, 1 - first)}
        assert equal([actual[0], actual[1]], expected)
        assert offloader.stats()["boundaries"] == 12
        losses.clear()
    assert offloader.alive == 0


def test_a_graph_that_is_retained_gives_the_same_again() -> None:
    weights, x = make_weights(6), torch.randn(4, 8, requires_grad=True)
    offloader = BoundaryOffloader(BoundaryOffload(keep_last=1))
    loss = forward(offloader.checkpoint, weights, x)
    first = torch.autograd.grad(loss, [x, *weights], retain_graph=True)
    second = torch.autograd.grad(loss, [x, *weights])
    assert equal(list(first), list(second))
    del loss
    assert offloader.alive == 0


def test_a_backward_that_never_comes_frees_all_with_the_loss() -> None:
    offloader = BoundaryOffloader()
    loss = forward(offloader.checkpoint, make_weights(6), torch.randn(4, 8, requires_grad=True))
    assert offloader.alive == 6
    del loss
    assert offloader.alive == 0
    assert equal(train(offloader.checkpoint), train(reference_checkpoint))


@pytest.mark.parametrize("when", ["forward", "backward"])
def test_after_an_exception_the_next_step_is_right(when: str) -> None:
    offloader = BoundaryOffloader(BoundaryOffload(keep_last=1))
    calls = 0

    def faulty(hidden: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == (1 if when == "forward" else 2):
            raise RuntimeError("the seventh seal")
        return torch.tanh(hidden)

    def step() -> None:
        hidden = torch.randn(4, 8, requires_grad=True) * 1.0
        for weight in make_weights(4):
            hidden = offloader.checkpoint(residual, hidden, torch.ones(8), weight)
        hidden = offloader.checkpoint(faulty, hidden)
        hidden.sum().backward()

    with pytest.raises(RuntimeError, match="seventh seal"):
        step()
    offloader.reset()
    gc.collect()  # the exception's traceback held the frames
    assert offloader.alive == 0
    assert equal(train(offloader.checkpoint), train(reference_checkpoint))


def test_an_input_without_gradient_is_a_boundary_as_well() -> None:
    offloader = BoundaryOffloader(BoundaryOffload(keep_last=0))
    weight, mask = make_weights(1)[0], torch.ones(8)
    x = torch.randn(4, 8)
    results = [
        torch.autograd.grad(checkpoint(residual, x, mask, weight).sum(), weight)
        for checkpoint in (reference_checkpoint, offloader.checkpoint)
    ]
    assert equal(list(results[0]), list(results[1]))
    assert offloader.stats()["offloaded"] == 1


def test_a_part_inside_a_part_keeps_its_boundary_where_it_is() -> None:
    offloader = BoundaryOffloader(BoundaryOffload(keep_last=0))

    def outer(checkpoint: object, hidden: Tensor, weights: list[Tensor]) -> Tensor:
        for weight in weights:
            hidden = checkpoint(residual, hidden, torch.ones(8), weight)  # type: ignore[operator]
        return hidden

    weights, x = make_weights(4), torch.randn(4, 8, requires_grad=True)
    results = []
    for checkpoint in (reference_checkpoint, offloader.checkpoint):
        hidden = x * 1.0
        for pair in (weights[:2], weights[2:]):
            hidden = checkpoint(lambda h, p=pair, c=checkpoint: outer(c, h, p), hidden)
        results.append(list(torch.autograd.grad(hidden.sum(), [x, *weights])))
        del hidden
    assert equal(*results)
    assert offloader.stats()["boundaries"] == 2


def test_hidden_states_changed_in_place_are_refused_as_without_offload() -> None:
    for keep_last in (0, 1, 3):
        offloader = BoundaryOffloader(BoundaryOffload(keep_last=keep_last))
        hidden = torch.randn(4, 8, requires_grad=True) * 1.0
        out = offloader.checkpoint(torch.tanh, hidden)
        hidden += 1.0
        with pytest.raises(RuntimeError, match="changed in place"):
            out.sum().backward()
        del out


def test_what_is_no_hidden_state_is_refused() -> None:
    offloader = BoundaryOffloader()
    with pytest.raises(ValueError, match="given a torch.int64 tensor"):
        offloader.checkpoint(torch.neg, torch.arange(4))
    with pytest.raises(ValueError, match="given a list"):
        offloader.checkpoint(len, [1, 2])  # type: ignore[arg-type]


def test_a_budget_above_the_nodes_share_is_refused_before_training() -> None:
    with pytest.raises(ValueError, match=r"'4GiB'\) is 4.00 GiB, and host_memory leaves this rank 1.00 GiB"):
        BoundaryOffloader(BoundaryOffload(host_budget="4GiB"), limit_bytes=2**30)


def test_without_a_budget_the_nodes_share_is_filled_and_that_is_said_once() -> None:
    offloader = BoundaryOffloader(limit_bytes=3 * BOUNDARY_BYTES)
    with pytest.warns(UserWarning, match="GiB of host memory that this rank may use") as caught:
        actual = train(offloader.checkpoint)
    assert len(caught) == 1
    assert equal(actual, train(reference_checkpoint))
    assert offloader.stats()["offloaded"] == 3


def test_too_little_memory_for_all_ranks_of_the_node_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offloader_module, "node_bytes", lambda: 20 * BOUNDARY_BYTES)
    monkeypatch.setattr(offloader_module, "local_ranks", lambda: 4)
    offloader = BoundaryOffloader()
    with pytest.warns(UserWarning, match="for the 4 ranks of this node"):
        train(offloader.checkpoint)
    monkeypatch.setattr(offloader_module, "local_ranks", lambda: 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(BoundaryOffloader().checkpoint)
