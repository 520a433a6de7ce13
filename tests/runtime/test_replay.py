"""What a recomputation gets back from its first forward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightning_longmoe.runtime.replay import checkpoint_contexts, remember, replaying


def run(block, x: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
    return checkpoint(block, x, use_reentrant=False, context_fn=checkpoint_contexts)


def test_outside_a_checkpoint_every_value_is_computed() -> None:
    made = iter(range(10))
    assert [remember("n", lambda: next(made)) for _ in range(3)] == [0, 1, 2]
    assert not replaying()


def test_the_replay_gets_the_values_of_the_first_forward_in_order() -> None:
    made, seen = iter(range(10)), []

    def block(x: Tensor) -> Tensor:
        values = [remember("a", lambda: next(made)), remember("b", lambda: next(made))]
        seen.append((values, replaying()))
        return (x * values[1]).sin()

    x = torch.ones(2, requires_grad=True)
    run(block, x).sum().backward()
    assert seen == [([0, 1], False), ([0, 1], True)]


def test_two_checkpointed_calls_do_not_share_values() -> None:
    made = iter((2.0, 3.0))

    def block(x: Tensor) -> Tensor:
        return (x * remember("factor", lambda: next(made))).sin()

    x = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    (run(block, x) + 10 * run(block, x)).backward()
    expected = 2 * torch.tensor(1.0).double().cos() + 30 * torch.tensor(1.5).double().cos()
    torch.testing.assert_close(x.grad, expected, rtol=1e-14, atol=0)


def test_a_graph_kept_for_a_second_backward_replays_again() -> None:
    made = iter((2.0,))

    def block(x: Tensor) -> Tensor:
        return (x * remember("factor", lambda: next(made))).sin()

    x = torch.tensor(0.5, requires_grad=True)
    y = run(block, x)
    y.backward(retain_graph=True)
    once = x.grad.clone()
    y.backward()
    assert torch.equal(x.grad, 2 * once)


def test_nested_checkpoints_replay_their_own_values() -> None:
    made = iter((2.0, 3.0, 5.0))

    def inner(x: Tensor) -> Tensor:
        return (x * remember("inner", lambda: next(made))).sin()

    def outer(x: Tensor) -> Tensor:
        x = (x * remember("before", lambda: next(made))).sin()
        x = run(inner, x)
        return (x * remember("after", lambda: next(made))).sin()

    x = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    run(outer, x).backward()
    plain = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    (((plain * 2).sin() * 3).sin() * 5).sin().backward()
    torch.testing.assert_close(x.grad, plain.grad, rtol=1e-14, atol=0)


def test_a_replay_that_takes_another_path_is_an_error() -> None:
    keys = iter(("left", "right"))

    def block(x: Tensor) -> Tensor:
        return (x * remember(next(keys), lambda: 1.0)).sin()

    with pytest.raises(RuntimeError, match="asked for 'right'"):
        run(block, torch.ones(2, requires_grad=True)).sum().backward()


def test_after_an_error_in_a_checkpoint_no_tape_is_active() -> None:
    def block(x: Tensor) -> Tensor:
        raise KeyError("broken")

    with pytest.raises(KeyError):
        run(block, torch.ones(2, requires_grad=True))
    made = iter(range(3))
    assert [remember("n", lambda: next(made)) for _ in range(2)] == [0, 1]


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputations_of_a_checkpoint_that_is_not_ours_are_seen_too(use_reentrant: bool) -> None:
    seen = []

    def block(x: Tensor) -> Tensor:
        seen.append(replaying())
        return x.sin()

    x = torch.ones(2, requires_grad=True)
    checkpoint(block, x, use_reentrant=use_reentrant).sum().backward()
    assert seen == [False, True]
