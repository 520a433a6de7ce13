"""Where a batch holds labels, whatever it is built of, and how they are replaced in a copy.

A batch is a mapping, a sequence, a named tuple, a dataclass or another object with tensors, or a nest of these. Its
*labels* are the tensors of that name: entries ``["labels"]`` and attributes ``.labels``.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

LABELS = "labels"
INPUTS = "input_ids"
LEAVES = (Tensor, nn.Module, str, bytes, int, float, type, type(None))


@dataclass(frozen=True)
class Found:
    """Labels of a batch.

    Attributes:
        path: where they are, as one would write it.
        labels: the tensor.
        inputs: the ``input_ids`` beside them; None without.
    """

    path: str
    labels: Tensor
    inputs: Any


def find_labels(batch: Any) -> list[Found]:
    """All labels of a batch, in its own order."""
    found: list[Found] = []

    def note(one: Found) -> Tensor:
        found.append(one)
        return one.labels

    replace_labels(batch, note)
    return found


def replace_labels(batch: Any, change: Callable[[Found], Tensor], path: str = "batch") -> Any:
    """A shallow copy of ``batch`` with ``change(...)`` in the place of all labels; itself where nothing changes.

    Raises:
        ValueError: a part of it can be neither copied and changed nor built anew.
    """
    changed = batch
    for name, value in _parts(batch):
        place = _place(batch, name, path)
        if name == LABELS and isinstance(value, Tensor):
            new = change(Found(place, value, _beside(batch)))
        else:
            new = replace_labels(value, change, place)
        if new is not value:
            changed = with_part(changed, name, new)
    return changed


def _parts(batch: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(batch, LEAVES):
        return ()
    if isinstance(batch, Mapping):
        return [(key, batch[key]) for key in batch]
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return zip(batch._fields, batch, strict=True)
    if isinstance(batch, (list, tuple)):
        return enumerate(batch)
    if dataclasses.is_dataclass(batch):
        return [(field.name, getattr(batch, field.name, None)) for field in dataclasses.fields(batch)]
    labels = getattr(batch, LABELS, None)
    return [(LABELS, labels)] if isinstance(labels, Tensor) else ()


def _place(batch: Any, name: Any, path: str) -> str:
    return f"{path}[{name!r}]" if _has_entries(batch) else f"{path}.{name}"


def _has_entries(batch: Any) -> bool:
    return isinstance(batch, (Mapping, list)) or (isinstance(batch, tuple) and not hasattr(batch, "_fields"))


def _beside(batch: Any) -> Any:
    return batch.get(INPUTS) if isinstance(batch, Mapping) else getattr(batch, INPUTS, None)


def with_part(batch: Any, name: Any, value: Any) -> Any:
    """A shallow copy of ``batch``, of its own type, with one entry or attribute replaced."""
    if isinstance(batch, Mapping):
        return _with_entry(batch, name, value)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return batch._replace(**{name: value})  # type: ignore[attr-defined]
    if isinstance(batch, tuple):
        return type(batch)(value if index == name else part for index, part in enumerate(batch))
    changed = copy.copy(batch)
    if isinstance(batch, list):
        changed[name] = value
        return changed
    return _with_attribute(batch, changed, name, value)


def _with_attribute(batch: Any, changed: Any, name: str, value: Any) -> Any:
    original = getattr(batch, name)
    try:
        # a frozen dataclass refuses the assignment, not the value
        (object.__setattr__ if dataclasses.is_dataclass(batch) else setattr)(changed, name, value)
    except AttributeError:
        raise ValueError(_cannot_change(batch, name)) from None
    if getattr(batch, name) is not original:  # the copy shares its store with the batch
        setattr(batch, name, original)
        raise ValueError(_cannot_change(batch, name))
    return changed


def _with_entry(batch: Any, key: Any, value: Any) -> Any:
    changed, original = copy.copy(batch), batch[key]
    if changed is not batch and hasattr(changed, "__setitem__"):
        changed[key] = value
        if batch[key] is original:
            return changed
        batch[key] = original  # the copy shares its store with the batch
    try:
        return type(batch)({**batch, key: value})
    except TypeError:
        raise ValueError(_cannot_change(batch, key)) from None


def _cannot_change(batch: Any, name: Any) -> str:
    return (
        f"A batch of type {type(batch).__name__} can be neither copied and changed nor built from a dict, so its"
        f" {name!r} cannot be replaced. Return a dict from the collate function, or set"
        " BatchConfig(shift_labels=False) and shift the labels in the module."
    )
