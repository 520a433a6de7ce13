"""What the Trainer's loops must know of sharding: evaluation without inference mode, values reduced over ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    import lightning.pytorch as pl

_OPERATIONS = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}


def evaluate_without_inference_mode(trainer: pl.Trainer) -> None:
    """Let validate, test and predict run under ``no_grad``.

    ``Trainer(inference_mode=True)`` is the default. Buffers that FSDP2 gathers under it are inference tensors, and a
    later training step that reuses them fails. Lightning itself makes this exception for gloo and for FSDP1 only.
    """
    for loop in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop, trainer.fit_loop.epoch_loop.val_loop):
        loop.inference_mode = False


def reduce_tensor(tensor: Any, group: dist.ProcessGroup | None, operation: Any, device: torch.device) -> Any:
    """Reduce ``tensor`` over ``group`` (None: the world) and return it on its own device, in its own dtype.

    Args:
        tensor: same shape on all ranks; anything else than a tensor comes back as it is.
        group: process group.
        operation: "mean", "avg", "sum", "max", "min", "product" in any case, a ``ReduceOp``, or None for "sum".
        device: where the process group can reduce.

    Returns:
        A new tensor; a mean of whole numbers is floating point.
    """
    if not isinstance(tensor, Tensor) or not dist.is_initialized():
        return tensor
    name = operation.lower() if isinstance(operation, str) else operation
    mean = name in ("mean", "avg") or name == dist.ReduceOp.AVG
    if isinstance(name, str) and not mean:
        if name not in _OPERATIONS:
            raise ValueError(f"reduce_op={operation!r} is not allowed. Choose one of {['mean', *_OPERATIONS]}.")
        name = _OPERATIONS[name]
    value = tensor.detach().clone().to(device)
    if mean and not value.is_floating_point():
        value = value.to(torch.float32)
    dist.all_reduce(value, op=dist.ReduceOp.SUM if mean or name is None else name, group=group)
    if mean:
        value = value / dist.get_world_size(group)
    return value.to(tensor.device)
