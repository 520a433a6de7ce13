"""Labels are found, counted, shifted and emptied wherever a batch holds them, and the user's batch stays as it was."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from lightning_longmoe.batches import Labels
from lightning_longmoe.batches.structure import find_labels, replace_labels
from lightning_longmoe.config import BatchConfig

IDS = torch.tensor([[5, 6, 7, 8], [1, 2, 3, 4]])
SHIFTED = [[6, 7, 8, -100], [2, 3, 4, -100]]


class Named(NamedTuple):
    input_ids: Tensor
    labels: Tensor


@dataclass(frozen=True)
class Data:
    input_ids: Tensor
    labels: Tensor
    note: str = ""


class Slotted:
    __slots__ = ("input_ids", "labels")

    def __init__(self, input_ids: Tensor, labels: Tensor) -> None:
        self.input_ids, self.labels = input_ids, labels


class ReadOnly:
    @property
    def labels(self) -> Tensor:
        return IDS


class OneStore:
    """Whose copies share what they hold."""

    def __init__(self) -> None:
        self.__dict__["store"] = {"labels": IDS}

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["store"][name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self.store[name] = value


MAKERS = {
    "a dict of dicts": (lambda x, y: {"text": {"input_ids": x, "labels": y}, "n": 3}, "batch['text']['labels']"),
    "a tuple with a dict": (lambda x, y: ({"input_ids": x, "labels": y}, 0), "batch[0]['labels']"),
    "a list of dicts": (lambda x, y: [{"input_ids": x, "labels": y}], "batch[0]['labels']"),
    "a named tuple": (Named, "batch.labels"),
    "a frozen dataclass": (Data, "batch.labels"),
    "an object": (lambda x, y: SimpleNamespace(input_ids=x, labels=y), "batch.labels"),
    "an object with slots": (Slotted, "batch.labels"),
    "a dataclass in a dict": (lambda x, y: {"text": Data(x, y, "kept")}, "batch['text'].labels"),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_labels_are_shifted_and_counted_wherever_they_are(kind: str) -> None:
    make, path = MAKERS[kind]
    original = IDS.clone()
    given = make(IDS, original)
    labels = Labels(BatchConfig(), active=True)
    assert labels.count_valid(given) == 6
    labels.check(given, "train")
    prepared = labels.prepare(given)
    (found,) = find_labels(prepared)
    assert found.path == path
    assert found.labels.tolist() == SHIFTED
    assert found.labels.labels_shifted  # type: ignore[attr-defined]
    assert found.inputs is IDS
    assert type(prepared) is type(given)
    assert find_labels(given)[0].labels is original
    assert torch.equal(original, IDS)
    assert (find_labels(labels.without_targets(given))[0].labels == -100).all()
    with pytest.raises(ValueError, match=r"labels_shifted=False\), or shift"):
        Labels(BatchConfig(labels_shifted=True), active=True).check(given, "train")


def test_several_labels_of_a_batch_are_all_counted() -> None:
    assert Labels(BatchConfig(), active=True).count_valid({"a": {"labels": IDS}, "b": [Data(IDS, IDS)]}) == 12


def test_what_holds_no_labels_is_handed_on_as_it_is() -> None:
    for batch in (IDS, (IDS, IDS), {"x": [1, "labels", None]}, "labels", object(), torch.nn.Linear(1, 1)):
        assert replace_labels(batch, lambda found: found.labels + 1) is batch


@pytest.mark.parametrize("kind", [ReadOnly, OneStore])
def test_an_object_that_cannot_be_changed_alone_is_refused_with_a_way_out(kind: Any) -> None:
    given = kind()
    with pytest.raises(ValueError, match=rf"{kind.__name__} can be neither .*shift_labels=False"):
        Labels(BatchConfig(), active=True).prepare(given)
    assert given.labels is IDS


@pytest.mark.parametrize("labels", [torch.zeros(2, dtype=torch.int64), torch.zeros(2, 5), torch.zeros(2, 4) > 0])
def test_labels_that_are_no_tokens_are_refused_and_left_alone_on_request(labels: Tensor) -> None:
    batch = {"input_ids": IDS, "labels": labels}
    with pytest.raises(ValueError, match=r"batch\['labels'\] .*BatchConfig\(shift_labels=False\)"):
        Labels(BatchConfig(), active=True).prepare(batch)
    left = Labels(BatchConfig(shift_labels=False), active=True)
    assert left.prepare(batch) is batch
    assert left.count_valid(batch) is None
    left.check(batch, "train")
    assert left.without_targets(batch)["labels"] is labels


def test_labels_that_are_left_alone_are_counted_as_the_module_will_shift_them() -> None:
    left = Labels(BatchConfig(shift_labels=False), active=True)
    batch = {"input_ids": IDS, "labels": IDS}
    assert left.prepare(batch) is batch
    assert left.count_valid(batch) == 6
    assert (left.without_targets(batch)["labels"] == -100).all()
