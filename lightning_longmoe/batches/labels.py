"""The labels of a batch: counted before the transfer to the device, shifted after it, and checked once a stage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_longmoe.batches.structure import Found, find_labels, replace_labels
from lightning_longmoe.batches.targets import Prepared, TargetCheck
from lightning_longmoe.config import BatchConfig
from lightning_longmoe.models.shift import mark_shifted, shift_labels


class Labels:
    """What is done to the labels of every batch: to all tensors of that name, however deep they lie in it.

    Args:
        config: sequence dimension, whether the batches' labels are already shifted, and whether they are touched.
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
        self.targets = TargetCheck(config.sequence_dim, ignore_index)

    def count_valid(self, batch: Any) -> int | None:
        """Valid targets of a batch as it comes from the loader; None where the batch does not show them.

        With ``shift_labels=False`` the module is taken to shift by one; `TokenReduction.check_window` finds out.

        Args:
            batch: in host memory, labels not yet shifted unless the config says so.
        """
        if self.count_hook is not None:
            return int(self.count_hook(batch))
        found = self._with_sequence(batch)
        return sum(self._count(one.labels) for one in found) if found else None

    def _count(self, labels: Tensor) -> int:
        if not (self.config.labels_shifted or getattr(labels, "labels_shifted", False)):
            dim = self.config.sequence_dim
            labels = labels.narrow(dim, 1, labels.size(dim) - 1)  # the first label is nobody's target
        return int((labels != self.ignore_index).sum())

    def prepare(self, batch: Any) -> Any:
        """The batch with shifted labels that carry ``labels_shifted = True``; the given batch stays as it is.

        Args:
            batch: on the device, whole sequences.
        """
        prepared: list[Prepared] = []

        def change(found: Found) -> Tensor:
            prepared.append(self._prepare(found))
            return prepared[-1].targets

        if self.active and self.config.shift_labels:
            batch = replace_labels(batch, change)
        self.targets.begin(prepared)
        return batch

    def _prepare(self, found: Found) -> Prepared:
        labels = found.labels
        self._require_sequence(found)
        if self.config.labels_shifted:
            # an alias, so that the user's tensor gets no mark
            return Prepared(found, mark_shifted(labels.view(labels.shape)), shifted=False)
        shifted = not getattr(labels, "labels_shifted", False)
        return Prepared(found, shift_labels(labels, self.ignore_index, self.config.sequence_dim), shifted)

    def without_targets(self, batch: Any) -> Any:
        """A copy of the batch in which no label is valid; the batch itself where it shows no labels."""
        if not self.active:
            return batch

        def change(found: Found) -> Tensor:
            return torch.full_like(found.labels, self.ignore_index) if self._is_sequence(found.labels) else found.labels

        return replace_labels(batch, change)

    def check(self, batch: Any, stage: str) -> None:
        """Compare the labels with the inputs beside them: a wrong setting must not train unnoticed.

        Raises:
            ValueError: the labels are shifted and the config says they are not, or the other way round.
        """
        if self.active:
            for found in self._with_sequence(batch):
                self._check(found, stage)

    def _check(self, found: Found, stage: str) -> None:
        labels, inputs, dim = found.labels, found.inputs, self.config.sequence_dim
        if getattr(labels, "labels_shifted", False):
            return
        if not isinstance(inputs, Tensor) or inputs.shape != labels.shape or labels.size(dim) < 2:
            return
        length = labels.size(dim) - 1
        same = self._agree(labels, inputs)
        following = self._agree(labels.narrow(dim, 0, length), inputs.narrow(dim, 1, length))
        if same == following:  # neither, or both: one token repeated, or nothing valid
            return
        if following and not self.config.labels_shifted and self.config.shift_labels:
            raise ValueError(
                f"The first {stage} batch holds labels that are shifted already ({found.path}[:, i] is the token after"
                " input_ids[:, i]), and BatchConfig(labels_shifted=False) shifts them once more: the model would learn"
                " to predict the token after the next. Set BatchConfig(labels_shifted=True), or give unshifted labels."
            )
        if same and self.config.labels_shifted:
            raise ValueError(
                f"The first {stage} batch holds labels ({found.path}) equal to input_ids, and"
                " BatchConfig(labels_shifted=True) says that they are shifted already: the model would learn to repeat"
                " its input. Set BatchConfig(labels_shifted=False), or shift the labels by one."
            )

    def check_targets(self, targets: Tensor) -> bool:
        """As `TargetCheck.check`."""
        return self.targets.check(targets)

    def _agree(self, labels: Tensor, tokens: Tensor) -> bool:
        return bool(((labels == tokens) | (labels == self.ignore_index)).all())

    def _with_sequence(self, batch: Any) -> list[Found]:
        """The labels that hold a token for each position. Others are an error unless they are left alone."""
        found = find_labels(batch)
        if self.config.shift_labels:
            for one in found:
                self._require_sequence(one)
        return [one for one in found if self._is_sequence(one.labels)]

    def _is_sequence(self, labels: Tensor) -> bool:
        return labels.ndim > self.config.sequence_dim and not (labels.is_floating_point() or labels.dtype == torch.bool)

    def _require_sequence(self, found: Found) -> None:
        labels, dim = found.labels, self.config.sequence_dim
        if self._is_sequence(labels):
            return
        what = f"have no dimension {dim}" if labels.ndim <= dim else f"are {labels.dtype}, no token ids"
        raise ValueError(
            f"Labels of shape {list(labels.shape)} {what}: the module holds a CausalLMHead, so {found.path} is to be"
            f" shifted by one along the sequence, dimension {dim} as BatchConfig(sequence_dim={dim}) says. Give labels"
            " [B, S] of whole numbers, or set sequence_dim; where labels are something else, as the classes of"
            " sequences, set BatchConfig(shift_labels=False), which leaves all labels as they are, and shift those of"
            " the language model with `shift_labels` of lightning_longmoe.models."
        )
