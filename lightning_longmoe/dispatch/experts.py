"""The experts that one rank hosts, and their products over the rows of one chunk, with every buffer in the arena.

Letters: R rows of one stack in one chunk - e experts of the stack - H hidden size - F expert FFN size - G = 2F where
gated, else F - I inputs and O outputs of a product. *Stack*: the weights of the home experts, or of the guests; their
rows lie one after the other, so that the home weights need not be copied next to the guests'.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_longmoe.config import ExpertLayout
from lightning_longmoe.kernels.expert_grad import (
    accumulate_bias_gradient,
    accumulate_bytes,
    accumulate_weight_gradient,
    activation_backward_,
    activation_backward_bytes,
    adds_wide,
    bias_bytes,
    bias_dot,
    wide_dtype,
)
from lightning_longmoe.kernels.expert_mlp import expert_activation
from lightning_longmoe.runtime.ledger import Arena

_ALIGNMENT_BYTES = 16


@dataclass(frozen=True, eq=False)
class ExpertStack:
    """Weights of e experts, or wide sums of their gradients; None: absent, or not wanted."""

    gate_up_proj: Tensor | None
    down_proj: Tensor | None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None

    def items(self) -> list[tuple[str, Tensor]]:
        """(name, tensor) of those that are there, in one order on every rank."""
        return [(f.name, t) for f in fields(self) if (t := getattr(self, f.name)) is not None]

    def tensors(self) -> list[Tensor]:
        return [tensor for _, tensor in self.items()]


@dataclass(frozen=True, eq=False)
class Group:
    """The rows of one stack in one chunk.

    Attributes:
        counts: [e] rows of each expert, on the host.
        ends: [e] int32 on the device, where each expert's rows end.
    """

    counts: list[int]
    ends: Tensor

    @property
    def rows(self) -> int:
        return sum(self.counts)


@dataclass(frozen=True)
class ProductPaths:
    """Which code multiplies; a dry run takes those of the device that it stands for.

    Attributes:
        grouped: torch's grouped product, else a loop over experts.
        upcast: weight gradients of a narrow dtype are multiplied in float32 copies, tile by tile.
    """

    grouped: bool
    upcast: bool

    @staticmethod
    def on(device: torch.device, weights: ExpertStack) -> ProductPaths:
        """What this device and these weights allow."""
        assert weights.gate_up_proj is not None
        dtype = weights.gate_up_proj.dtype
        return ProductPaths(_can_group(device, weights), dtype != wide_dtype(dtype) and not adds_wide(device, dtype))


def _can_group(device: torch.device, weights: ExpertStack) -> bool:
    """torch's grouped product: bf16 on CUDA from compute capability 8.0, all strides multiples of 16 bytes."""
    tensors = weights.tensors()[:2]
    if device.type != "cuda" or any(t.dtype != torch.bfloat16 for t in tensors):
        return False
    if torch.cuda.get_device_capability(device) < (8, 0):
        return False
    lengths = [length for tensor in tensors for length in (*tensor.shape[1:], *tensor.stride()[:-1])]
    return all(length * 2 % _ALIGNMENT_BYTES == 0 for length in lengths)


