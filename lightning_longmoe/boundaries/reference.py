"""The plain reference of `BoundaryOffloader.checkpoint`: every boundary stays on the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightning_longmoe.runtime.replay import checkpoint_contexts


def reference_checkpoint(function: Callable[..., Any], hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
    """``function(hidden, *args, **kwargs)``, of which the backward keeps the arguments and runs it again."""
    return checkpoint(function, hidden, *args, use_reentrant=False, context_fn=checkpoint_contexts, **kwargs)
