"""The backward of `lightning_longmoe.kernels.expert_mlp`, in pieces that keep little memory alive.

Letters: R rows - E experts - I inputs and O outputs of a product - F expert FFN size - G = 2F where gated, else F.
*Wide*: float64 for float64, else float32; what gradients are accumulated in.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_longmoe.config import ExpertLayout
from lightning_longmoe.kernels.expert_mlp import _GPT_OSS_SLOPE

_TILE_ELEMENTS = 2**22
_TILE_TEMPORARIES = 9
_UPCAST_ROWS = 4096


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sums over ``dtype`` are accumulated in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def activation_backward_(gate_up: Tensor, grad: Tensor, weights: Tensor, layout: ExpertLayout) -> Tensor:
    """Turn a product's result and the gradient of the activation into what the weight gradients need, in place.

    With a = activation(gate_up) and out = weight · (a · down_projᵀ), and q the gradient of ``a`` without the weight:

    Args:
        gate_up: [R, G], bias included; afterwards the gradient of it.
        grad: [R, F], q; afterwards weight · a.
        weights: [R] wide.
        layout: of the experts.

    Returns:
        [R] wide, <q, a>: the gradient of the weight, but for the bias of the down projection.
    """
    if grad.is_meta:
        return torch.empty_like(weights)
    parts = [
        _activation_backward_tile(tile, q, w, layout)
        for tile, q, w in zip(*(t.split(_tile_rows(grad)) for t in (gate_up, grad, weights)), strict=True)
    ]
    return torch.cat(parts)


def activation_backward_bytes(rows: int, ffn_size: int, dtype: torch.dtype) -> int:
    """What `activation_backward_` allocates besides its result, at most."""
    tile = min(rows * ffn_size, max(_TILE_ELEMENTS, ffn_size))
    return _TILE_TEMPORARIES * tile * wide_dtype(dtype).itemsize


def _tile_rows(grad: Tensor) -> int:
    return max(1, _TILE_ELEMENTS // grad.size(1))


def _activation_backward_tile(gate_up: Tensor, grad: Tensor, weights: Tensor, layout: ExpertLayout) -> Tensor:
    wide, clamp = weights.dtype, layout.clamp
    gate_slot, up_slot = _halves(gate_up, layout)
    gate, q, weight = gate_slot.to(wide), grad.to(wide), weights.unsqueeze(1)
    act, slope = _nonlinearity_and_slope(gate if clamp is None else gate.clamp(max=clamp), layout)
    if clamp is not None:
        slope = slope * (gate <= clamp)
    grad_gate, grad_up = q * weight, None
    if up_slot is not None:
        up, up_slope = _up_and_slope(up_slot.to(wide), layout)
        grad_up = grad_gate * act if up_slope is None else grad_gate * act * up_slope
        grad_gate *= up
        act = act * up
    grad_weight = (q * act).sum(1)
    # from here on the slots are written; in a wide dtype the tensors above are views of them
    grad.copy_(act * weight)
    gate_slot.copy_(grad_gate.mul_(slope))
    if up_slot is not None and grad_up is not None:
        up_slot.copy_(grad_up)
    return grad_weight


def _up_and_slope(up: Tensor, layout: ExpertLayout) -> tuple[Tensor, Tensor | None]:
    """What multiplies the nonlinearity, and its derivative (None: 1)."""
    slope = None
    if layout.clamp is not None:
        slope = up.abs() <= layout.clamp
        up = up.clamp(-layout.clamp, layout.clamp)
    return (up + 1 if layout.activation == "gpt_oss" else up), slope


def _halves(gate_up: Tensor, layout: ExpertLayout) -> tuple[Tensor, Tensor | None]:
    if not layout.gated:
        return gate_up, None
    if layout.interleaved:
        return gate_up[:, ::2], gate_up[:, 1::2]
    gate, up = gate_up.chunk(2, dim=-1)
    return gate, up


def _nonlinearity_and_slope(gate: Tensor, layout: ExpertLayout) -> tuple[Tensor, Tensor]:
    """What multiplies ``up``, and its derivative."""
    if layout.activation == "silu":
        sigmoid = torch.sigmoid(gate)
        return gate * sigmoid, sigmoid * (1 + gate * (1 - sigmoid))
    if layout.activation == "gpt_oss":
        sigmoid = torch.sigmoid(_GPT_OSS_SLOPE * gate)
        return gate * sigmoid, sigmoid * (1 + _GPT_OSS_SLOPE * gate * (1 - sigmoid))
    if layout.activation == "gelu":
        below = 0.5 * (1 + torch.erf(gate * 0.5**0.5))
        return F.gelu(gate), below + gate * torch.exp(-0.5 * gate.square()) * (0.5 / torch.pi) ** 0.5
    assert layout.activation == "identity", layout.activation
    return gate, torch.ones_like(gate)


def accumulate_weight_gradient(total: Tensor, left: Tensor, right: Tensor, counts: list[int]) -> None:
    """total[e] += left_eᵀ · right_e for the rows of every expert; an idle expert's block stays as it is.

    Args:
        total: [E, I, O] wide; a transposed view is fine.
        left: [R, I], rows sorted by expert.
        right: [R, O], dtype of ``left``.
        counts: rows of each expert; they sum to R.
    """
    if total.is_meta:
        return
    for block, a, b in zip(total.unbind(0), left.split(counts), right.split(counts), strict=True):
        if not a.size(0):
            continue
        if block.stride(-1) != 1:  # write along the rows of the memory
            block, a, b = block.t(), b, a
        if a.dtype == block.dtype:
            block.addmm_(a.t(), b)
        elif adds_wide(a.device, a.dtype):
            torch.addmm(block, a.t(), b, out_dtype=block.dtype, out=block)
        else:
            for low, high in zip(a.split(_UPCAST_ROWS), b.split(_UPCAST_ROWS), strict=True):
                block.addmm_(low.to(block.dtype).t(), high.to(block.dtype))


def accumulate_bytes(counts: list[int], inputs: int, outputs: int, dtype: torch.dtype, upcast: bool) -> int:
    """What `accumulate_weight_gradient` allocates, at most."""
    if not upcast or dtype == wide_dtype(dtype):
        return 0
    rows = min(max(counts, default=0), _UPCAST_ROWS)
    return rows * (inputs + outputs) * wide_dtype(dtype).itemsize


@functools.cache
def adds_wide(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this device multiplies ``dtype`` into a float32 sum in place. Tried once; the answer is checked."""
    if device.type != "cuda":
        return False
    ones = torch.ones(16, 16, dtype=dtype, device=device)
    total = torch.full((16, 16), 2.0**-10, device=device)  # lost in a bfloat16 result of 16
    try:
        torch.addmm(total, ones.t(), ones, out_dtype=torch.float32, out=total)
    except (RuntimeError, NotImplementedError, TypeError):
        return False
    return bool((total == 16 + 2.0**-10).all())


