"""Activation checkpointing of decoder blocks: keep a block's input, run the block again in the backward.

Non-reentrant. The block's ``forward`` is replaced on the instance, inside FSDP2's hooks and without a wrapper module:
parameter names stay as they are and a recomputation does not gather the block's parameters a second time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_longmoe.runtime.replay import checkpoint_contexts

_MARK = "_longmoe_plain_forward"


def recompute_block(block: nn.Module) -> None:
    """Make ``block`` recompute its activations in the backward. Does nothing the second time."""
    if not hasattr(block, _MARK):
        plain = block.forward
        setattr(block, _MARK, plain)
        block.forward = functools.wraps(plain)(functools.partial(_forward, plain))


def restore_block(block: nn.Module) -> None:
    """Give ``block`` its own forward back."""
    if hasattr(block, _MARK):
        del block.forward
        delattr(block, _MARK)


def _forward(plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return plain(*args, **kwargs)
    return checkpoint(plain, *args, use_reentrant=False, context_fn=checkpoint_contexts, **kwargs)
