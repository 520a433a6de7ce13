"""The labels of a batch: counted before the transfer to the device, shifted after it, and checked once a stage."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_longmoe.config import BatchConfig
from lightning_longmoe.models.shift import mark_shifted, shift_labels

LABELS = "labels"
INPUTS = "input_ids"


class Labels:
    """What is done to the labels of every batch.

    Args:
        config: sequence dimension, and whether the batches' labels are already shifted.
        active: whether the module holds a head of ours. Without one the labels are left alone: a module with its own
            loss shifts, or not, as it did before.
        ignore_index: the label that is no target.
        count_hook: the module's ``count_valid_targets(batch) -> int``, where it has one.
    """

    def __init__(
        self,
        config: BatchConfig,
        *,
        active: bool,
        ignore_index: int = -100,
        count_hook: Callable[[Any], Any] | None = None,
    ) -> None:
        self.config = config
        self.active = active
        self.ignore_index = ignore_index
        self.count_hook = count_hook
        self._prepared: tuple[Any, Tensor] | None = None  # inputs and targets of the last batch

    def count_valid(self, batch: Any) -> int | None:
        """Valid targets of a batch as it comes from the loader; None where the batch does not show them.

        Args:
            batch: in host memory, labels not yet shifted unless the config says so.
        """
        if self.count_hook is not None:
            return int(self.count_hook(batch))
        labels = _labels_of(batch)
        if labels is None:
            return None
        if not (self.config.labels_shifted or getattr(labels, "labels_shifted", False)):
            dim = self._sequence_dim(labels)
            labels = labels.narrow(dim, 1, labels.size(dim) - 1)  # the first label is nobody's target
        return int((labels != self.ignore_index).sum())

    def prepare(self, batch: Any) -> Any:
        """The batch with shifted labels that carry ``labels_shifted = True``; the given batch stays as it is.

        Args:
            batch: on the device, whole sequences.
        """
        labels = _labels_of(batch)
        if not self.active or labels is None:
            return batch
        if self.config.labels_shifted:
            targets = mark_shifted(labels.view(labels.shape))  # an alias, so that the user's tensor gets no mark
        else:
            targets = shift_labels(labels, self.ignore_index, self._sequence_dim(labels))
        self._prepared = (batch.get(INPUTS), targets)
        return with_entry(batch, LABELS, targets)

    def check(self, batch: Any, stage: str) -> None:
        """Compare the labels with the inputs, where both are there: a wrong setting must not train unnoticed.

        Raises:
            ValueError: the labels are shifted and the config says they are not, or the other way round.
        """
        labels = _labels_of(batch)
        if not self.active or labels is None or getattr(labels, "labels_shifted", False):
            return
        inputs = batch.get(INPUTS)
        dim = self._sequence_dim(labels)
        if not isinstance(inputs, Tensor) or inputs.shape != labels.shape or labels.size(dim) < 2:
            return
        length = labels.size(dim) - 1
        same = self._agree(labels, inputs)
        following = self._agree(labels.narrow(dim, 0, length), inputs.narrow(dim, 1, length))
        if same == following:  # neither, or both: one token repeated, or nothing valid
            return
        if following and not self.config.labels_shifted:
            raise ValueError(
                f"The first {stage} batch holds labels that are shifted already (labels[:, i] is the token after"
                " input_ids[:, i]), and BatchConfig(labels_shifted=False) shifts them once more: the model would learn"
                " to predict the token after the next. Set BatchConfig(labels_shifted=True), or give unshifted labels."
            )
        if same and self.config.labels_shifted:
            raise ValueError(
                f"The first {stage} batch holds labels equal to input_ids, and BatchConfig(labels_shifted=True) says"
                " that they are shifted already: the model would learn to repeat its input. Set"
                " BatchConfig(labels_shifted=False), or shift the labels by one."
            )

    def check_targets(self, targets: Tensor) -> None:
        """Compare what a head got as targets with the labels of the last batch, which were shifted already.

        Raises:
            ValueError: the module shifted them once more, or gave the inputs.
        """
        if self._prepared is None or getattr(targets, "labels_shifted", False):
            return
        inputs, prepared = self._prepared
        dim = self._sequence_dim(prepared)
        length = prepared.size(dim) - 1
        if self._agree_flat(targets, prepared) or self._agree_flat(targets, prepared.narrow(dim, 0, length)):
            return
        again = shift_labels(prepared.view(prepared.shape), self.ignore_index, dim)
        if self._agree_flat(targets, again) or self._agree_flat(targets, prepared.narrow(dim, 1, length)):
            raise ValueError(
                "The module shifts labels that were shifted before, so that it would learn to predict the token after"
                " the next. Under LongMoEStrategy batch['labels'] already holds the next tokens. Pass them to"
                " CausalLMHead as they are, with the hidden states of all positions, or use"
                " `shift_labels(batch['labels'])`, which shifts once with and without the strategy."
            )
        if isinstance(inputs, Tensor) and self._agree_flat(targets, inputs):
            raise ValueError(
                "The module passes input_ids to CausalLMHead as targets: it would learn to repeat its input. Pass"
                " `shift_labels(batch['labels'])`, the token that follows each position."
            )

    def _agree_flat(self, targets: Tensor, others: Tensor) -> bool:
        if targets.numel() != others.numel():
            return False
        a, b = targets.flatten(), others.flatten()
        return bool(((a == b) | (a == self.ignore_index) | (b == self.ignore_index)).all())

    def without_targets(self, batch: Any) -> Any:
        """A copy of the batch in which no label is valid; the batch itself where it shows no labels."""
        labels = _labels_of(batch)
        if not self.active or labels is None:
            return batch
        return with_entry(batch, LABELS, torch.full_like(labels, self.ignore_index))

    def _agree(self, labels: Tensor, tokens: Tensor) -> bool:
        return bool(((labels == tokens) | (labels == self.ignore_index)).all())

    def _sequence_dim(self, labels: Tensor) -> int:
        dim = self.config.sequence_dim
        if labels.ndim <= dim:
            raise ValueError(
                f"Labels of shape {list(labels.shape)} have no dimension {dim}, along which"
                f" BatchConfig(sequence_dim={dim}) expects the sequence. Give labels [B, S], or set sequence_dim."
            )
        return dim


def _labels_of(batch: Any) -> Tensor | None:
    labels = batch.get(LABELS) if isinstance(batch, Mapping) else None
    return labels if isinstance(labels, Tensor) else None


def with_entry(batch: Any, key: str, value: Any) -> Any:
    """A shallow copy of a mapping, of its own type, with one entry replaced."""
    changed, original = copy.copy(batch), batch[key]
    if changed is not batch and hasattr(changed, "__setitem__"):
        changed[key] = value
        if batch[key] is original:
            return changed
        batch[key] = original  # the copy shares its store with the batch
    try:
        return type(batch)({**batch, key: value})
    except TypeError:
        raise ValueError(
            f"A batch of type {type(batch).__name__} can be neither copied and changed nor built from a dict, so its"
            f" {key!r} cannot be replaced. Return a dict from the collate function."
        ) from None
