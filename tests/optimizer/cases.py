"""Parameters and gradients for every test of the optimizer: odd sizes, an empty one, gradients that are missing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_longmoe.optimizer import OffloadStreamAdamW, ReferenceAdamW

SHAPES = [(5, 7), (3,), (0, 4), (123,), (40, 33), (1,), (2, 3, 16)]


def parameters(dtype: torch.dtype | list[torch.dtype] = torch.float32, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    dtypes = dtype if isinstance(dtype, list) else [dtype] * len(SHAPES)
    made = [torch.randn(shape, generator=generator) for shape in SHAPES]
    return [tensor.to(kind).requires_grad_() for tensor, kind in zip(made, dtypes, strict=True)]


def groups(params: list[Tensor]) -> list[dict[str, Any]]:
    """Three groups with settings of their own."""
    return [
        {"params": params[:3], "lr": 0.05},
        {"params": params[3:5], "weight_decay": 0.3, "betas": (0.8, 0.95)},
        {"params": params[5:], "eps": 1e-3, "lr": torch.tensor(0.02)},
    ]


def set_gradients(params: list[Tensor], step: int, missing: bool = True) -> None:
    """The same gradients for equal arguments; in each step other parameters have none."""
    generator = torch.Generator().manual_seed(100 + step)
    for index, parameter in enumerate(params):
        gradient = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        parameter.grad = None if missing and (index + step) % 4 == 0 else gradient


def assert_same_bits(ours: OffloadStreamAdamW, params: list[Tensor], reference: ReferenceAdamW) -> None:
    """Weights, masters and moments."""
    for parameter, (expected, master) in zip(params, reference.pairs, strict=True):
        assert torch.equal(parameter, expected)
        saved = reference.optimizer.state.get(master)
        if saved and parameter.numel():
            state = ours.state[parameter]
            assert float(state["step"]) == float(saved["step"])
            assert torch.equal(state["exp_avg"], saved["exp_avg"])
            assert torch.equal(state["exp_avg_sq"], saved["exp_avg_sq"])
            if master is not expected:
                assert torch.equal(state["master"], master)
