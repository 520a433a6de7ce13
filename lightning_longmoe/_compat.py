"""Every private name of torch and Lightning that the package touches, in one place.

Each has a test in ``tests/test_compat.py`` that fails when it moves.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import IterableDataset

if TYPE_CHECKING:
    import lightning.pytorch as pl


def inside_backward() -> bool:
    """Whether the current thread executes a backward pass (a recomputation does)."""
    return torch._C._current_graph_task_id() != -1


def set_group_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Give a process group a timeout; groups that a DeviceMesh makes take torch's default otherwise."""
    dist.distributed_c10d._set_pg_timeout(timeout, group)


def group_timeout(group: dist.ProcessGroup) -> timedelta:
    """The timeout of a process group's first backend."""
    backend = group._get_backend(torch.device("cuda" if "nccl" in dist.get_backend(group) else "cpu"))
    return backend.options._timeout


def lazily_initialize_root(module: nn.Module) -> None:
    """Make ``module`` the FSDP2 root now: otherwise the first submodule called on its own would become one."""
    module._get_fsdp_state()._lazy_init()  # type: ignore[operator]


def is_fsdp_module(module: nn.Module) -> bool:
    """Whether FSDP2's ``fully_shard`` was applied to this very module."""
    from torch.distributed.fsdp import FSDPModule

    return isinstance(module, FSDPModule)


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor, not a copy and outside autograd; a plain tensor as it is."""
    return getattr(tensor, "_local_tensor", tensor)


def full_tensors(state: dict[str, Any]) -> dict[str, Any]:
    """A state dict with every DTensor gathered to the CPU, one at a time. Collective: all ranks call it."""
    from torch.distributed.tensor import DTensor

    gathered = {}
    for name, value in state.items():
        value = value.full_tensor() if isinstance(value, DTensor) else value
        gathered[name] = value.detach().cpu() if isinstance(value, torch.Tensor) else value
    return gathered


def plain_class(module: nn.Module) -> type[nn.Module]:
    """The class of a module before ``fully_shard`` swapped in a subclass of (FSDPModule, that class)."""
    kind = type(module)
    return kind.__mro__[2] if is_fsdp_module(module) else kind


def default_store() -> dist.Store:
    """The key-value store of the default process group."""
    return dist.distributed_c10d._get_default_store()


def is_strided_shard(placement: Any) -> bool:
    """Whether a DTensor placement is the one that FSDP2 gives to a dimension that another mesh already shards."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return isinstance(placement, _StridedShard)


WRAPPER_NAMES = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
"""Modules that torch.compile, checkpoint wrappers and FSDP1 put around a module; they appear in parameter names."""


def unit_parameters(unit: nn.Module) -> list[tuple[Any, torch.dtype | None]]:
    """The sharded parameters that an FSDP2 unit gathers itself, and the dtype it gathers them in (None: their own)."""
    groups = unit._get_fsdp_state()._fsdp_param_groups  # type: ignore[operator]
    return [(param.sharded_param, group.mp_policy.param_dtype) for group in groups for param in group.fsdp_params]


def evaluation_loaders(trainer: pl.Trainer) -> tuple[list[Any], bool]:
    """The loaders of the evaluation that runs, and whether they come one after the other (else a step gets a batch of
    each)."""
    if trainer.testing:
        loop: Any = trainer.test_loop
    elif trainer.predicting:
        loop = trainer.predict_loop
    else:
        loop = trainer.fit_loop.epoch_loop.val_loop if trainer.state.fn == "fit" else trainer.validate_loop
    combined = loop._combined_loader
    return ([], True) if combined is None else (combined.flattened, combined._mode == "sequential")


def weigh_nothing(trainer: pl.Trainer) -> None:
    """Give what the current step logs the weight 0 in the mean over batches (unless it names a batch size)."""
    if trainer._results is not None:
        trainer._results.batch_size = 0


def predictions(trainer: pl.Trainer) -> list[list[Any]]:
    """What ``trainer.predict`` has collected so far, for each loader; lists that may be changed."""
    return trainer.predict_loop._predictions


def restore_loaders_again(trainer: pl.Trainer) -> None:
    """Give training loaders with a state of their own the state that the checkpoint holds, if that has not happened."""
    trainer.fit_loop._load_combined_loader_states()


def fetch_again(trainer: pl.Trainer) -> None:
    """Let the training loop open its data anew, and forget what it has fetched."""
    if trainer.fit_loop._data_fetcher is not None:
        iter(trainer.fit_loop._data_fetcher)


