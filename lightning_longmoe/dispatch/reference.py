"""The dense reference of every dispatch: one process, all experts over all tokens, no sorting and no communication."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from lightning_longmoe.config import ExpertLayout
from lightning_longmoe.kernels.expert_mlp import expert_activation


def reference_dispatch(
    x: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    *,
    layout: ExpertLayout = ExpertLayout(),
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> Tensor:
    """y[n] = sum over k of expert_weights[n, k] · mlp of expert expert_ids[n, k] of x[n].

    Args:
        x: [N, H], all tokens of all ranks joined.
        expert_ids: [N, K] int64; an id may repeat in a row.
        expert_weights: [N, K].
        gate_up_proj: [E, 2F, H], all experts, laid out as ``layout`` says.
        down_proj: [E, H, F].
        gate_up_bias: [E, 2F] or None.
        down_bias: [E, H] or None.

    Returns:
        [N, H] in the dtype of x.
    """
    y = x.new_zeros(x.shape)
    for expert in range(gate_up_proj.size(0)):
        first, second = gate_up_proj[expert], down_proj[expert]
        if layout.transposed:
            first, second = first.t(), second.t()
        first_bias = None if gate_up_bias is None else gate_up_bias[expert]
        second_bias = None if down_bias is None else down_bias[expert]
        out = F.linear(expert_activation(F.linear(x, first, first_bias), layout), second, second_bias)
        share = (expert_weights * (expert_ids == expert)).sum(dim=-1, keepdim=True)
        y = y + share.to(x.dtype) * out
    return y
