"""Precision through FSDP2's mixed-precision policy, without autocast.

============  ==============  =============  =================================================================
precision     parameters      computation    remark
============  ==============  =============  =================================================================
32-true       as the module   as the module  a ``.double()`` module stays in float64
bf16-mixed    float32         bfloat16       gathered in bfloat16; no autocast, so float32 parts stay float32
bf16-true     bfloat16        bfloat16       buffers too, except those that a module keeps in float32
============  ==============  =============  =================================================================
"""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim import Optimizer
from typing_extensions import override

from lightning_longmoe.clipping import clip_coefficient, clip_grad_norm_, clip_grad_value_, total_norm
from lightning_longmoe.optimizer.swap import streamed

SUPPORTED = ("32-true", "bf16-mixed", "bf16-true")


def check_precision(precision: str) -> str:
    """Return ``precision`` in Lightning's long form.

    Raises:
        ValueError: it is not one of `SUPPORTED`.
    """
    aliases = {"32": "32-true", "bf16": "bf16-mixed", "16": "16-mixed", "64": "64-true"}
    name = aliases.get(str(precision), str(precision))
    if name not in SUPPORTED:
        hint = " Call `module.double()` and use precision='32-true' to compute in float64." if "64" in name else ""
        raise ValueError(
            f"Trainer(precision={precision!r}) is not supported by LongMoEStrategy. Choose one of"
            f" {list(SUPPORTED)}.{hint}"
        )
    return name


class LongMoEPrecision(Precision):
    """Converts the module, leaves the forward alone, and clips gradients over all meshes.

    Args:
        precision: one of `SUPPORTED`.
    """

    def __init__(self, precision: str) -> None:
        self.precision = check_precision(precision)  # type: ignore[assignment]
        self.last_grad_norm: Tensor | None = None
        self.skipped_steps = 0

    def policy(
        self, reduce_dtype: torch.dtype, parameter_dtype: torch.dtype, *, keep_dtype: bool, cast: bool
    ) -> MixedPrecisionPolicy:
        """The FSDP2 policy of one unit.

        Args:
            reduce_dtype: of the gradient reduction; float64 parameters are reduced in float64.
            parameter_dtype: of the unit's parameters.
            keep_dtype: compute in the parameters' own dtype (routers).
            cast: cast floating-point inputs of the unit's forward to the compute dtype.
        """
        if parameter_dtype == torch.float64:
            return MixedPrecisionPolicy(cast_forward_inputs=False)
        compute = torch.bfloat16 if self.precision == "bf16-mixed" and not keep_dtype else None
        return MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce_dtype, cast_forward_inputs=cast)

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        return module.to(torch.bfloat16) if self.precision == "bf16-true" else module

    @override
    def convert_input(self, data: Any) -> Any:
        """Cast floating-point inputs to the parameters' dtype where that is bfloat16."""
        if self.precision != "bf16-true":
            return data
        return apply_to_collection(data, Tensor, lambda t: t.bfloat16() if torch.is_floating_point(t) else t)

    @override
    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        ours = streamed(optimizer)
        if ours is None:
            clip_grad_value_(self.main_params(optimizer), clip_val)
        else:
            ours.scale_gradients(limit=float(clip_val))

    @override
    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Clip by the norm over all meshes. A norm that is not finite drops every gradient: no rank steps.

        The norm is the same number on every rank, so all ranks decide alike. A streamed optimizer fetches its first
        buckets meanwhile and scales gradients when it uses them.
        """
        parameters = list(self.main_params(optimizer))
        ours = streamed(optimizer)
        if ours is None:
            self.last_grad_norm = clip_grad_norm_(parameters, clip_val)
        else:
            ours.prefetch()
            self.last_grad_norm = total_norm(parameters)
            ours.scale_gradients(clip_coefficient(self.last_grad_norm, clip_val))
        if not bool(torch.isfinite(self.last_grad_norm)):
            self.skipped_steps += 1
            if ours is not None:
                ours.skipped_steps += 1
            rank_zero_warn(
                f"The gradient norm is {float(self.last_grad_norm)}: no rank updates its weights in this step"
                f" ({self.skipped_steps} skipped so far)."
            )
            for parameter in parameters:
                parameter.grad = None
