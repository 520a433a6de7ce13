"""Activation checkpointing of decoder blocks: keep a block's input, run the block again in the backward.

Non-reentrant. The block's ``forward`` (or each of its ``recompute_parts``) is replaced on the instance, inside FSDP2's
hooks and without a wrapper module: parameter names stay as they are and a recomputation does not gather the block's
parameters a second time. Where the input of each part waits is the business of the function that runs it: on the device
(`reference_checkpoint`), or in host memory (`BoundaryOffloader.checkpoint`).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Literal

from torch import nn

from lightning_longmoe.boundaries import BoundaryOffloader, reference_checkpoint
from lightning_longmoe.config import BoundaryOffload, RecomputeConfig

Checkpoint = Callable[..., Any]
"""(function, hidden, *args, **kwargs) -> what the function returns."""

_MARK = "_longmoe_plain_parts"


def recompute_block(
    block: nn.Module, parts: Sequence[str] = ("forward",), checkpoint: Checkpoint = reference_checkpoint
) -> None:
    """Make ``block`` recompute its activations in the backward. Does nothing the second time.

    Args:
        block: changed in place.
        parts: names of methods that take the hidden states first; each is recomputed by itself.
        checkpoint: runs one part.
    """
    if hasattr(block, _MARK):
        return
    setattr(block, _MARK, {name: block.__dict__.get(name) for name in parts})
    for name in parts:
        plain = getattr(block, name)
        setattr(block, name, functools.wraps(plain)(functools.partial(_run, checkpoint, plain)))


def restore_block(block: nn.Module) -> None:
    """Give ``block`` its own methods back."""
    for name, own in getattr(block, _MARK, {}).items():
        delattr(block, name)
        if own is not None:
            setattr(block, name, own)
    if hasattr(block, _MARK):
        delattr(block, _MARK)


def _run(checkpoint: Checkpoint, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not args and kwargs:  # hidden states given by keyword: a checkpoint knows its boundary by position
        first = next(iter(inspect.signature(plain).parameters))
        if first in kwargs:
            args, kwargs = (kwargs[first],), {name: value for name, value in kwargs.items() if name != first}
    return checkpoint(plain, *args, **kwargs)


def parts_of(block: nn.Module, boundaries_per_layer: int) -> tuple[str, ...]:
    """The methods of a block that are recomputed one by one.

    Raises:
        ValueError: two are wanted and the block does not name two.
    """
    if boundaries_per_layer == 1:
        return ("forward",)
    parts = tuple(getattr(block, "recompute_parts", ()))
    if len(parts) != boundaries_per_layer or not all(callable(getattr(block, name, None)) for name in parts):
        raise ValueError(
            f"RecomputeConfig(boundaries_per_layer={boundaries_per_layer}) cannot apply to {type(block).__name__},"
            f" whose recompute_parts is {parts}. Give the class `recompute_parts = (name, name)`: two methods that"
            " take the hidden states first and that its forward calls in turn; or use boundaries_per_layer=1."
        )
    return parts


def recompute_blocks(
    blocks: dict[str, nn.Module],
    config: RecomputeConfig,
    setting: BoundaryOffload | Literal["auto"] | None,
    device_type: str,
    limit_bytes: int | None,
) -> tuple[BoundaryOffloader | None, list[tuple[str, str]]]:
    """Make all blocks recompute, with boundaries where ``setting`` wants them.

    Args:
        blocks: by qualified name.
        config: whether and in how many parts.
        setting: the strategy's ``boundaries``.
        device_type: "cuda" or "cpu"; "auto" offloads from the former alone.
        limit_bytes: host memory that this rank's boundaries may fill.

    Returns:
        the offloader, if any, and (operator, remark) for the start-up table: "recompute", then "boundaries".

    Raises:
        ValueError: an explicit offload and nothing to apply it to, or a setting that does not fit a block.
    """
    active = config.enabled and bool(blocks)
    why_not = "RecomputeConfig.enabled=False" if not config.enabled else "no blocks found: set RecomputeConfig.blocks"
    if isinstance(setting, BoundaryOffload) and not active:
        raise ValueError(
            f"boundaries=BoundaryOffload(...) cannot apply, as nothing is recomputed ({why_not}). Use boundaries='auto'"
            " or None, or recompute blocks."
        )
    if not active:
        return None, [("recompute", f"off: {why_not}")]
    offloader, how = _choose_offload(setting, device_type, limit_bytes)
    for block in blocks.values():
        parts = parts_of(block, config.boundaries_per_layer)
        recompute_block(block, parts, reference_checkpoint if offloader is None else offloader.checkpoint)
    many = "one boundary" if config.boundaries_per_layer == 1 else f"{config.boundaries_per_layer} boundaries"
    count = len(blocks) * config.boundaries_per_layer
    return offloader, [
        ("recompute", f"non-reentrant, {many} each"),
        ("boundaries", f"{count} of tokens x H x bytes each, {how}"),
    ]


def _choose_offload(
    setting: BoundaryOffload | Literal["auto"] | None, device_type: str, limit_bytes: int | None
) -> tuple[BoundaryOffloader | None, str]:
    if setting is None:
        return None, "on the device (boundaries=None)"
    if setting == "auto" and device_type != "cuda":
        return None, f"on the device (auto: there is no other memory beside that of the {device_type})"
    config = BoundaryOffload() if setting == "auto" else setting
    why = "auto: on CUDA" if setting == "auto" else "as configured"
    budget = "all" if config.host_budget is None else f"up to {config.host_budget}"
    offloader = BoundaryOffloader(config, limit_bytes=limit_bytes)
    return offloader, f"BoundaryOffload ({why}): {budget} in host memory, the last {config.keep_last} stay"
