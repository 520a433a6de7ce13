"""A stack of experts: the parameters, and the call of whatever brings tokens to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_longmoe.config import ExpertLayout
from lightning_longmoe.dispatch.plain import PlainDispatch
from lightning_longmoe.runtime.owned import owned_part

_PARAMETERS = ("gate_up_proj", "down_proj", "gate_up_bias", "down_bias")


class Experts(nn.Module):
    """E gated (or plain) MLPs, all of one shape.

    Parameters: ``gate_up_proj [E, 2F, H]`` = [gate; up], ``down_proj [E, H, F]``; with ``bias`` ``gate_up_bias
    [E, 2F]`` and ``down_bias [E, H]``, else None. An ungated layout has F where 2F stands; a transposed one swaps the
    last two dimensions of the projections.

    Attributes:
        dispatch: brings tokens to the experts' home ranks; the strategy sets it. Called as
            ``dispatch(x, expert_ids, expert_weights, gate_up_proj, down_proj, *, layout, gate_up_bias, down_bias)``
            with the experts that live on this rank. None: all of them live here.
        gradient_scale: what the experts' gradients are multiplied by; the strategy sets 1/Ep, since the Ep ranks that
            own an expert already sum over each other's tokens.

    Raises:
        ValueError: a size is below 1.
    """

    dispatch: Callable[..., Tensor] | None

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        ffn_size: int,
        layout: ExpertLayout = ExpertLayout(),
        bias: bool = False,
    ) -> None:
        super().__init__()
        for name, size in (("num_experts", num_experts), ("hidden_size", hidden_size), ("ffn_size", ffn_size)):
            if size < 1:
                raise ValueError(f"Experts({name}={size}) is not allowed: give a size of at least 1.")
        self.num_experts, self.hidden_size, self.ffn_size, self.layout = num_experts, hidden_size, ffn_size, layout
        self.dispatch = None
        self.gradient_scale = 1.0
        width = 2 * ffn_size if layout.gated else ffn_size
        first, second = (width, hidden_size), (hidden_size, ffn_size)
        if layout.transposed:
            first, second = first[::-1], second[::-1]
        self.gate_up_proj = nn.Parameter(torch.empty(num_experts, *first))
        self.down_proj = nn.Parameter(torch.empty(num_experts, *second))
        self.gate_up_bias = nn.Parameter(torch.empty(num_experts, width)) if bias else None
        self.down_bias = nn.Parameter(torch.empty(num_experts, hidden_size)) if bias else None
        self.reset_parameters()

    def extra_repr(self) -> str:
        return f"{self.num_experts} experts, hidden_size={self.hidden_size}, ffn_size={self.ffn_size}"

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Initialise every expert that this process holds, one after the other."""
        tensors = {name: _local(parameter) for name, parameter in self.named_parameters(recurse=False)}
        for index in range(tensors["gate_up_proj"].size(0)):
            self.reset_expert({name: tensor[index] for name, tensor in tensors.items()}, generator)

    @torch.no_grad()
    def reset_expert(self, weights: Mapping[str, Tensor], generator: torch.Generator | None = None) -> None:
        """Initialise one expert in place; its values depend on nothing but the generator.

        Args:
            weights: the expert's slice of some or all parameters, by parameter name: ``gate_up_proj [2F, H]``,
                ``down_proj [H, F]``, ... (without the expert dimension, laid out as the layout says).
            generator: a source of random numbers on the tensors' device. None: the global one.
        """
        for name, tensor in weights.items():
            if name not in _PARAMETERS:
                raise ValueError(f"Experts has no parameter {name!r}; it has {list(_PARAMETERS)}.")
            if name.endswith("bias"):
                tensor.zero_()
            else:
                inputs = tensor.size(0) if self.layout.transposed else tensor.size(1)
                tensor.normal_(std=inputs**-0.5, generator=generator)

    def forward(self, x: Tensor, expert_ids: Tensor, expert_weights: Tensor) -> Tensor:
        """The weighted sum of each token's experts.

        Args:
            x: [N, H], this rank's tokens; N may be 0.
            expert_ids: [N, K] int64 in [0, num_experts).
            expert_weights: [N, K] floating point, any dtype.

        Returns:
            [N, H] in the dtype of x.
        """
        dispatch = self.dispatch if self.dispatch is not None else PlainDispatch()
        return dispatch(
            x,
            expert_ids,
            expert_weights,
            self._weight("gate_up_proj", x.dtype),
            self._weight("down_proj", x.dtype),
            layout=self.layout,
            gate_up_bias=self._weight("gate_up_bias", x.dtype),
            down_bias=self._weight("down_bias", x.dtype),
        )

    def _weight(self, name: str, dtype: torch.dtype) -> Any:
        """This rank's part of a parameter in the dtype of the computation, scaled in the backward; None stays None."""
        parameter = getattr(self, name)
        if parameter is None:
            return None
        weight = owned_part(parameter, self.gradient_scale)
        # a parameter outside fully_shard keeps its own dtype under mixed precision
        return weight.to(dtype)


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