def accumulate_bias_gradient(total: Tensor, rows: Tensor, weights: Tensor | None, counts: list[int]) -> None:
    """total[e] += sum over the rows of an expert, each times its weight.

    Args:
        total: [E, O] wide.
        rows: [R, O] sorted by expert.
        weights: [R] wide, or None for ones.
        counts: rows of each expert.
    """
    shares = [None] * len(counts) if weights is None else weights.split(counts)
    for block, part, share in zip(total.unbind(0), rows.split(counts), shares, strict=True):
        for index, tile in enumerate(part.split(_UPCAST_ROWS)):
            if share is None:
                block += tile.sum(0, dtype=block.dtype)
            else:
                start = index * _UPCAST_ROWS
                block.addmv_(tile.to(block.dtype).t(), share[start : start + tile.size(0)])


def bias_dot(rows: Tensor, bias: Tensor, counts: list[int], out: Tensor) -> None:
    """out[r] += <rows[r], bias of r's expert>; rows [R, O] sorted by expert, bias [E, O], out [R] wide."""
    for part, vector, slot in zip(rows.split(counts), bias.unbind(0), out.split(counts), strict=True):
        for tile, result in zip(part.split(_UPCAST_ROWS), slot.split(_UPCAST_ROWS), strict=True):
            result.addmv_(tile.to(out.dtype), vector.to(out.dtype))


def bias_bytes(counts: list[int], width: int, dtype: torch.dtype) -> int:
    """What the two functions above allocate, at most."""
    rows = 0 if dtype == wide_dtype(dtype) else min(max(counts, default=0), _UPCAST_ROWS)
    return (rows + 2) * width * wide_dtype(dtype).itemsize
