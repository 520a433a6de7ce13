"""Labels are counted, shifted and checked as `BatchConfig` says, and the user's batch stays as it was."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_longmoe.batches import Labels
from lightning_longmoe.config import BatchConfig
from lightning_longmoe.models import shift_labels

IDS = torch.tensor([[5, 6, 7, 8], [1, 2, 3, 4]])
LABELS = torch.tensor([[5, 6, -100, 8], [-100, 2, 3, 4]])


def labels(active: bool = True, hook: Any = None, **config: Any) -> Labels:
    return Labels(BatchConfig(**config), active=active, count_hook=hook)


def batch() -> dict[str, Tensor]:
    return {"input_ids": IDS.clone(), "labels": LABELS.clone()}


def test_valid_targets_are_counted_after_the_shift() -> None:
    assert labels().count_valid(batch()) == 2 + 3
    assert labels(labels_shifted=True).count_valid(batch()) == 3 + 3
    assert labels().count_valid({"labels": shift_labels(LABELS)}) == 2 + 3


def test_a_hook_of_the_module_counts_instead() -> None:
    assert labels(hook=lambda b: torch.tensor(len(b["input_ids"]))).count_valid(batch()) == 2


@pytest.mark.parametrize("unknown", [{"input_ids": IDS}, (IDS, LABELS), IDS, {"labels": [1, 2]}])
def test_batches_without_labels_show_no_count(unknown: Any) -> None:
    assert labels().count_valid(unknown) is None


def test_labels_are_shifted_in_a_copy() -> None:
    given = batch()
    prepared = labels().prepare(given)
    assert prepared["labels"].tolist() == [[6, -100, 8, -100], [2, 3, 4, -100]]
    assert prepared["labels"].labels_shifted
    assert prepared["input_ids"] is given["input_ids"]
    assert torch.equal(given["labels"], LABELS)
    assert shift_labels(prepared["labels"]) is prepared["labels"]  # the module shifts no second time


def test_shifted_labels_are_marked_but_not_on_the_users_tensor() -> None:
    given = batch()
    prepared = labels(labels_shifted=True).prepare(given)
    assert torch.equal(shift_labels(prepared["labels"]), LABELS)
    assert not hasattr(given["labels"], "labels_shifted")


def test_sequence_may_lie_along_another_dimension() -> None:
    prepared = labels(sequence_dim=0).prepare({"labels": LABELS.T.contiguous()})
    assert prepared["labels"].T.tolist() == [[6, -100, 8, -100], [2, 3, 4, -100]]
    with pytest.raises(ValueError, match=r"shape \[3\] have no dimension 1"):
        labels().prepare({"labels": torch.zeros(3)})


def test_labels_of_a_module_without_our_head_are_left_alone() -> None:
    given = batch()
    assert labels(active=False).prepare(given) is given
    labels(active=False, labels_shifted=True).check({"input_ids": IDS, "labels": IDS}, "train")


# ------------------------------------------------------------------------------------------------- users' own mappings
class Encoding(UserDict):  # type: ignore[type-arg]
    """As transformers' BatchEncoding."""


class ReadOnly(Mapping[str, Any]):
    def __init__(self, store: dict[str, Any]) -> None:
        self.store = store

    def __getitem__(self, key: str) -> Any:
        return self.store[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.store)

    def __len__(self) -> int:
        return len(self.store)


class SharedStore(ReadOnly):
    def __setitem__(self, key: str, value: Any) -> None:
        self.store[key] = value


class Stubborn(ReadOnly):
    def __init__(self, *, rows: dict[str, Any]) -> None:
        super().__init__(rows)


class TaggedDict(dict[str, Any]):
    tag = ""


@pytest.mark.parametrize("kind", [dict, Encoding, ReadOnly, SharedStore, TaggedDict])
def test_a_mapping_keeps_its_type_and_is_not_changed(kind: Any) -> None:
    given = kind(batch())
    if kind is TaggedDict:
        given.tag = "kept"
    prepared = labels().prepare(given)
    assert type(prepared) is kind
    assert prepared["labels"].tolist() == [[6, -100, 8, -100], [2, 3, 4, -100]]
    assert torch.equal(given["labels"], LABELS)
    if kind is TaggedDict:
        assert prepared.tag == "kept"


def test_a_mapping_that_cannot_be_changed_or_rebuilt_is_refused() -> None:
    with pytest.raises(ValueError, match="Stubborn can be neither copied and changed nor built from a dict"):
        labels().prepare(Stubborn(rows=batch()))


# -------------------------------------------------------------------------------------------------------------- checks
def test_labels_that_are_shifted_already_are_refused() -> None:
    shifted = torch.tensor([[6, 7, 8, -100], [2, -100, 4, -100]])
    with pytest.raises(ValueError, match=r"Set BatchConfig\(labels_shifted=True\)"):
        labels().check({"input_ids": IDS, "labels": shifted}, "train")
    labels(labels_shifted=True).check({"input_ids": IDS, "labels": shifted}, "train")


def test_labels_equal_to_the_inputs_are_refused_as_shifted_ones() -> None:
    with pytest.raises(ValueError, match=r"BatchConfig\(labels_shifted=False\), or shift"):
        labels(labels_shifted=True).check(batch(), "validate")
    labels().check(batch(), "validate")


@pytest.mark.parametrize("shifted", [True, False])
@pytest.mark.parametrize(
    ("inputs", "targets"),
    [
        (torch.full((2, 4), 3), torch.full((2, 4), 3)),  # one token repeated
        (IDS, torch.full((2, 4), -100)),  # nothing valid
        (IDS, IDS + 7),  # something else altogether
        (IDS, IDS[:, :2]),  # another shape
    ],
)
def test_batches_that_tell_nothing_pass(shifted: bool, inputs: Tensor, targets: Tensor) -> None:
    labels(labels_shifted=shifted).check({"input_ids": inputs, "labels": targets}, "train")


@pytest.mark.parametrize(
    "twice",
    [
        lambda t: torch.roll(t, -1, 1),
        lambda t: t[:, 1:],
        lambda t: torch.cat([t[:, 1:], torch.full((2, 1), -100)], 1),
    ],
)
def test_a_module_that_shifts_once_more_is_refused(twice: Any) -> None:
    checked = labels()
    prepared = checked.prepare({"input_ids": IDS, "labels": IDS.clone()})["labels"]
    with pytest.raises(ValueError, match="shifts labels that were shifted before"):
        checked.check_targets(twice(prepared.clone()))


def test_inputs_as_targets_are_refused() -> None:
    checked = labels()
    checked.prepare({"input_ids": IDS, "labels": IDS.clone()})
    with pytest.raises(ValueError, match="passes input_ids"):
        checked.check_targets(IDS)


def test_prepared_targets_pass_in_any_form() -> None:
    checked = labels()
    prepared = checked.prepare(batch())["labels"]
    for targets in (prepared, prepared.clone(), prepared.view(-1), prepared[:, :-1], prepared.int(), IDS + 50):
        checked.check_targets(targets)


def test_padding_batches_hold_no_target() -> None:
    given = batch()
    assert (labels().without_targets(given)["labels"] == -100).all()
    assert torch.equal(given["labels"], LABELS)
    assert labels(active=False).without_targets(given) is given