def move_batch_index(trainer: pl.Trainer, by: int) -> None:
    """Let the interrupted epoch continue ``by`` batches later than it would."""
    progress: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    for name in ("ready", "started", "processed", "completed"):
        setattr(progress, name, getattr(progress, name) + by)


def skip_batch(source: Iterator[Any]) -> None:
    """Leave out one batch of a loader's iterator, without loading it where that changes nothing else."""
    in_process = getattr(source, "_num_workers", None) == 0
    if in_process and not isinstance(source._dataset, IterableDataset):  # type: ignore[attr-defined]
        next_indices(source)
    else:
        next(source)


def next_indices(source: Any) -> Any:
    """Take the indices of the next batch off an iterator of a DataLoader over a map-style dataset."""
    return source._next_index()


def is_placeholder(optimizer: Any) -> bool:
    """Whether this is what Lightning uses when ``configure_optimizers`` returns None."""
    from lightning.pytorch.core.optimizer import _MockOptimizer

    return isinstance(optimizer, _MockOptimizer)


def requested_checkpoint() -> Any:
    """``ckpt_path`` as given to the running ``Trainer.fit``, which itself forgets a "last" that it did not find.

    None in processes that a notebook launcher started: no ``fit`` of theirs is running.
    """
    frame = inspect.currentframe()
    while frame is not None and (frame.f_code.co_name != "fit" or "ckpt_path" not in frame.f_locals):
        frame = frame.f_back
    return None if frame is None else frame.f_locals["ckpt_path"]


def reshaped(tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """``tensor`` in another shape, on the same memory and yet no view of it for autograd: nobody else may hold it."""
    return torch.ops.aten._unsafe_view.default(tensor, list(shape))


@functools.cache
def let_anomaly_detection_see_dtensors() -> None:
    """Teach DTensor the one operation of ``torch.autograd.set_detect_anomaly`` that it lacks: is any element true?"""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.experimental import register_sharding

    @register_sharding(torch.ops.aten._is_any_true.default)
    def _(x: Any) -> list[Any]:
        return [([Replicate()], [Replicate()])]


def fused_adamw(
    weights: list[torch.Tensor],
    gradients: list[torch.Tensor],
    exp_avgs: list[torch.Tensor],
    exp_avg_sqs: list[torch.Tensor],
    steps: list[torch.Tensor],
    *,
    lr: float | torch.Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    maximize: bool,
) -> None:
    """torch's fused AdamW kernel on lists of tensors of one device; ``steps`` are those of this step, not the last."""
    device = weights[0].device
    if isinstance(lr, torch.Tensor) and lr.device != device:
        lr = lr.to(device, non_blocking=True) if device.type != "cpu" else float(lr)
    torch._fused_adamw_(
        weights,
        gradients,
        exp_avgs,
        exp_avg_sqs,
        [],
        steps,
        amsgrad=False,
        lr=lr,
        beta1=float(betas[0]),
        beta2=float(betas[1]),
        weight_decay=weight_decay,
        eps=eps,
        maximize=maximize,
    )


def dtensor_on_host(part: torch.Tensor, parameter: Any) -> torch.Tensor:
    """``part``, in host memory and in its own dtype, as a DTensor laid out like ``parameter``; nothing is copied.

    ``DTensor.from_local`` would move it to the mesh's device.
    """
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    meta = TensorMeta(parameter.shape, parameter.stride(), part.dtype)
    spec = DTensorSpec(parameter.device_mesh, parameter.placements, tensor_meta=meta)
    return DTensor(part, spec, requires_grad=False)


def flash_attention_fits(query: torch.Tensor) -> bool:
    """Whether torch's flash kernels take tensors of this device and dtype."""
    if query.device.type == "cpu":
        return query.dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    half = query.dtype in (torch.float16, torch.bfloat16)
    return query.is_cuda and half and query.size(-1) <= 256 and torch.cuda.get_device_capability(query.device) >= (8, 0)


def flash_attention_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention [B, H, Q, D] of equal heads and sizes, and its log-sum-exp [B, H, Q]."""
    if query.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal, scale=scale)
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, scale=scale)
    return out, lse


def flash_attention_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key and value, given the output and the log-sum-exp over these keys or over more."""
    if query.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, query, key, value, out, lse, 0.0, causal, scale=scale
        )
    unused = torch.zeros((), dtype=torch.int64, device=query.device)  # dropout's random state, and there is none
    return torch.ops.aten._scaled_dot_product_flash_attention_backward(
        grad, query, key, value, out, lse, None, None, query.size(2), key.size(2), 0.0, causal, unused, unused,
        scale=scale,
    )  # fmt: skip
