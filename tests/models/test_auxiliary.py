"""Auxiliary losses reach the loss that takes them, in the gradient and not in the value."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from lightning_longmoe.models import auxiliary
from lightning_longmoe.models.auxiliary import add_aux_loss, attach_aux_losses, take_aux_loss


@pytest.fixture(autouse=True)
def _empty_list() -> Iterator[None]:
    auxiliary.discard_aux_losses()
    yield
    auxiliary.discard_aux_losses()


def test_taking_sums_the_waiting_terms_once() -> None:
    add_aux_loss(torch.tensor(2.0))
    add_aux_loss(torch.tensor(3.0))
    assert take_aux_loss().item() == 5.0
    assert take_aux_loss().item() == 0.0


def test_attached_terms_change_the_gradient_and_not_the_value() -> None:
    a, b = torch.tensor(2.0, requires_grad=True), torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
    add_aux_loss(b**2)
    loss = attach_aux_losses(4 * a)
    assert loss.item() == 8.0
    (loss * 0.5).backward()
    assert a.grad.item() == 2.0
    assert b.grad.item() == 3.0  # 0.5 · 2b


def test_a_loss_without_a_graph_leaves_them_waiting() -> None:
    add_aux_loss(torch.tensor(2.0))
    attach_aux_losses(torch.tensor(1.0))
    assert take_aux_loss().item() == 2.0


def test_terms_that_nobody_takes_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auxiliary, "_MOST_PENDING", 3)
    for _ in range(3):
        add_aux_loss(torch.tensor(1.0))
    with pytest.raises(RuntimeError, match="add take_aux_loss"):
        add_aux_loss(torch.tensor(1.0))


def test_terms_still_waiting_after_a_backward_are_an_error_once() -> None:
    auxiliary.refuse_waiting_aux_losses()
    add_aux_loss(torch.tensor(1.0))
    with pytest.raises(RuntimeError, match="were not part of the loss"):
        auxiliary.refuse_waiting_aux_losses()
    auxiliary.refuse_waiting_aux_losses()