class ExpertMath:
    """The products and activations of hosted experts.

    Args:
        arena: books every buffer and temporary.
        layout: of the weights.
        paths: which code multiplies.
    """

    def __init__(self, arena: Arena, layout: ExpertLayout, paths: ProductPaths) -> None:
        self.arena, self.layout, self.paths = arena, layout, paths

    def gate_up(self, rows: Tensor, stack: ExpertStack, group: Group) -> Tensor:
        """[R, H] -> [R, G], bias included."""
        assert stack.gate_up_proj is not None
        out = self._product("gate and up", rows, self._inputs_first(stack.gate_up_proj), group)
        return self._add_bias(out, stack.gate_up_bias, group)

    def activation(self, gate_up: Tensor) -> Tensor:
        """[R, G] -> [R, F]; releases ``gate_up``."""
        ffn = gate_up.size(1) // (2 if self.layout.gated else 1)
        temporaries = self._activation_temporaries() * gate_up.size(0) * ffn * gate_up.element_size()
        with self.arena.transient("activation temporaries", temporaries):
            act = expert_activation(gate_up, self.layout)
        if act is gate_up:
            return act
        self.arena.adopt("activation", act)
        self.arena.release(gate_up)
        return act

    def _activation_temporaries(self) -> int:
        clamps = 0 if self.layout.clamp is None else (2 if self.layout.gated else 1)
        if self.layout.activation == "gpt_oss":
            return 2 + clamps
        return clamps + (1 if self.layout.gated and self.layout.activation != "identity" else 0)

    def down(self, act: Tensor, stack: ExpertStack, group: Group) -> Tensor:
        """[R, F] -> [R, H], bias included."""
        assert stack.down_proj is not None
        out = self._product("expert output", act, self._inputs_first(stack.down_proj), group)
        return self._add_bias(out, stack.down_bias, group)

    def down_backward(self, grad: Tensor, stack: ExpertStack, group: Group) -> Tensor:
        """Gradient of the expert output [R, H] -> of the activation [R, F]."""
        assert stack.down_proj is not None
        return self._product("activation gradient", grad, self._inputs_first(stack.down_proj).transpose(1, 2), group)

    def activation_backward_(self, gate_up: Tensor, grad: Tensor, weights: Tensor) -> Tensor:
        """`lightning_longmoe.kernels.expert_grad.activation_backward_`; [R] wide, adopted."""
        nbytes = activation_backward_bytes(*grad.shape, grad.dtype)  # type: ignore[call-arg, arg-type]
        with self.arena.transient("activation temporaries", nbytes):
            return self.arena.adopt("routing weights", activation_backward_(gate_up, grad, weights, self.layout))

    def gate_up_backward(self, grad: Tensor, stack: ExpertStack, group: Group) -> Tensor:
        """Gradient of gate and up [R, G] -> of the rows [R, H]; releases ``grad``."""
        assert stack.gate_up_proj is not None
        rows = self._product("row gradient", grad, self._inputs_first(stack.gate_up_proj).transpose(1, 2), group)
        self.arena.release(grad)
        return rows

    def add_projection(self, total: Tensor | None, inputs: Tensor, grads: Tensor, group: Group) -> None:
        """total[e] += inputs_eᵀ · grads_e, laid out as the weight; nothing where ``total`` is None."""
        if total is None:
            return
        nbytes = accumulate_bytes(group.counts, inputs.size(1), grads.size(1), inputs.dtype, self.paths.upcast)
        with self.arena.transient("products in float32", nbytes):
            accumulate_weight_gradient(self._inputs_first(total), inputs, grads, group.counts)

    def add_bias(self, total: Tensor | None, grads: Tensor, weights: Tensor | None, group: Group) -> None:
        """total[e] += weighted sum of the rows of ``grads``; nothing where ``total`` is None."""
        if total is not None:
            with self.arena.transient("products in float32", bias_bytes(group.counts, grads.size(1), grads.dtype)):
                accumulate_bias_gradient(total, grads, weights, group.counts)

    def add_bias_dot(self, out: Tensor, grads: Tensor, bias: Tensor | None, group: Group) -> None:
        """out[r] += <grads[r], bias of its expert>; nothing where ``bias`` is None."""
        if bias is not None:
            with self.arena.transient("products in float32", bias_bytes(group.counts, grads.size(1), grads.dtype)):
                bias_dot(grads, bias, group.counts, out)

    def _inputs_first(self, weight: Tensor) -> Tensor:
        """[e, I, O]"""
        return weight if self.layout.transposed else weight.transpose(1, 2)

    def _product(self, name: str, rows: Tensor, weight: Tensor, group: Group) -> Tensor:
        """rows [R, I] times weight [e, I, O], group by group -> [R, O] with exactly R rows, all of them written."""
        if self.paths.grouped and rows.size(0):
            return self.arena.adopt(name, F.grouped_mm(rows, weight, offs=group.ends))
        out = self.arena.take(name, (rows.size(0), weight.size(2)), rows.dtype)
        parts = zip(rows.split(group.counts), weight.unbind(0), out.split(group.counts), strict=True)
        for part, block, slot in parts:
            if part.size(0):
                torch.mm(part, block, out=slot)
        return out

    def _add_bias(self, rows: Tensor, bias: Tensor | None, group: Group) -> Tensor:
        if bias is not None:
            for part, vector in zip(rows.split(group.counts), bias.unbind(0), strict=True):
                part += vector
        return rows
