"""Labels to targets."""

from __future__ import annotations

import torch

from lightning_longmoe.models.shift import mark_shifted, shift_labels


def test_targets_are_the_next_labels_and_the_last_is_ignored() -> None:
    labels = torch.tensor([[1, 2, -100, 4], [5, 6, 7, 8]])
    targets = shift_labels(labels)
    assert targets.tolist() == [[2, -100, 4, -100], [6, 7, 8, -100]]
    assert labels.tolist() == [[1, 2, -100, 4], [5, 6, 7, 8]]


def test_another_dimension_and_ignore_index() -> None:
    assert shift_labels(torch.tensor([[1, 2], [3, 4]]), ignore_index=-1, dim=0).tolist() == [[3, 4], [-1, -1]]


def test_shifting_twice_is_shifting_once() -> None:
    targets = shift_labels(torch.tensor([[1, 2, 3]]))
    assert shift_labels(targets) is targets
    marked = mark_shifted(torch.tensor([[9, 9]]))
    assert shift_labels(marked) is marked


def test_a_copy_carries_no_mark() -> None:
    targets = shift_labels(torch.tensor([[1, 2, 3]]))
    assert shift_labels(targets.clone()).tolist() == [[3, -100, -100]]
