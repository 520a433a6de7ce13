"""Labels to targets: shifted by one, once."""

from __future__ import annotations

import torch
from torch import Tensor


def shift_labels(labels: Tensor, ignore_index: int = -100, dim: int = 1) -> Tensor:
    """``targets[i] = labels[i + 1]``, and ``ignore_index`` at the last position.

    Args:
        labels: [B, S] int64 (any shape with a sequence along ``dim``); ``labels[i]`` is the token at position i.

    Returns:
        a tensor of the same shape and dtype that carries ``labels_shifted = True``. Given a tensor that carries it,
        that same tensor: whoever shifts first (a strategy before it splits a sequence, or the module), it happens once.
    """
    if getattr(labels, "labels_shifted", False):
        labels.shift_asked_for = True  # type: ignore[attr-defined]
        return labels
    targets = torch.roll(labels, -1, dims=dim)
    targets.select(dim, -1).fill_(ignore_index)
    return mark_shifted(targets)


def mark_shifted(targets: Tensor) -> Tensor:
    """Mark a tensor as targets already (copies and slices of it carry no mark: mark them again)."""
    targets.labels_shifted = True  # type: ignore[attr-defined]
    return targets


def was_asked_for(targets: Tensor) -> bool:
    """Whether somebody called `shift_labels` with these targets after they were shifted, and so knows of the shift."""
    return getattr(targets, "shift_asked_for", False)
