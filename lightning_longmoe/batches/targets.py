"""`TargetCheck`: what a step does with its labels, so that no loss is taken of targets shifted twice or not at all.

Glossary. *prepared*: labels that the strategy made targets of. *look-up*: the token ids that an embedding was given in
this step, and so what the model really sees. *taken*: a head got targets, or the module asked for `shift_labels`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_longmoe.batches.structure import Found
from lightning_longmoe.models.shift import shift_labels, was_asked_for

MOST_LOOK_UPS = 8
THREE_WAYS = (
    "Either (1) give them to the head, `head(hidden, batch['labels'])`, or (2) take `shift_labels(batch['labels'])` of"
    " lightning_longmoe.models, which shifts once with and without the strategy, together with the logits of all"
    " positions, or (3) set BatchConfig(shift_labels=False): the labels arrive as the dataloader gave them."
)


@dataclass(frozen=True)
class Prepared:
    """Labels that the strategy made targets of.

    Attributes:
        found: the labels as they came.
        targets: what the module gets in their place.
        shifted: whether the strategy shifted them; else they came as targets.
    """

    found: Found
    targets: Tensor
    shifted: bool


class TargetCheck:
    """Looks at one batch after the other.

    Args:
        sequence_dim: along which targets are shifted.
        ignore_index: the label that is no target.
    """

    def __init__(self, sequence_dim: int, ignore_index: int) -> None:
        self.sequence_dim = sequence_dim
        self.ignore_index = ignore_index
        self.prepared: list[Prepared] = []
        self._look_ups: deque[Tensor] = deque(maxlen=MOST_LOOK_UPS)
        self._got_targets = self._gave_logits = False

    def begin(self, prepared: list[Prepared]) -> None:
        """A batch was prepared; with an empty list also: nothing is known of a batch."""
        self.prepared = prepared
        self._look_ups.clear()
        self._got_targets = self._gave_logits = False

    def note_look_up(self, ids: Any) -> None:
        """An embedding of the vocabulary was given ``ids``."""
        if isinstance(ids, Tensor) and not ids.is_floating_point():
            self._look_ups.append(ids)

    def note_call(self, targets: Tensor | None) -> None:
        """A head was called, for a loss or for logits."""
        self._got_targets |= targets is not None
        self._gave_logits |= targets is None

    def require_taken(self, step: str, only_with_logits: bool) -> None:
        """After a step: whoever takes a loss of shifted labels must know that they are.

        Args:
            step: which one, in words.
            only_with_logits: let a step pass that did not call the head.

        Raises:
            ValueError: the strategy shifted labels, no head got targets, and nobody asked for `shift_labels`.
        """
        shifted = [one for one in self.prepared if one.shifted]
        if not shifted or self._got_targets or any(was_asked_for(one.targets) for one in shifted):
            return
        if only_with_logits and not self._gave_logits:
            return
        raise ValueError(
            f"LongMoEStrategy shifted {shifted[0].found.path} by one, because the module holds a CausalLMHead, and"
            f" {step} gave no head any targets. If it compares logits with labels that it shifts itself, they are"
            f" shifted twice: the token after the next. {THREE_WAYS}"
        )

    # --------------------------------------------------------------------------------------------------- comparisons
    def check(self, targets: Tensor) -> bool:
        """Compare what a head got as targets with the prepared labels and with what the embedding looked up.

        Returns:
            whether the values told anything. Not where no target is valid, or all tokens are alike.

        Raises:
            ValueError: targets were shifted twice, or not at all.
        """
        ours = next((one for one in self.prepared if one.targets is targets), None)
        if ours is None and getattr(targets, "labels_shifted", False):
            return True  # the module's own word
        if ours is None:
            self._refuse_second_shift(targets)
        return self._compare_with_look_ups(targets, ours is not None and ours.shifted)

    def _refuse_second_shift(self, targets: Tensor) -> None:
        if any(self._is_prepared(targets, one.targets) for one in self.prepared):
            return
        for one in self.prepared:
            dim, prepared = self.sequence_dim, one.targets
            again = shift_labels(prepared.view(prepared.shape), self.ignore_index, dim)
            if self._agree(targets, again) or self._agree(targets, prepared.narrow(dim, 1, prepared.size(dim) - 1)):
                raise ValueError(
                    "The module shifts labels that were shifted before, so that it would learn to predict the token"
                    f" after the next. Under LongMoEStrategy {one.found.path} already holds the next tokens. Pass them"
                    " to CausalLMHead as they are, with the hidden states of all positions, or use"
                    " `shift_labels(batch['labels'])`, which shifts once with and without the strategy, or set"
                    " BatchConfig(shift_labels=False)."
                )
            if isinstance(one.found.inputs, Tensor) and self._agree(targets, one.found.inputs):
                raise ValueError(self._copies("input_ids"))

    def _is_prepared(self, targets: Tensor, prepared: Tensor) -> bool:
        shorter = prepared.narrow(self.sequence_dim, 0, prepared.size(self.sequence_dim) - 1)
        return self._agree(targets, prepared) or self._agree(targets, shorter)

    def _agree(self, targets: Tensor, others: Tensor) -> bool:
        if targets.numel() != others.numel():
            return False
        return bool(self._alike(targets.flatten(), others.flatten()))

    def _alike(self, a: Tensor, b: Tensor) -> Tensor:
        return ((a == b) | (a == self.ignore_index) | (b == self.ignore_index)).all()

    def _compare_with_look_ups(self, targets: Tensor, shifted: bool) -> bool:
        """``shifted``: the strategy shifted these targets itself."""
        seen = [self._relation(targets, ids) for ids in self._look_ups if ids.numel() == targets.numel()]
        told = [relation for relation in seen if relation is not None]
        if not told or "next" in told:
            return bool(told)
        if "same" in told:
            raise ValueError(self._copies("the very tokens that it looks up in its embedding"))
        if "after" in told and shifted:
            raise ValueError(
                "The labels that the dataloader gives are shifted already (they follow the tokens that the embedding"
                " looks up), and BatchConfig(labels_shifted=False) shifted them once more: the model would learn to"
                " predict the token after the next. Set BatchConfig(labels_shifted=True), or give unshifted labels."
            )
        return True

    def _relation(self, targets: Tensor, ids: Tensor) -> str | None:
        """What the targets are to the ids: their "next" tokens, the "same", those "after" the next, or "other"; None
        where that cannot be told."""
        dim = min(self.sequence_dim, ids.ndim - 1)
        length = ids.size(dim) if ids.ndim else 0
        if length < 3:
            return None
        targets = targets.reshape(ids.shape)
        heads = [targets.narrow(dim, 0, length - by) for by in range(3)]
        alike = [self._alike(head, ids.narrow(dim, by, length - by)) for by, head in enumerate(heads)]
        valid = (heads[2] != self.ignore_index).any()
        any_valid, same, following, after = torch.stack([valid, *alike]).tolist()
        if not any_valid or same + following + after > 1:
            return None
        return "same" if same else "next" if following else "after" if after else "other"

    def _copies(self, what: str) -> str:
        return (
            f"The module passes {what} to CausalLMHead as targets: it would learn to repeat its input. LongMoEStrategy"
            " shifts the tensors that are called `labels`, in mappings, sequences, named tuples, dataclasses and"
            f" objects, unless BatchConfig says otherwise; here it shifted {[p.found.path for p in self.prepared]}."
            " Pass `shift_labels(labels)` of lightning_longmoe.models, the token that follows each position. Targets"
            " that are meant to be so (a denoiser's) are given as `mark_shifted(targets)`."
        )
