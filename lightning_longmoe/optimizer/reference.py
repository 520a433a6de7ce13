"""The plain reference of `OffloadStreamAdamW`: torch's fused AdamW over master weights, all on the device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from lightning_longmoe.optimizer.store import master_dtype


class ReferenceAdamW:
    """Steps ``torch.optim.AdamW(fused=True)`` on masters, and rounds them into the parameters.

    Args:
        params: plain tensors, or groups of them as dicts.
        settings: of torch's AdamW.
    """

    def __init__(self, params: Iterable[Any], **settings: Any) -> None:
        groups = [group if isinstance(group, dict) else {"params": [group]} for group in params]
        self.pairs: list[tuple[Tensor, Tensor]] = []
        of_masters = []
        for group in groups:
            masters = []
            for parameter in group["params"]:
                wide = master_dtype(parameter.dtype)
                master = parameter if wide is None else parameter.detach().to(wide).requires_grad_()
                self.pairs.append((parameter, master))
                masters.append(master)
            of_masters.append({**group, "params": masters})
        self.optimizer = torch.optim.AdamW(of_masters, fused=True, **settings)

    @torch.no_grad()
    def step(self, max_norm: float | None = None) -> None:
        """One step, after clipping the masters' gradients to ``max_norm``."""
        for parameter, master in self.pairs:
            if master is not parameter:
                master.grad = None if parameter.grad is None else parameter.grad.to(master.dtype)
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_([master for _, master in self.pairs], max_norm)
        self.optimizer.step()
        for parameter, master in self.pairs:
            if master is not parameter:
                parameter.copy_(master)
