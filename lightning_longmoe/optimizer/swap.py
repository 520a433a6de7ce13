"""A user's AdamW becomes an `OffloadStreamAdamW`, and stays the same object.

Schedulers, callbacks, ``trainer.optimizers`` and Lightning's wrappers hold references to the optimizer that
``configure_optimizers`` returned, and its ``param_groups`` are what they act on. So the object changes its class, in
place; what others hold stays true.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.optim import AdamW, Optimizer

from lightning_longmoe._compat import local_tensor
from lightning_longmoe.config import OptimizerOffload
from lightning_longmoe.optimizer.store import host_bytes
from lightning_longmoe.optimizer.streamed import OffloadStreamAdamW, fair_threads

GIB = 2**30
Setting = OptimizerOffload | Literal["auto"] | None


def unwrap(optimizer: Optimizer | LightningOptimizer) -> Optimizer:
    """The optimizer itself, where Lightning handed out its wrapper."""
    return optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer


def streamed(optimizer: Optimizer | LightningOptimizer) -> OffloadStreamAdamW | None:
    """The optimizer as one of ours; None where it is another."""
    inner = unwrap(optimizer)
    return inner if isinstance(inner, OffloadStreamAdamW) else None


def offload_optimizers(
    optimizers: Sequence[Optimizer], setting: Setting, device: torch.device, limit_bytes: int
) -> tuple[str, int, list[str]]:
    """Turn every AdamW into a streamed one where ``setting`` wants it.

    Args:
        optimizers: over live parameters; changed in place.
        setting: the strategy's ``optimizer_state``. "auto": on CUDA, where 16 bytes for each trained element of this
            rank are more than half of the device's memory.
        device: of the parameters.
        limit_bytes: host memory that this rank may fill.

    Returns:
        what the setting came to ("OffloadStreamAdamW" or "plain"), host bytes taken, and lines for the user.

    Raises:
        ValueError: an explicit setting and no AdamW that it could apply to, or too little host memory.
    """
    inner = [unwrap(optimizer) for optimizer in optimizers]
    ours = [optimizer for optimizer in inner if isinstance(optimizer, OffloadStreamAdamW)]
    taken = sum(optimizer.host_bytes for optimizer in ours)
    if setting is None or (setting == "auto" and not _state_is_large(inner, device)):
        return ("OffloadStreamAdamW" if ours else "plain"), taken, []
    config = OptimizerOffload() if setting == "auto" else setting
    refusals = {id(optimizer): why_not(optimizer) for optimizer in inner}
    chosen = [o for o in inner if refusals[id(o)] is None and o not in ours]
    if not chosen and not ours and isinstance(setting, OptimizerOffload):
        reasons = "; ".join(f"{type(o).__name__}: {refusals[id(o)]}" for o in inner) or "there is no optimizer"
        raise ValueError(
            f"optimizer_state=OptimizerOffload(...) cannot apply ({reasons}). Use torch.optim.AdamW, or"
            " optimizer_state='auto' or None."
        )
    needed = sum(_host_bytes(optimizer, config) for optimizer in chosen)
    if needed + taken > limit_bytes:
        raise ValueError(
            f"The optimizer's state needs {(needed + taken) / GIB:.2f} GiB of host memory on this rank, and host_memory"
            f" leaves it {limit_bytes / GIB:.2f} GiB. Raise host_memory, use more ranks, set"
            " OptimizerOffload(moments='bf16'), or optimizer_state=None."
        )
    for optimizer in chosen:
        take_over(optimizer, config)
    lines = [f"{type(o).__name__} stays as it is: {refusals[id(o)]}." for o in inner if refusals[id(o)] is not None]
    if chosen:
        where = f"{needed / GIB:.2f} GiB of optimizer state in host memory"
        threads = f" (a step takes {fair_threads()} threads)" if device.type == "cpu" else ""
        lines.insert(0, f"{where}: AdamW became OffloadStreamAdamW{threads}.")
    return ("OffloadStreamAdamW" if chosen or ours else "plain"), needed + taken, lines


def _trained(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]


def _state_is_large(optimizers: Sequence[Optimizer], device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    elements = sum(local_tensor(p).numel() for optimizer in optimizers for p in _trained(optimizer))
    return 16 * elements > torch.cuda.get_device_properties(device).total_memory / 2


def _host_bytes(optimizer: Optimizer, config: OptimizerOffload) -> int:
    moments = torch.bfloat16 if config.moments == "bf16" else None
    return sum(host_bytes(parameter, moments) for parameter in _trained(optimizer))


def why_not(optimizer: Optimizer) -> str | None:
    """Why an optimizer cannot be streamed; None where it can."""
    if isinstance(optimizer, OffloadStreamAdamW):
        return None
    if type(optimizer) is not AdamW:
        return "only torch.optim.AdamW itself is streamed"
    for name in ("amsgrad", "capturable", "differentiable"):
        if any(group.get(name) for group in optimizer.param_groups):
            return f"{name}=True is not streamed"
    step = optimizer.__dict__.get("step")
    if step is not None and not hasattr(step, "_wrapped_by_lr_sched"):
        return "its step was replaced"
    return None


def take_over(optimizer: Optimizer, config: OptimizerOffload) -> None:
    """Make an AdamW an `OffloadStreamAdamW`, with its groups, its hooks and the state that it has.

    Raises:
        ValueError: it cannot be; see `why_not`.
    """
    refusal = why_not(optimizer)
    if refusal is not None:
        raise ValueError(f"{type(optimizer).__name__} cannot be streamed: {refusal}.")
    state: dict[Tensor, dict[str, Any]] = optimizer.__dict__.pop("state")
    scheduled = optimizer.__dict__.pop("step", None)
    optimizer.__class__ = OffloadStreamAdamW
    assert isinstance(optimizer, OffloadStreamAdamW)
    progress = _progress(_host_bytes(optimizer, config))
    optimizer._set_up(config.bucket_numel, config.slots, config.moments, None, progress)
    optimizer._patch_step_function()  # profiler ranges and step hooks, as torch's constructor sets them up
    for parameter, values in state.items():
        optimizer.state[parameter] = values
    if scheduled is not None:
        _wrap_for_scheduler(optimizer)


def _wrap_for_scheduler(optimizer: OffloadStreamAdamW) -> None:
    """A scheduler had wrapped the old class's step, to warn where it is called before the optimizer is."""
    plain = optimizer.step

    @functools.wraps(plain)
    def step(*args: Any, **kwargs: Any) -> Any:
        optimizer._opt_called = True  # type: ignore[attr-defined]
        return plain(*args, **kwargs)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = step  # type: ignore[method-assign]


def _progress(total: int) -> Callable[[int, int], None]:
    """Lines on rank 0 while much memory is page-locked, which takes minutes: one for each tenth."""
    shown = 0

    def show(done: int, _: int) -> None:
        nonlocal shown
        tenth = done * 10 // max(1, total)
        if total >= 8 * GIB and tenth > shown:
            shown = tenth
            rank_zero_info(f"Page-locking host memory for the optimizer: {done / GIB:.0f} of {total / GIB:.0f} GiB.")

    return show
