"""The small layers that the reference model is made of; each can initialise what it owns."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """x / rms(x) · weight, computed in float32 (float64 for float64) whatever the dtype of x."""

    def __init__(self, size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> the same shape and dtype."""
        if x.dtype in (torch.float32, torch.float64):
            return F.rms_norm(x, x.shape[-1:], self.weight.to(x.dtype), self.eps)
        return F.rms_norm(x.float(), x.shape[-1:], self.weight.float(), self.eps).to(x.dtype)


class Embedding(nn.Embedding):
    """Token embedding; its weight may be shared with a head."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.embedding_dim**-0.5)


class Linear(nn.Linear):
    """A projection without bias whose initial outputs have the variance of its inputs."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.in_features**-0.5)


class GatedMLP(nn.Module):
    """down(silu(gate) · up) with [gate; up] from one projection; the shared expert, which every token passes."""

    def __init__(self, hidden_size: int, ffn_size: int) -> None:
        super().__init__()
        self.gate_up_proj = Linear(hidden_size, 2 * ffn_size)
        self.down_proj = Linear(ffn_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H]."""
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)
