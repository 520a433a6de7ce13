"""The two products of a stack of experts over rows that are sorted by expert.

    h = rows · gate_up_projᵀ (+ bias)      a = activation(h)      out = a · down_projᵀ (+ bias)

Letters: R rows - E experts in this process - H hidden size - F expert FFN size - G = 2F where gated, else F.

`expert_mlp` uses torch's grouped matrix product where device, dtype and alignment allow it, and else the plain loop
over experts, which is also its reference. Every expert takes part whatever its row count: an idle one gets a gradient
of zeros, never None.
"""

from __future__ import annotations

from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_longmoe.config import ExpertLayout

_GPT_OSS_SLOPE = 1.702
_GROUPED_ALIGNMENT_BYTES = 16


def expert_activation(gate_up: Tensor, layout: ExpertLayout) -> Tensor:
    """What is computed between the two products.

    Args:
        gate_up: [..., G] result of the first product, bias included.

    Returns:
        [..., F] in the same dtype.
    """
    if not layout.gated:
        gate = gate_up if layout.clamp is None else gate_up.clamp(max=layout.clamp)
        return _nonlinearity(gate, layout)
    if layout.interleaved:
        gate, up = gate_up[..., ::2], gate_up[..., 1::2]
    else:
        gate, up = gate_up.chunk(2, dim=-1)
    if layout.clamp is not None:
        gate, up = gate.clamp(max=layout.clamp), up.clamp(-layout.clamp, layout.clamp)
    if layout.activation == "gpt_oss":
        return gate * torch.sigmoid(_GPT_OSS_SLOPE * gate) * (up + 1)
    return _nonlinearity(gate, layout) * up


def _nonlinearity(gate: Tensor, layout: ExpertLayout) -> Tensor:
    if layout.activation == "silu":
        return F.silu(gate)
    if layout.activation == "gelu":
        return F.gelu(gate)
    assert layout.activation == "identity", layout.activation
    return gate


def expert_mlp(
    rows: Tensor,
    counts: list[int],
    gate_up_proj: Tensor,
    down_proj: Tensor,
    *,
    layout: ExpertLayout,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> Tensor:
    """Apply each expert to its rows.

    Args:
        rows: [R, H], this process's, those of expert 0 first, then of expert 1, ...
        counts: rows of each of the E experts; they sum to R.
        gate_up_proj: [E, G, H] ([E, H, G] where the layout is transposed), dtype of ``rows``.
        down_proj: [E, H, F] ([E, F, H] where transposed), dtype of ``rows``.
        gate_up_bias: [E, G] or None.
        down_bias: [E, H] or None.

    Returns:
        [R, H], in the order of ``rows``.
    """
    assert len(counts) == gate_up_proj.size(0), (len(counts), gate_up_proj.shape)
    assert sum(counts) == rows.size(0), (counts, rows.shape)
    mlp = _grouped_expert_mlp if _can_group(rows, gate_up_proj, down_proj) else loop_expert_mlp
    return mlp(rows, counts, gate_up_proj, down_proj, layout=layout, gate_up_bias=gate_up_bias, down_bias=down_bias)


def loop_expert_mlp(
    rows: Tensor,
    counts: list[int],
    gate_up_proj: Tensor,
    down_proj: Tensor,
    *,
    layout: ExpertLayout,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> Tensor:
    """`expert_mlp` as a loop over experts: every device and dtype; the reference."""
    # unbind, not [e]: its backward stacks the experts' gradients once, where each [e] would fill a whole [E, G, H]
    first, second = gate_up_proj.unbind(0), down_proj.unbind(0)
    first_bias = [None] * len(counts) if gate_up_bias is None else gate_up_bias.unbind(0)
    second_bias = [None] * len(counts) if down_bias is None else down_bias.unbind(0)
    outputs = []
    for expert, part in enumerate(rows.split(counts)):  # idle experts too: an empty product gives zero gradients
        gate_up = _linear(part, first[expert], first_bias[expert], layout.transposed)
        act = expert_activation(gate_up, layout)
        outputs.append(_linear(act, second[expert], second_bias[expert], layout.transposed))
    return torch.cat(outputs)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    return F.linear(x, weight.t() if transposed else weight, bias)


def _can_group(rows: Tensor, gate_up_proj: Tensor, down_proj: Tensor) -> bool:
    """torch's grouped product: bf16 on CUDA from compute capability 8.0, all strides multiples of 16 bytes."""
    if not rows.is_cuda or rows.size(0) == 0 or any(t.dtype != torch.bfloat16 for t in (rows, gate_up_proj, down_proj)):
        return False
    if torch.cuda.get_device_capability(rows.device) < (8, 0):
        return False
    lengths = (rows.size(-1), *gate_up_proj.shape[1:], *down_proj.shape[1:])
    return all(length * rows.element_size() % _GROUPED_ALIGNMENT_BYTES == 0 for length in lengths)


def _grouped_expert_mlp(
    rows: Tensor,
    counts: list[int],
    gate_up_proj: Tensor,
    down_proj: Tensor,
    *,
    layout: ExpertLayout,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> Tensor:
    ends = torch.tensor(list(accumulate(counts)), dtype=torch.int32).to(rows.device, non_blocking=True)
    gate_up = _GroupedProduct.apply(rows.contiguous(), _as_input_by_output(gate_up_proj, layout), ends)
    gate_up = _add_bias(gate_up, gate_up_bias, counts)
    act = expert_activation(gate_up, layout)
    out = _GroupedProduct.apply(act.contiguous(), _as_input_by_output(down_proj, layout), ends)
    return _add_bias(out, down_bias, counts)


def _as_input_by_output(weight: Tensor, layout: ExpertLayout) -> Tensor:
    return weight if layout.transposed else weight.transpose(-2, -1)


def _add_bias(rows: Tensor, bias: Tensor | None, counts: list[int]) -> Tensor:
    if bias is None:
        return rows
    lengths = torch.tensor(counts, device=rows.device)
    return rows + bias.repeat_interleave(lengths, dim=0, output_size=rows.size(0))


class _GroupedProduct(torch.autograd.Function):
    """rows [R, I] times weight [E, I, O], group by group -> [R, O]."""

    @staticmethod
    def forward(ctx, rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:  # type: ignore[no-untyped-def, override]
        ctx.save_for_backward(rows, weight, ends)
        return F.grouped_mm(rows, weight, offs=ends)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:  # type: ignore[no-untyped-def, override]
        rows, weight, ends = ctx.saved_tensors
        grad = grad.contiguous()  # an expanded gradient (stride 0) is refused
        grad_rows = F.grouped_mm(grad, weight.transpose(-2, -1), offs=ends) if ctx.needs_input_grad[0] else None
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = _grouped_weight_gradient(rows, grad, weight, ends)
        return grad_rows, grad_weight, None


def _grouped_weight_gradient(rows: Tensor, grad: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """[E, I, O] with the memory order of ``weight``; zeros where a group has no rows."""
    if weight.stride(-1) == 1:
        product = F.grouped_mm(rows.t(), grad, offs=ends)
    else:
        product = F.grouped_mm(grad.t(), rows, offs=ends).transpose(-2, -1)
    idle = torch.diff(ends, prepend=ends.new_zeros(1)) == 0
    return product.masked_fill_(idle.view(-1, 1, 1), 0)  # the kernel leaves an empty group's block as it found it
